"""Facts about the machine, and no confusion about who answers to a name."""

from __future__ import annotations

import sys
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path

import pytest

from dsv4dist.cli.info import aiter_version
from dsv4dist.kernels.ops import Ops
from tests.cli.support import json_lines, succeeds


def test_one_row_per_operation(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json_lines(succeeds(["info", "--json"], capsys))
    assert [row["op"] for row in rows] == [field.name for field in fields(Ops)]
    assert all(row["implementation"] and row["why"] for row in rows)
    assert rows[0]["versions"]["ray"] == version("ray")
    text = succeeds(["info"], capsys)
    for word in (version("torch"), rows[0]["platform"], rows[0]["op"], rows[0]["why"]):
        assert word in text


def install(directory: Path, owner: str, *files: str) -> None:
    for file in (*files, f"{owner}-1.5.dist-info/METADATA"):
        (directory / file).parent.mkdir(parents=True, exist_ok=True)
        (directory / file).write_text("raise RuntimeError('must not be imported')")
    (directory / f"{owner}-1.5.dist-info/METADATA").write_text(f"Name: {owner.replace('_', '-')}\nVersion: 1.5\n")
    (directory / f"{owner}-1.5.dist-info/top_level.txt").write_text("aiter\n")


@pytest.mark.parametrize(
    ("owner", "files", "expected"),
    [
        ("amd_aiter", ("aiter/__init__.py", "aiter/ops/shuffle.py"), "amd-aiter 1.5"),
        ("aiter", ("aiter/__init__.py",), "not AMD's: aiter 1.5 answers to the name aiter"),
        ("aiter", ("aiter.py",), "not AMD's: aiter 1.5 answers to the name aiter"),
    ],
)
def test_whose_aiter(
    owner: str, files: tuple[str, ...], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, owner, *files)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert aiter_version() == expected
