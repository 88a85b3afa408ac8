"""What every measurement has in common: repeated timing, the machine it ran on, a table or JSON lines."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np

from dsv4dist.errors import ConfigError

Result = TypeVar("Result")

COMMON_FIELDS = ("hardware", "versions", "commit", "command")
"""What `machine` adds to every row."""
_NOT_IN_MARKDOWN = {*COMMON_FIELDS, "bench", "bytes", "flops"}


@dataclass(frozen=True)
class Spread:
    """Microseconds of repeated runs."""

    median_us: float
    p10_us: float
    p90_us: float


def time_calls(
    call: Callable[[], Result], repeats: int, after: Callable[[Result], object] = lambda result: None, warmup: int = 3
) -> Spread:
    """Wall time of single calls on the host; `after` gets each result, untimed."""
    times = []
    for run in range(warmup + repeats):
        start = time.perf_counter_ns()
        result = call()
        if run >= warmup:
            times.append((time.perf_counter_ns() - start) / 1000)
        after(result)
    p10, median, p90 = np.percentile(times, (10, 50, 90))
    return Spread(float(median), float(p10), float(p90))


def machine() -> dict[str, Any]:
    """Hardware, versions, commit and command line: what a number is worth nothing without."""
    versions = {"python": platform.python_version()}
    for name in ("torch", "triton", "ray"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "hardware": _hardware(),
        "versions": versions,
        "commit": _commit(),
        "command": shlex.join(["dsv4dist", *sys.argv[1:]]),
    }


def show(rows: Iterable[dict[str, Any]], as_json: bool, stream: IO[str] | None = None) -> list[dict[str, Any]]:
    """Print rows to `stream` or standard output, and return them.

    As JSON each row is one line with everything, written as soon as it is there; else a table of what differs, one for
    each operation where rows have a field `op`.
    """
    stream, shown = stream or sys.stdout, []
    common = machine() if as_json else {}
    for row in rows:
        shown.append(row)
        if as_json:
            print(json.dumps(row | common), file=stream, flush=True)
    for table in () if as_json else _tables(shown):
        names, cells = _cells(table)
        widths = [max(len(name), *(len(line[i]) for line in cells)) for i, name in enumerate(names)]
        for line in (names, *cells):
            print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)), file=stream)
    return shown


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows that `show` wrote as JSON.  Raises: ConfigError naming the first line that is none."""
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or "bench" not in row:
            raise ConfigError(f"{path} line {number}: not a row of `dsv4dist bench --json`; remove the line")
        rows.append(row)
    if not rows:
        raise ConfigError(f"{path}: holds no rows; write some with `dsv4dist bench ... --json`")
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    """Recorded rows as markdown: a line with the machine of each run, then one table per operation.

    Bytes and operations are left out: the floor says what they amount to.
    """
    lines = []
    for _, run in groupby(rows, lambda row: [row.get(name) for name in COMMON_FIELDS]):
        table_rows = list(run)
        common = table_rows[0]
        versions = ", ".join(f"{name} {version}" for name, version in common.get("versions", {}).items())
        lines += [f"{common.get('hardware')}; {versions}; commit {common.get('commit')}; `{common.get('command')}`", ""]
        for table in _tables(table_rows):
            names, cells = _cells([{key: row[key] for key in row if key not in _NOT_IN_MARKDOWN} for row in table])
            numeric = [all(_is_number(row.get(name)) for row in table) for name in names]
            lines += [_line(names), _line(["--:" if one else "---" for one in numeric]), *map(_line, cells), ""]
    return "\n".join(lines).rstrip()


def _tables(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    return [list(table) for _, table in groupby(rows, lambda row: row.get("op"))]


def _cells(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    return names, [[_cell(row.get(name)) for name in names] for row in rows]


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return "" if value is None else str(value)


def _hardware() -> str:
    if "torch" in sys.modules:
        import torch

        if torch.cuda.is_available():
            return str(torch.cuda.get_device_name(0))
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    where = Path(__file__).resolve().parent
    command = ["git", "-C", str(where), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
