"""Where results go: a file of JSON lines that is complete up to the last finished request, and standard output."""

from __future__ import annotations

import io
import json
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from io import FileIO
from itertools import combinations
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


def prepare_standard_streams() -> None:
    """Make printing safe: characters that a stream's encoding lacks are escaped, and closed streams are occupied.

    Files opened later would else get the number of a closed one, and what is printed."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def json_on_stdout() -> Iterator[IO[str]]:
    """A stream for JSON; whatever else writes to standard output meanwhile ends up on standard error.

    Works on the file descriptor where there is one: libraries written in C and child processes print too.
    Raises: OptionError when standard output is closed."""
    if sys.stdout is None:
        raise OptionError("--json: standard output is closed; leave it open, or use --output where there is one")
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
    """The destinations of one command's JSON lines; each line is there as soon as it is written."""

    def __init__(self, file: FileIO | None, stream: IO[str] | None) -> None:
        self._file, self._stream = file, stream
        self._holds_old_lines = file is not None and os.fstat(file.fileno()).st_size > 0

    def write(self, record: dict[str, Any]) -> None:
        """Raises: OSError naming the file, which then ends with its last whole line."""
        text = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
        if self._file is not None:
            if self._holds_old_lines:
                self._file.truncate(0)
                self._holds_old_lines = False
            append(self._file, text.encode())
        if self._stream is not None:
            self._stream.write(text)
            self._stream.flush()


def append(file: FileIO, data: bytes | memoryview) -> None:
    """Write bytes at the end of a file, all or none of them.  Raises: OSError naming the file."""
    size, rest = os.fstat(file.fileno()).st_size, memoryview(data)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError as error:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.truncate(size)
        raise OSError(error.errno, error.strerror, str(file.name)) from None


@contextmanager
def open_results(output: Path | None, to_stdout: bool) -> Iterator[JsonLines]:
    """Open what the options name, which `check_outputs` has let pass.  Raises: OptionError for what cannot be written.

    An existing file is emptied only when the first line is ready, and a new one that stayed empty is removed:
    a run that fails early costs nothing and can be repeated as it was."""
    with ExitStack() as stack:
        file = stack.enter_context(_open_late(output)) if output is not None else None
        stream = stack.enter_context(json_on_stdout()) if to_stdout else None
        yield JsonLines(file, stream)


@contextmanager
def _open_late(output: Path) -> Iterator[FileIO]:
    is_new = not output.exists()
    try:
        file = FileIO(output, "x" if is_new else "a")
    except FileExistsError:
        raise OptionError(f"--output {output}: another run has just begun to write it; choose another name") from None
    except OSError as error:
        raise OptionError(f"--output {output}: {error.strerror}; choose a file that can be written") from None
    try:
        with file:
            yield file
    finally:
        if is_new and output.is_file() and output.stat().st_size == 0:
            output.unlink()


def check_outputs(outputs: dict[str, str | Path | None], overwrite: bool, inputs: str | None = None) -> None:
    """Refuse to lose a file, or to work for a result that has no place.

    outputs    the file of each option, None for an option that was not given
    overwrite  whether existing files may be replaced
    inputs     what --input names

    Raises: OptionError naming every file that exists, is the input or another option's, or has no directory.
    """
    paths = {option: Path(path) for option, path in outputs.items() if path is not None}
    problems = []
    for option, path in paths.items():
        if inputs is not None and _same_file(path, Path(inputs)):
            problems.append(f"{option} {path} is the input file; choose another name")
        elif path.is_dir():
            problems.append(f"{option} {path} is a directory; choose a file")
        elif not path.parent.is_dir():
            problems.append(f"{option} {path}: there is no directory {path.parent}; create it or choose another")
        elif path.is_file() and not overwrite:
            problems.append(f"{option} {path} exists already; choose another name or add --overwrite")
    problems += [
        f"{first} and {second} are both {path}; choose two names"
        for (first, path), (second, other) in combinations(paths.items(), 2)
        if _same_file(path, other)
    ]
    if problems:
        raise OptionError("; ".join(problems))


def _same_file(one: Path, other: Path) -> bool:
    """Whether writing to one changes the other; not so for devices."""
    if one.exists() and other.exists():
        return one.is_file() and one.samefile(other)
    return one.resolve() == other.resolve()
