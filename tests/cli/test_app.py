"""Exit codes, one-line errors, and what is imported."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save_file

import dsv4dist
from dsv4dist.cli import info
from dsv4dist.cli.app import run
from dsv4dist.errors import ShapeError
from tests.cli.support import LOCAL, fails, succeeds

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def copy(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A checkpoint that a test may damage."""
    return shutil.copytree(checkpoint("tiny-swa"), tmp_path / "copy")


def generate(model: Path | str, *more: str) -> list[str]:
    return ["generate", "--model", str(model), *LOCAL, "--prompt-ids", "1,2,3", *more]


def test_version_and_help(capsys: Capture) -> None:
    assert succeeds(["--version"], capsys) == f"dsv4dist {dsv4dist.__version__}\n"
    text = succeeds(["generate", "--help"], capsys)
    for option in ("--tp", "--tensor-parallel-size", "--max-num-batched-tokens", "auto|bfloat16|float32", "--input"):
        assert option in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--prompt", "a"], "Missing option '--model'"),
        (["generate", "--model", "x", "--promt", "a"], "--promt"),
        (["generate", "--model", "x", "--max-tokens=many"], "found 'many'"),
        (["generat"], "'generat'"),
        (["generate", "--model", "x"], "there is no input"),
        (["generate", "--model", "x", "--prompt", "a", "--input", "f"], "give one kind of input"),
        (["generate", "--model", "x", "--prompt-ids", "1,b"], "--prompt-ids 1: 'b' is not a token id"),
        (["generate", "--model", "x", "--input", "/nowhere.jsonl"], "--input /nowhere.jsonl: No such file"),
        (["score", "--model", "x", "--prompt", "a", "--kernels", "fast"], "--kernels is 'fast'; choose from auto,"),
        (["make-checkpoint", "/tmp/x", "--preset", "big"], "'big'"),
        (["info", "--kernels", "fast"], "--kernels is 'fast'"),
        (["compile", "--arch", "gfx942,gfx000"], "--arch: kernels are not compiled for 'gfx000'; choose from gfx90a,"),
        (["generate", "--model", "x", "--prompt", "a", "--step-timeout-s", "inf"], "--step-timeout-s is inf"),
        (["generate", "--model", "x", "--prompt", "a", "--placement-timeout-s", "nan"], "--placement-timeout-s is nan"),
        (
            ["generate", "--model", "x", "--prompt", "a", "--trace", "/nowhere/t"],
            "--trace /nowhere/t: there is no direc",
        ),
    ],
    ids=str,
)
def test_wrong_usage(arguments: list[str], message: str, capsys: Capture) -> None:
    assert fails(arguments, 2, message, capsys) == ""


def test_no_such_directory(tmp_path: Path, capsys: Capture) -> None:
    fails(generate(tmp_path / "nowhere"), 1, f"{tmp_path}/nowhere: no such directory", capsys)


def test_damaged_configuration(copy: Path, capsys: Capture) -> None:
    config = copy / "config.json"
    raw = json.loads(config.read_text())
    config.write_text(json.dumps(raw | {"model_type": "llama"}))
    fails(generate(copy), 1, "config.json: model_type is 'llama'", capsys)
    config.write_text("{")
    fails(generate(copy), 1, "config.json: not readable as JSON", capsys)
    config.unlink()
    fails(generate(copy), 1, "there is no config.json", capsys)


