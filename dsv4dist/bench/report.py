"""What every measurement has in common: repeated timing, the machine it ran on, a table or JSON lines."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

Result = TypeVar("Result")


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


def show(rows: list[dict[str, Any]], as_json: bool) -> None:
    """Print rows: one JSON object a line with everything, or a table of what differs."""
    if as_json:
        common = machine()
        for row in rows:
            print(json.dumps(row | common))
        return
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    widths = [max(len(name), *(len(line[i]) for line in cells)) for i, name in enumerate(names)]
    for line in (names, *cells):
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


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
