"""`dsv4dist bench`: usage, what is printed, and how failed measurements end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.kernels.implementations  # noqa: F401  # before triton
from dsv4dist.bench import kernels
from tests.cli.support import fails, json_lines, succeeds

Capture = pytest.CaptureFixture[str]
ROW = {"bench": "kernels", "op": "a", "method": "triton", "heads": 8, "median_us": 2.0, "cold": True, "bytes": 9}


def give(rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "bench_kernels", lambda *arguments: iter(rows))


def test_scheduler_rows(capsys: Capture) -> None:
    rows = json_lines(succeeds(["bench", "scheduler", "--requests", "1", "--repeats", "2", "--json"], capsys))
    assert [row["method"] for row in rows] == ["plan", "pack"]
    assert {"median_us", "p10_us", "p90_us", "hardware", "versions", "commit", "command"} <= set(rows[0])


def test_alone_it_says_what_there_is(capsys: Capture) -> None:
    assert "Time the driver's planning" in succeeds(["bench"], capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kernels", "--op", "rms_norm,norm"], "--op 'norm' is none of sparse_attention,"),
        (["kernels", "--heads", "8,x"], "found '8,x'"),
        (["kernels", "--tp", "0"], "found '0'"),
        (["kernels", "--from", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["control", "--k", "1,999999"], "--k 999999: a packet has at most 256 steps"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, capsys: Capture) -> None:
    fails(["bench", *arguments], 2, message, capsys)


@pytest.mark.parametrize("arguments", [["kernels"], ["attention"], ["attention", "--sweep-splits"], ["prefill"]])
def test_timings_need_a_gpu(arguments: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    fails(["bench", *arguments, "--json"], 1, f"bench {arguments[0]}: timings need a GPU", capsys)


def test_json_rows_carry_the_machine(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    give([ROW], monkeypatch)
    (row,) = json_lines(succeeds(["bench", "kernels", "--json"], capsys))
    assert ROW.items() <= row.items()
    assert {"hardware", "versions", "commit", "command"} <= set(row)


def test_a_failed_measurement_ends_with_1_after_all_rows(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    give([{"bench": "kernels", "op": "b", "method": "triton", "error": "RuntimeError: x"}, ROW], monkeypatch)
    out = fails(["bench", "kernels", "--json"], 1, "1 of 2 measurements failed", capsys)
    assert [row["op"] for row in json_lines(out)] == ["b", "a"]


def test_a_table_for_each_operation(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    give([ROW, {"bench": "kernels", "op": "b", "method": "torch", "tokens": 1}], monkeypatch)
    lines = succeeds(["bench", "kernels"], capsys).splitlines()
    assert lines[0].split() == ["bench", "op", "method", "heads", "median_us", "cold", "bytes"]
    assert lines[1].split() == ["kernels", "a", "triton", "8", "2", "yes", "9"]
    assert lines[2].split() == ["bench", "op", "method", "tokens"]


def test_a_recorded_run_becomes_markdown(capsys: Capture, tmp_path: Path) -> None:
    machine = {"hardware": "GPU", "versions": {"torch": "2.11"}, "commit": "abc", "command": "dsv4dist bench kernels"}
    rows = [ROW | machine, ROW | machine | {"heads": 16}, {"bench": "kernels", "op": "b", "method": "a|b"} | machine]
    recorded = tmp_path / "run.jsonl"
    recorded.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert succeeds(["bench", "kernels", "--from", str(recorded)], capsys).splitlines() == [
        "GPU; torch 2.11; commit abc; `dsv4dist bench kernels`",
        "",
        "| op | method | heads | median_us | cold |",
        "| --- | --- | --: | --: | --- |",
        "| a | triton | 8 | 2 | yes |",
        "| a | triton | 16 | 2 | yes |",
        "",
        "| op | method |",
        "| --- | --- |",
        "| b | a\\|b |",
    ]
    recorded.write_text('{"bench": "kernels"}\nnoise\n')
    fails(["bench", "kernels", "--from", str(recorded)], 1, "run.jsonl line 2: not a row", capsys)
    recorded.write_bytes(b'{"bench": "\xff"}\n')
    fails(["bench", "kernels", "--from", str(recorded)], 1, "run.jsonl line 1: not a row", capsys)
    recorded.write_text("")
    fails(["bench", "kernels", "--from", str(recorded)], 1, "holds no rows", capsys)


def test_kernels_are_measured_without_ray_and_zmq() -> None:
    """GPU machines for measurements need neither."""
    program = """
import sys
sys.modules["ray"] = sys.modules["zmq"] = None
from dsv4dist.cli.app import run
sys.exit(run(["bench", "kernels", "--op", "rms_norm"]))
"""
    if torch.cuda.is_available():
        pytest.skip("would measure")
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "timings need a GPU" in ended.stderr
