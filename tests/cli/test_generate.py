"""`generate` in one process. Oracle for tokens: the engine's own Python interface, tested elsewhere."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from dsv4dist.cli.app import run
from dsv4dist.engine.engine import Engine
from dsv4dist.errors import WorkerError
from tests.cli.support import LOCAL, fails, json_lines, succeeds

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("tiny-swa")


def generate(model: Path, *more: str | Path) -> list[str]:
    return ["generate", "--model", str(model), *LOCAL, *map(str, more)]


def write_lines(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_prompts_on_the_command_line(model: Path, engine: Callable[..., Engine], capsys: Capture) -> None:
    prompts: list[Any] = ["hello", "second", [5, 6, 7]]
    arguments = [
        "--prompt",
        "hello",
        "--prompt",
        "second",
        "--prompt-ids",
        "5,6,7",
        "--max-tokens",
        "5",
        "--ignore-eos",
    ]
    rows = json_lines(succeeds(generate(model, *arguments, "--json"), capsys))
    served = engine(model)
    for row, prompt in zip(sorted(rows, key=lambda row: int(row["id"])), prompts, strict=True):
        ids = served.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        assert row["prompt_token_ids"] == ids
        assert len(row["token_ids"]) == 5
        assert row["text"] == served.tokenizer.decode(row["token_ids"])
        assert row["finish_reason"] == "length"
        assert set(row["metrics"]) >= {"ttft_s", "decode_s", "cached_tokens"}
        assert "error" not in row
    text = succeeds(generate(model, *arguments), capsys)
    for row in rows:
        assert f"tokens: {' '.join(map(str, row['token_ids']))}\n" in text
    assert "'hello'" in text
    assert "3 requests, 15 new tokens in " in text


def test_file_to_file(model: Path, tmp_path: Path, capsys: Capture) -> None:
    inputs = write_lines(
        tmp_path / "in.jsonl",
        {"id": "a", "prompt": "text", "max_tokens": 2, "ignore_eos": True},
        {"id": "b", "prompt_token_ids": [1, 2, 3], "ignore_eos": True},
        {"id": "c", "prompt_token_ids": [1, 2, 3], "temperature": 1.0, "seed": 9, "ignore_eos": True},
        {"id": "d", "prompt_token_ids": [1, 2, 3], "temperature": 1.0, "seed": 9, "ignore_eos": True},
    )
    output = tmp_path / "out.jsonl"
    assert succeeds(generate(model, "--input", inputs, "--output", output, "--max-tokens", "6"), capsys) == ""
    rows = {row["id"]: row for row in json_lines(output)}
    assert {name: len(row["token_ids"]) for name, row in rows.items()} == {"a": 2, "b": 6, "c": 6, "d": 6}
    assert rows["c"]["token_ids"] == rows["d"]["token_ids"]
    before = output.read_bytes()
    fails(generate(model, "--input", inputs, "--output", output), 2, "exists already", capsys)
    fails(generate(model, "--input", inputs, "--output", inputs, "--overwrite"), 2, "is the input file", capsys)
    assert output.read_bytes() == before
    out = succeeds(generate(model, "--input", inputs, "--output", output, "--overwrite", "--json"), capsys)
    assert json_lines(out) == json_lines(output)


def test_bad_lines_are_reported_and_the_good_ones_served(model: Path, tmp_path: Path, capsys: Capture) -> None:
    inputs = write_lines(
        tmp_path / "in.jsonl",
        {"id": "good", "prompt": "text", "max_tokens": 2},
        "{",
        {"id": "empty", "prompt": ""},
        {"id": "none", "prompt_token_ids": []},
        {"id": "id", "prompt_token_ids": [1, 512]},
        {"id": "negative", "prompt_token_ids": [-1]},
        {"id": "long", "prompt_token_ids": [1] * 300},
        {"id": "hot", "prompt": "text", "temperature": -2},
        {"id": "also good", "prompt_token_ids": [4], "max_tokens": 2},
    )
    output = tmp_path / "out.jsonl"
    assert run(generate(model, "--input", inputs, "--output", output)) == 1
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    rows = json_lines(output)
    assert len(rows) == 9
    assert {row["id"] for row in rows if row["finish_reason"] != "error"} == {"good", "also good"}
    expected = {
        2: ("line-2", "not JSON"),
        3: ("empty", "empty"),
        4: ("none", "empty"),
        5: ("id", "512"),
        6: ("negative", "-1"),
        7: ("long", "300"),
        8: ("hot", "temperature is -2"),
    }
    for number, (name, words) in expected.items():
        (row,) = [row for row in rows if row.get("line") == number]
        assert (row["id"], row["finish_reason"], row["token_ids"]) == (name, "error", [])
        assert words in row["error"]
        assert f"dsv4dist: error: line {number}: {row['error']}\n" in errors
    assert errors.endswith(f"dsv4dist: 2 done, 7 failed; results in {output}\n")


def test_one_bad_prompt_is_one_line(model: Path, capsys: Capture) -> None:
    fails(generate(model, "--prompt-ids", "999"), 1, "--prompt-ids 1: ", capsys)
    fails(generate(model, "--prompt", ""), 1, "--prompt 1: ", capsys)
    fails(generate(model, "--prompt", "9z" * 300), 1, "--prompt 1: ", capsys)


def test_a_token_that_makes_logits_infinite_fails_its_request_alone(
    model: Path, tmp_path: Path, capsys: Capture
) -> None:
    damaged = shutil.copytree(model, tmp_path / "damaged")
    tensors = load_file(damaged / "model.safetensors")
    tensors["embed.weight"][7] = float("nan")
    save_file(tensors, damaged / "model.safetensors")
    more = ["--prompt-ids", "5,6", "--prompt-ids", "5,7", "--ignore-eos", "--temperature", "1", "--json"]
    expected, _ = json_lines(succeeds(generate(model, *more), capsys))
    bad, good = json_lines(fails(generate(damaged, *more), 1, "--prompt-ids 2: the logits are not finite", capsys))
    assert good["token_ids"] == expected["token_ids"]
    assert (bad["token_ids"], bad["finish_reason"]) == ([], "error")


def test_text_without_a_tokenizer(model: Path, tmp_path: Path, capsys: Capture) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(model / name)
    fails(generate(tmp_path, "--prompt", "text"), 1, "tokenizer.json", capsys)
    (row,) = json_lines(succeeds(generate(tmp_path, "--prompt-ids", "1,2", "--json"), capsys))
    assert "text" not in row


def test_no_requests(model: Path, tmp_path: Path, capsys: Capture) -> None:
    inputs = write_lines(tmp_path / "in.jsonl", "", " ")
    assert run(generate(model, "--input", inputs)) == 0
    assert capsys.readouterr().err == "dsv4dist: the input holds no requests\n"


def test_lost_ranks_are_told_once_and_finished_requests_kept(
    model: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.jsonl"
    step = Engine._step

    def step_until_one_is_done(self: Engine) -> None:
        if self._scheduler.unfinished and len(json_lines(output)) == 1:
            raise WorkerError("rank 1 is gone")
        step(self)

    monkeypatch.setattr(Engine, "_step", step_until_one_is_done)
    inputs = write_lines(
        tmp_path / "in.jsonl",
        {"id": "short", "prompt": "a", "max_tokens": 1},
        {"id": "long", "prompt": "a", "max_tokens": 9, "ignore_eos": True},
        {"id": "longer", "prompt": "a", "max_tokens": 90, "ignore_eos": True},
    )
    fails(generate(model, "--input", inputs, "--output", output), 1, "rank 1 is gone", capsys)
    rows = {row["id"]: row for row in json_lines(output)}
    assert rows["short"]["finish_reason"] == "length"
    for name in ("long", "longer"):
        assert (rows[name]["finish_reason"], rows[name]["error"]) == ("error", "rank 1 is gone")
