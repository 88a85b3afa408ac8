"""Result files: nothing that exists is lost, nothing that is finished is missing."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from dsv4dist.cli.options import OptionError
from dsv4dist.cli.output import append, check_outputs, open_results
from tests.cli.support import json_lines


def refuses(message: str, outputs: dict[str, str | Path | None], overwrite: bool = False, **more: str) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        check_outputs(outputs, overwrite, **more)


def test_existing_files_and_impossible_places_are_refused(tmp_path: Path) -> None:
    output, trace = tmp_path / "out.jsonl", tmp_path / "trace.json"
    check_outputs({"--output": output, "--trace": str(trace), "--dump-logits": None}, overwrite=False)
    output.write_text("old\n")
    trace.write_text("old\n")
    for option, path in (("--output", output), ("--trace", trace)):
        refuses(f"{option} {path} exists already; choose another name or add --overwrite", {option: path})
        check_outputs({option: path}, overwrite=True)
    refuses("--trace", {"--output": output, "--trace": trace})  # both are told
    assert output.read_text() == trace.read_text() == "old\n"
    refuses(f"--output {tmp_path} is a directory", {"--output": tmp_path}, overwrite=True)
    refuses(f"there is no directory {tmp_path}/missing", {"--output": tmp_path / "missing" / "out.jsonl"})
    check_outputs({"--output": Path(os.devnull), "--trace": Path(os.devnull)}, overwrite=False)


def test_one_file_for_two_purposes_is_refused(tmp_path: Path) -> None:
    inputs, new = tmp_path / "in.jsonl", tmp_path / "new"
    inputs.write_text("{}")
    for option in ("--output", "--trace"):
        refuses("is the input file", {option: inputs}, overwrite=True, inputs=str(inputs))
    (tmp_path / "link").hardlink_to(inputs)
    refuses("is the input file", {"--output": tmp_path / "link"}, overwrite=True, inputs=str(inputs))
    same = {"--output": new, "--dump-logits": tmp_path / "." / "x" / ".." / "new"}
    (tmp_path / "x").mkdir()
    refuses(f"--output and --dump-logits are both {new}", same, overwrite=True)
    refuses("--output and --trace are both", {"--output": inputs, "--trace": tmp_path / "link"}, overwrite=True)


def test_overwriting_keeps_the_old_lines_until_there_is_a_new_one(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("old and longer than what follows\n" * 9)
    with open_results(output, False):
        pass
    assert output.read_text().startswith("old")
    with open_results(output, False) as lines:
        lines.write({"id": "a"})
        lines.write({"id": "b"})
    assert json_lines(output) == [{"id": "a"}, {"id": "b"}]


def test_lines_are_there_as_soon_as_they_are_written(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with suppress(RuntimeError), open_results(output, False) as lines:
        lines.write({"id": "a", "text": "雪\n"})
        assert json_lines(output) == [{"id": "a", "text": "雪\n"}]
        raise RuntimeError
    assert json_lines(output) == [{"id": "a", "text": "雪\n"}]


def test_new_file_without_lines_is_removed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), open_results(tmp_path / "out.jsonl", False):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_second_run_does_not_write_into_the_first_ones_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out.jsonl"
    with open_results(output, False) as lines:
        lines.write({"id": "a"})
        monkeypatch.setattr(Path, "exists", lambda path: False)  # the other one looked before
        with pytest.raises(OptionError, match="another run"), open_results(output, False):
            pass
        monkeypatch.undo()
        lines.write({"id": "b"})
    assert json_lines(output) == [{"id": "a"}, {"id": "b"}]


def test_a_device_takes_lines() -> None:
    with open_results(Path(os.devnull), False) as lines:
        lines.write({})


def test_a_full_disk_is_named_and_leaves_whole_lines(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs Linux")
    with open_results(full, False) as lines, pytest.raises(OSError, match=r"No space left.*'/dev/full'"):
        lines.write({"id": "a"})

    class Filling(FileIO):
        """A disk with room for 9 bytes more, that then takes a part of what it gets."""

        room = 9

        def write(self, data: Any) -> int:
            if not self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            taken = super().write(bytes(data[: self.room]))
            self.room -= taken
            return taken

    with Filling(tmp_path / "out.jsonl", "a") as file:
        append(file, b"whole\n")
        with pytest.raises(OSError, match=r"out\.jsonl"):
            append(file, b"does not fit\n")
    assert (tmp_path / "out.jsonl").read_bytes() == b"whole\n"


def test_only_json_on_standard_output(tmp_path: Path) -> None:
    """Also where Python's print, C code or a child process writes there."""
    program = """
import os, subprocess
from pathlib import Path
from dsv4dist.cli.output import open_results
with open_results(Path("out.jsonl"), True) as lines:
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
    with open_results(None, True) as lines:
        print("noise")
        lines.write({"id": "a"})
    assert capsys.readouterr() == ('{"id": "a"}\n', "noise\n")
