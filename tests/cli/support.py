"""Running the command line inside the test process: the same code path, without a start of Python for each case."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsv4dist.cli.app import run

LOCAL = ["--distributed-executor-backend", "local", "--device", "cpu", "--max-model-len", "256"]


def succeeds(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must exit 0; returns its standard output."""
    capsys.readouterr()
    code = run(arguments)
    streams = capsys.readouterr()
    assert code == 0, streams.err
    return streams.out


def fails(arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must exit with `code` and exactly one line, with `message` in it; returns standard output."""
    capsys.readouterr()
    assert run(arguments) == code
    streams = capsys.readouterr()
    assert streams.err.startswith("dsv4dist: error: "), streams.err
    assert streams.err.count("\n") == 1, streams.err
    assert message in streams.err
    assert "Traceback" not in streams.err
    return streams.out


def json_lines(text: str | Path) -> list[dict[str, Any]]:
    lines = text.read_text(encoding="utf-8") if isinstance(text, Path) else text
    return [json.loads(line) for line in lines.splitlines()]
