from __future__ import annotations

from pathlib import Path

import pytest

from dsv4dist.cli.app import run
from dsv4dist.config.model import load_model_config
from tests.cli.support import fails, json_lines, succeeds


def test_checkpoint_of_either_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for format in ("release", "transformers"):
        directory = tmp_path / format
        arguments = ["make-checkpoint", str(directory), "--preset", "tiny-swa", "--format", format, "--seed", "3"]
        (row,) = json_lines(succeeds([*arguments, "--json"], capsys))
        assert (row["directory"], row["seed"]) == (str(directory), 3)
        assert row["bytes"] == sum(file.stat().st_size for file in directory.iterdir())
    assert load_model_config(tmp_path / "release") == load_model_config(tmp_path / "transformers")
    assert "release format" in succeeds(["make-checkpoint", str(tmp_path / "release")], capsys)


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fails(["make-checkpoint", str(tmp_path / "x"), "--preset", "big", "--format", "zip"], 2, "tiny", capsys)
    (tmp_path / "thesis.txt").write_text("years of work")
    assert run(["make-checkpoint", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert str(tmp_path) in error
    assert error.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]
