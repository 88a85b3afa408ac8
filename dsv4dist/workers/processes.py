"""Processes of this machine by id: who descends from whom, who is gone, and ending those that are not (Linux)."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A process, safe against reuse of its number."""

    pid: int
    started: int
    """Clock ticks since boot."""


class _Stat(NamedTuple):
    state: str
    parent: int
    started: int


def find_process(pid: int) -> Process | None:
    """The process that has this number now; None when there is none or it only waits to be reaped."""
    stat = _stat(pid)
    return None if stat is None or stat.state in "ZX" else Process(pid, stat.started)


def is_alive(process: Process) -> bool:
    """Whether this very process still runs."""
    return find_process(process.pid) == process


def command_line(pid: int) -> str:
    """The arguments of a process joined by blanks; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def children(pid: int) -> list[Process]:
    """The running processes whose parent is `pid`."""
    return [found for found, parent in _table() if parent == pid]


def descendants(roots: Iterable[Process]) -> list[Process]:
    """The running ones of `roots` and of all that descend from them, parents first."""
    table = _table()
    wanted = list(roots)
    found = [process for process, _ in table if process in wanted]
    seen = {process.pid for process in found}
    for root in found:  # grows while it is walked
        fresh = [process for process, parent in table if parent == root.pid and process.pid not in seen]
        seen.update(process.pid for process in fresh)
        found.extend(fresh)
    return found


def wait_gone(processes: Iterable[Process], timeout_s: float) -> list[Process]:
    """Wait until all are gone; returns those that still run after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    left = [process for process in processes if is_alive(process)]
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = [process for process in left if is_alive(process)]
    return left


def kill(processes: Iterable[Process]) -> None:
    """Send SIGKILL to those that still run."""
    for process in processes:
        if is_alive(process):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)


def _table() -> list[tuple[Process, int]]:
    rows = []
    for entry in os.listdir("/proc"):
        stat = _stat(int(entry)) if entry.isdigit() else None
        if stat is not None and stat.state not in "ZX":
            rows.append((Process(int(entry), stat.started), stat.parent))
    return rows


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the name in brackets and may hold blanks and brackets of its own.
    fields = text[text.rindex(")") + 2 :].split()
    return _Stat(state=fields[0], parent=int(fields[1]), started=int(fields[19]))
