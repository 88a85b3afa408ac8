"""SIGTERM and Ctrl-C: what is finished is kept, and nothing of ours goes on running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.support import LOCAL, json_lines

EXIT_LIMIT_S = 60.0  # a deadline for the test, not a claim about speed
START_LIMIT_S = 120.0


class Command:
    """`dsv4dist` in a process of its own; its descendants carry a mark in their environment."""

    def __init__(self, arguments: list[str], errors: Path) -> None:
        self._mark = f"DSV4_TEST_MARK={uuid.uuid4()}".encode()
        name, _, value = self._mark.decode().partition("=")
        self._errors = errors
        with errors.open("w") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dsv4dist", *arguments],
                stdout=subprocess.DEVNULL,
                stderr=stream,
                env={**os.environ, name: value},
                start_new_session=True,
            )

    def end(self, signum: int, group: bool = True) -> str:
        """Send a signal, to the whole group as a terminal does or to the process alone as `kill` does, and wait.

        Returns standard error."""
        (os.killpg if group else os.kill)(self.process.pid, signum)
        self.process.wait(EXIT_LIMIT_S)
        return self._errors.read_text()

    def descendants(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self._mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:  # ended meanwhile
                continue
        return [pid for pid in found if pid != self.process.pid]

    def kill(self) -> None:
        for pid in [*self.descendants(), *([self.process.pid] if self.process.poll() is None else [])]:
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    started: list[Command] = []

    def command(*arguments: str | Path) -> Command:
        started.append(Command(list(map(str, arguments)), tmp_path / f"stderr-{len(started)}"))
        return started[-1]

    yield command
    for one in started:
        one.kill()


def long_work(directory: Path) -> Path:
    """One short request, then many that take minutes."""
    path = directory / "in.jsonl"
    requests: list[dict[str, object]] = [{"id": "short", "prompt": "a", "max_tokens": 1}]
    requests += [{"id": f"long-{i}", "prompt": "a", "max_tokens": 3000, "ignore_eos": True} for i in range(50)]
    path.write_text("".join(json.dumps(one) + "\n" for one in requests))
    return path


def wait_for(condition: Callable[[], bool], command: Command) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while not condition():
        assert command.process.poll() is None, command.end(0)
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextmanager
def hangups(handler: signal.Handlers) -> Iterator[None]:
    """SIGHUP is handled so in what is started inside: a child inherits whether it is ignored, as by nohup."""
    before = signal.signal(signal.SIGHUP, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def has_a_line(output: Path) -> bool:
    return output.exists() and output.stat().st_size > 0


def test_finished_results_are_kept(
    checkpoint: Callable[..., Path], start: Callable[..., Command], tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    more = [*LOCAL[:-1], "4096", "--input", long_work(tmp_path), "--output", output]
    with hangups(signal.SIG_DFL):
        command = start("generate", "--model", checkpoint("tiny-swa"), *more)
    wait_for(lambda: has_a_line(output), command)
    errors = command.end(signal.SIGHUP)
    assert command.process.returncode == 128 + signal.SIGHUP
    assert errors == "dsv4dist: interrupted by SIGHUP; results up to here are kept\n"
    assert [row["id"] for row in json_lines(output)] == ["short"]


def test_an_ignored_signal_stays_ignored(
    checkpoint: Callable[..., Path], start: Callable[..., Command], tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    more = [*LOCAL[:-1], "4096", "--input", long_work(tmp_path), "--output", output]
    with hangups(signal.SIG_IGN):
        command = start("generate", "--model", checkpoint("tiny-swa"), *more)
    wait_for(lambda: has_a_line(output), command)
    os.killpg(command.process.pid, signal.SIGHUP)
    time.sleep(1)
    assert command.process.poll() is None
    assert "SIGTERM" in command.end(signal.SIGTERM)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("when", "signum"), [("starting", signal.SIGTERM), ("running", signal.SIGINT), ("running", signal.SIGTERM)], ids=str
)
def test_no_process_is_left(
    when: str, signum: signal.Signals, checkpoint: Callable[..., Path], start: Callable[..., Command], tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    more = ["--tp", "2", "--device", "cpu", "--address", "local", "--input", long_work(tmp_path), "--output", output]
    command = start("generate", "--model", checkpoint("tiny-swa"), *more)
    if when == "running":
        wait_for(lambda: has_a_line(output), command)
        assert command.descendants()
    else:
        wait_for(lambda: bool(command.descendants()), command)
    errors = command.end(signum, group=when == "running")
    assert command.process.returncode == 128 + signum
    assert f"interrupted by {signum.name}" in errors
    assert "Traceback" not in errors
    wait_until_gone(command)
    if when == "running":
        assert [row["id"] for row in json_lines(output)] == ["short"]
    else:
        assert not output.exists()


def wait_until_gone(command: Command) -> None:
    """Descendants may be dying for a moment after their parent; none may stay."""
    deadline = time.monotonic() + 5
    while command.descendants():
        assert time.monotonic() < deadline, f"left behind: {command.descendants()}"
        time.sleep(0.1)


def test_a_signal_whose_exception_is_dropped_is_not_lost() -> None:
    """Python ignores exceptions in destructors, and a signal can arrive in one."""
    program = """
import os, signal, sys, time
from dsv4dist.cli.signals import Interrupted, signals_raise

class Signalled:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)

try:
    with signals_raise():
        Signalled()
        time.sleep(30)
        print("lost")
except Interrupted as interrupt:
    print(interrupt)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("SIGTERM\n", "", 0)
