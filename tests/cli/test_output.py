"""Result files: nothing that exists is lost, nothing that is finished is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from dsv4dist.cli.options import OptionError
from dsv4dist.cli.output import check_output, open_results
from tests.cli.support import json_lines


def test_existing_file_is_refused_and_kept(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("old\n")
    with (
        pytest.raises(OptionError, match=r"out\.jsonl exists already.*--overwrite"),
        open_results(output, False, False),
    ):
        pass
    assert output.read_text() == "old\n"


def test_overwriting_keeps_the_old_lines_until_there_is_a_new_one(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("old and longer than what follows\n" * 9)
    with open_results(output, True, False):
        pass
    assert output.read_text().startswith("old")
    with open_results(output, True, False) as lines:
        lines.write({"id": "a"})
        lines.write({"id": "b"})
    assert json_lines(output) == [{"id": "a"}, {"id": "b"}]


def test_lines_are_there_as_soon_as_they_are_written(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with suppress(RuntimeError), open_results(output, False, False) as lines:
        lines.write({"id": "a", "text": "雪\n"})
        assert json_lines(output) == [{"id": "a", "text": "雪\n"}]
        raise RuntimeError
    assert json_lines(output) == [{"id": "a", "text": "雪\n"}]


def test_new_file_without_lines_is_removed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), open_results(tmp_path / "out.jsonl", False, False):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_unusable_places(tmp_path: Path) -> None:
    for bad in (tmp_path, tmp_path / "missing" / "out.jsonl"):
        with pytest.raises(OptionError, match=f"--output {bad}: "), open_results(bad, False, False):
            pass
    inputs = tmp_path / "in.jsonl"
    inputs.write_text("{}")
    with pytest.raises(OptionError, match="is the input file"):
        check_output(inputs, overwrite=True, inputs=str(inputs))
    with open_results(Path(os.devnull), False, False) as lines:
        lines.write({})


def test_only_json_on_standard_output(tmp_path: Path) -> None:
    """Also where Python's print, C code or a child process writes there."""
    program = """
import os, subprocess
from pathlib import Path
from dsv4dist.cli.output import open_results
with open_results(Path("out.jsonl"), False, True) as lines:
    print("from python")
    os.write(1, b"from c\\n")
    subprocess.run(["echo", "from a child"], check=True)
    lines.write({"id": "a"})
print("afterwards")
"""
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path, env=environment
    )
    assert ended.stdout == '{"id": "a"}\nafterwards\n'
    assert sorted(ended.stderr.splitlines()) == ["from a child", "from c", "from python"]
    assert json_lines(tmp_path / "out.jsonl") == [{"id": "a"}]


def test_only_json_without_a_file_descriptor(capsys: pytest.CaptureFixture[str]) -> None:
    with open_results(None, False, True) as lines:
        print("noise")
        lines.write({"id": "a"})
    assert capsys.readouterr() == ('{"id": "a"}\n', "noise\n")
