"""`score` in one process. Oracle: log-softmax in float64 of the dumped logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from dsv4dist.cli.app import run
from tests.cli.support import LOCAL, fails, json_lines, succeeds

Capture = pytest.CaptureFixture[str]


def score(model: Path, *more: str | Path) -> list[str]:
    return ["score", "--model", str(model), *LOCAL, *map(str, more)]


def test_logprobs_are_those_of_the_dumped_logits(
    checkpoint: Callable[..., Path], tmp_path: Path, capsys: Capture
) -> None:
    model, dump = checkpoint("tiny"), tmp_path / "logits.safetensors"
    prompts = ["--prompt", "some text", "--prompt-ids", "7", "--prompt-ids", ",".join(map(str, range(2, 90)))]
    # Groups of 64 tokens: the sequences are scored in several calls.
    more = ["--json", "--dump-logits", dump, "--max-num-batched-tokens", "64"]
    rows = json_lines(succeeds(score(model, *prompts, *more), capsys))
    logits = load_file(dump)
    assert [row["id"] for row in rows] == ["0", "1", "2"] == sorted(logits)
    assert rows[2]["token_ids"] == list(range(2, 90))
    for row in rows:
        ids, values = row["token_ids"], logits[row["id"]].astype(np.float64)
        assert logits[row["id"]].dtype == np.float32
        assert values.shape == (len(ids), 512)
        logprobs = values - np.log(np.exp(values).sum(axis=1, keepdims=True))
        assert row["token_logprobs"][0] is None
        expected = [logprobs[i, token] for i, token in enumerate(ids[1:])]
        np.testing.assert_allclose(row["token_logprobs"][1:], expected, atol=1e-4)
    text = succeeds(score(model, *prompts), capsys)
    total = sum(rows[0]["token_logprobs"][1:])
    assert f"[0] {len(rows[0]['token_ids'])} tokens: log-probability {total:.6g}" in text


def test_bad_lines_among_good_ones(checkpoint: Callable[..., Path], tmp_path: Path, capsys: Capture) -> None:
    inputs, output, dump = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "logits.safetensors"
    inputs.write_text(
        '{"id": "a", "prompt_token_ids": [1, 2], "max_tokens": 4}\n'
        '{"id": "b", "prompt_token_ids": [1, 600]}\n'
        '{"id": "c"}\n'
        '{"id": "d", "prompt_token_ids": [3, 4]}\n'
    )
    more = ["--input", inputs, "--output", output, "--dump-logits", dump]
    assert run(score(checkpoint("tiny-swa"), *more)) == 1
    errors = capsys.readouterr().err
    assert "line 2: token id 600" in errors
    assert "line 3: there is neither prompt" in errors
    rows = {row["id"]: row for row in json_lines(output)}
    assert len(rows["a"]["token_logprobs"]) == len(rows["d"]["token_logprobs"]) == 2
    assert {name for name, row in rows.items() if "error" in row} == {"b", "c"}
    assert set(load_file(dump)) == {"a", "d"}
    fails(score(checkpoint("tiny-swa"), *more), 2, "--output", capsys)
    output.unlink()
    fails(score(checkpoint("tiny-swa"), *more), 2, "--dump-logits", capsys)


def test_logits_need_a_file_of_their_own(checkpoint: Callable[..., Path], tmp_path: Path, capsys: Capture) -> None:
    model, place = checkpoint("tiny-swa"), tmp_path / "x"
    for more, message in (
        (["--output", place, "--dump-logits", place], "--output and --dump-logits are both"),
        (["--dump-logits", "/dev/null"], "--dump-logits /dev/null is no regular file"),
        (["--dump-logits", tmp_path], "is a directory"),
        (["--dump-logits", tmp_path / "no" / "x"], "there is no directory"),
    ):
        fails(score(model, "--prompt-ids", "1,2", *more), 2, message, capsys)
    assert not Path("/dev/null").is_file()
    assert not any(tmp_path.iterdir())


def test_reserved_name(checkpoint: Callable[..., Path], tmp_path: Path, capsys: Capture) -> None:
    inputs = tmp_path / "in.jsonl"
    inputs.write_text('{"id": "__metadata__", "prompt": "a"}\n')
    more = ["--input", inputs, "--dump-logits", tmp_path / "logits.safetensors"]
    fails(score(checkpoint("tiny-swa"), *more), 2, "'__metadata__'", capsys)
