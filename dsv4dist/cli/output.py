"""Where results go: a file of JSON lines that is complete up to the last finished request, and standard output."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from dsv4dist.cli.options import OptionError

OutputOption = Annotated[
    Path | None,
    typer.Option("--output", help="Write JSON lines here, each as its request finishes.", metavar="F.jsonl"),
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON lines on standard output, and nothing else there.")]


def complain(text: str) -> None:
    """One line on standard error in this program's name."""
    print("dsv4dist: " + " ".join(text.split()), file=sys.stderr, flush=True)


@contextmanager
def json_on_stdout() -> Iterator[IO[str]]:
    """A stream for JSON; whatever else writes to standard output meanwhile ends up on standard error.

    Works on the file descriptor where there is one: libraries written in C and child processes print too."""
    sys.stdout.flush()
    try:
        descriptor = sys.stdout.fileno()
    except OSError:  # replaced by an object in memory
        stream = sys.stdout
        with redirect_stdout(sys.stderr):
            yield stream
        return
    kept = os.dup(descriptor)
    os.dup2(sys.stderr.fileno(), descriptor)
    try:
        with os.fdopen(os.dup(kept), "w", encoding="utf-8") as stream:
            yield stream
    finally:
        sys.stdout.flush()
        os.dup2(kept, descriptor)
        os.close(kept)


class JsonLines:
    """The destinations of one command's JSON lines; each line is flushed as soon as it is written."""

    def __init__(self, file: IO[str] | None, stream: IO[str] | None) -> None:
        self._file, self._stream = file, stream
        self._holds_old_lines = file is not None and os.fstat(file.fileno()).st_size > 0

    def write(self, record: dict[str, Any]) -> None:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
        if self._file is not None:
            if self._holds_old_lines:
                self._file.truncate(0)
                self._holds_old_lines = False
            self._file.write(text)
            self._file.flush()
        if self._stream is not None:
            self._stream.write(text)
            self._stream.flush()


@contextmanager
def open_results(output: Path | None, overwrite: bool, to_stdout: bool) -> Iterator[JsonLines]:
    """Open what the options name.  Raises: OptionError for a file that exists already or cannot be written.

    An existing file is emptied only when the first line is ready, and a new one that stayed empty is removed:
    a run that fails early costs nothing and can be repeated as it was."""
    with ExitStack() as stack:
        file = stack.enter_context(_open_late(output, overwrite)) if output is not None else None
        stream = stack.enter_context(json_on_stdout()) if to_stdout else None
        yield JsonLines(file, stream)


@contextmanager
def _open_late(output: Path, overwrite: bool) -> Iterator[IO[str]]:
    check_output(output, overwrite)
    is_new = not output.exists()
    try:
        file = output.open("a", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"--output {output}: {error.strerror}; choose a file that can be written") from None
    try:
        with file:
            yield file
    finally:
        if is_new and output.is_file() and output.stat().st_size == 0:
            output.unlink()


def check_output(output: Path, overwrite: bool, option: str = "--output", inputs: str | None = None) -> None:
    """Refuse to lose a file.  Raises: OptionError when `output` exists without `overwrite`, or is the input."""
    if inputs is not None and output.exists() and Path(inputs).exists() and output.samefile(inputs):
        raise OptionError(f"{option} {output} is the input file; choose another name")
    if output.is_file() and not overwrite:
        raise OptionError(f"{option} {output} exists already; choose another name or add --overwrite")