def test_damaged_weights(copy: Path, capsys: Capture) -> None:
    weights = copy / "model.safetensors"
    whole = weights.read_bytes()
    tensors = load(whole)
    weights.write_bytes(whole[: len(whole) // 2])
    fails(generate(copy), 1, "model.safetensors", capsys)
    weights.write_bytes(whole[:6])
    fails(generate(copy), 1, "model.safetensors", capsys)
    save_file({name: one for name, one in tensors.items() if name != "layers.1.attn.wkv.weight"}, weights)
    fails(generate(copy), 1, "layers.1.attn.wkv.weight", capsys)
    save_file(tensors | {"norm.weight": torch.ones(7, dtype=torch.bfloat16)}, weights)
    fails(generate(copy), 1, "norm.weight", capsys)
    weights.unlink()
    fails(generate(copy), 1, "safetensors", capsys)


def test_options_that_this_model_does_not_allow(checkpoint: Callable[..., Path], capsys: Capture) -> None:
    model = checkpoint("tiny-swa")
    fails(generate(model, "--tp", "3", "--distributed-executor-backend", "ray"), 2, "size 3 does not divide", capsys)
    fails(generate(model, "--max-model-len", "99999999"), 2, "--max-model-len is 99999999", capsys)
    fails(
        generate(model, "--temperature", "-1", "--top-p", "2"),
        2,
        "temperature is -1.0; expected 0 to 3.4e+38; top_p",
        capsys,
    )
    fails(generate(model, "--tp", "2"), 2, "the local executor holds one rank", capsys)
    if not torch.cuda.is_available():
        fails(generate(model, "--device", "cuda"), 2, "--device: PyTorch finds no GPU here", capsys)


@pytest.mark.ray
def test_more_ranks_than_the_cluster_can_place(checkpoint: Callable[..., Path], capsys: Capture) -> None:
    import ray

    ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="ERROR")
    try:
        arguments = ["generate", "--model", str(checkpoint("tiny-swa")), "--device", "cpu", "--prompt", "a"]
        fails([*arguments, "--tp", "2", "--placement-timeout-s", "2"], 1, "ray status", capsys)
    finally:
        ray.shutdown()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ShapeError("x", "[2]", "[3]"), "x: expected [2], got [3]"),
        (
            RuntimeError("first\nsecond"),
            "unexpected RuntimeError: first second; this is a bug in dsv4dist: set DSV4_DEBUG=1",
        ),
        (OSError(errno.ENOSPC, "No space left on device", "out.jsonl"), "out.jsonl: No space left on device"),
        (MemoryError(), "memory is used up"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_failures_are_one_line(
    error: Exception, message: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Any:
        raise error

    monkeypatch.setattr(info, "platform_name", broken)
    fails(["info"], 1, message, capsys)
    monkeypatch.setenv("DSV4_DEBUG", "1")
    assert run(["info"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_nothing_heavy_is_imported_early() -> None:
    """`import dsv4dist`, help and wrong usage answer without torch and ray."""
    program = """
import sys
import dsv4dist
from dsv4dist.cli.app import run
from dsv4dist.cli.signals import Interrupted
codes = [run(["--help"]), run(["generate", "--help"]), run(["generate", "--model", "/nowhere", "--prompt", "a"])]
heavy = {"torch", "ray", "transformers", "triton", "zmq"} & {name.partition(".")[0] for name in sys.modules}
print(codes, sorted(heavy), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[0, 0, 1] []"


def ended(command: str) -> tuple[int, str, str]:
    """Run a shell command that has this program as $CLI; returns code, standard output and standard error."""
    program = f"CLI='{sys.executable} -m dsv4dist'; {command}"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", program], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_closed_standard_streams() -> None:
    code, _, err = ended("$CLI generate --model x --input - <&-")
    assert (code, err) == (2, "dsv4dist: error: --input -: standard input is closed; give a file of JSON lines\n")
    code, _, err = ended("$CLI plan --model flash --tp 8 --json >&-")
    assert (code, err.count("\n")) == (0, 0)
    code, _, err = ended("$CLI info --json >&-")
    assert (code, err.count("\n")) == (2, 1)
    assert "--json: standard output is closed" in err
    assert ended("$CLI generate --model /nowhere --prompt a 2>&-") == (1, "", "")


def test_characters_that_a_terminal_lacks_are_escaped() -> None:
    code, _, err = ended("PYTHONIOENCODING=ascii $CLI generate --model /nowhere/模型 --prompt é")
    assert (code, err) == (1, "dsv4dist: error: /nowhere/\\u6a21\\u578b: no such directory; give the folder that holds "
                             "config.json and the weights\n")  # fmt: skip
    code, out, _ = ended("PYTHONIOENCODING=ascii $CLI make-checkpoint /tmp/$$é --preset tiny-swa; rm -r /tmp/$$é")
    assert code == 0
    assert "\\xe9: tiny-swa" in out


def test_a_reader_that_goes_away_is_told() -> None:
    code, out, err = ended("(sleep 1; $CLI info --json) | true")
    assert (code, out) == (1, "")
    assert err.startswith("dsv4dist: error: standard output was closed before everything was written")
    assert err.count("\n") == 1


def test_module_exits_with_the_code() -> None:
    code, out, err = ended("$CLI generate --model /nowhere --tp x")
    assert (code, out, err.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("error", [SystemError("returned a result with an exception set"), ImportError("half done")])
def test_a_signal_that_became_another_error_is_still_a_signal(
    error: Exception, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's compiled calls make a SystemError of it, imports leave modules without their contents."""

    class Interrupting:
        def main(self, **options: object) -> None:
            raise error

    monkeypatch.setattr("dsv4dist.cli.app.received_signal", lambda: signal.SIGTERM)  # a real one would end the tests
    monkeypatch.setattr("dsv4dist.cli.app.get_command", lambda app: Interrupting())
    assert run(["generate"]) == 128 + signal.SIGTERM
    assert "interrupted by SIGTERM" in capsys.readouterr().err
