"""Ctrl-C and SIGTERM as an exception, so that `with` and `finally` end everything that was started."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EXIT_LIMIT_S = 2.8
"""An exit that takes longer is cut short: `ray job stop` kills after 3 s, and Ray's processes end with their driver."""
_SAME_EVENT_S = 1.0
"""Signals this close together are one wish: some supervisors signal the process and then its group."""


class Interrupted(BaseException):
    """A signal asked this process to end. Not an Exception, so that nothing handles it by accident."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class _Watch:
    """From the first signal to the end of cleaning up."""

    def __init__(self) -> None:
        self.noticed_at: float | None = None
        self._pid = os.getpid()
        self._ended = threading.Event()
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self.write_end, False)
        threading.Thread(target=self._enforce_limit, daemon=True, name="signal limit").start()

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.noticed_at is None:
            global _received
            self.noticed_at, _received = now, signum
            raise Interrupted(signum)
        if now - self.noticed_at > _SAME_EVENT_S:
            os._exit(128 + signum)

    def on_unraisable(self, lost: sys.UnraisableHookArgs) -> None:
        """Python drops an exception that a signal raises inside a destructor or a fork hook: send the signal again.

        In a child that has not yet become another program there is nothing to do."""
        error = lost.exc_value
        if isinstance(error, Interrupted):
            signum = error.signum
        elif isinstance(error, SystemExit) and error.code == signal.SIGTERM:  # Ray's answer to it
            signum = signal.SIGTERM
        else:
            sys.__unraisablehook__(lost)
            return
        if os.getpid() == self._pid:
            self.noticed_at = None
            again = threading.Timer(0.05, os.kill, args=(self._pid, signum))
            again.daemon = True
            again.start()

    def close(self) -> None:
        self._ended.set()
        os.close(self.write_end)

    def _enforce_limit(self) -> None:
        """Python writes each signal's number to the pipe at once, also while the main thread is inside C code."""
        while number := os.read(self._read_end, 1):
            if number[0] in SIGNALS and not self._ended.wait(EXIT_LIMIT_S):
                name = signal.Signals(number[0]).name
                os.write(2, f"dsv4dist: interrupted by {name}; cleaning up took too long and was cut short\n".encode())
                os._exit(128 + number[0])
        os.close(self._read_end)


_watch: _Watch | None = None
_received: int | None = None


def received_signal() -> int | None:
    """The signal that was raised as Interrupted; code that it met, an import for one, may make another error of it."""
    return _received


@contextmanager
def signals_raise() -> Iterator[None]:
    """Raise Interrupted in the main thread for the first of SIGNALS; a second one ends the process at once.

    The process also ends, with the same exit code, when it has not ended by itself EXIT_LIMIT_S later."""
    global _watch, _received
    _watch, _received = _Watch(), None
    before: dict[signal.Signals, Any] = {one: signal.getsignal(one) for one in SIGNALS}
    wakeup_before = signal.set_wakeup_fd(_watch.write_end, warn_on_full_buffer=False)
    hook_before, sys.unraisablehook = sys.unraisablehook, _watch.on_unraisable
    take_signals()
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
        signal.set_wakeup_fd(wakeup_before)
        sys.unraisablehook = hook_before
        if _watch.noticed_at is None:  # else the limit holds up to the end of the process
            _watch.close()
        _watch = None


def take_signals() -> None:
    """Install the handlers, again where a library has replaced them; a signal that is ignored stays ignored."""
    assert _watch is not None, "take_signals() is for code inside signals_raise()"
    for one in SIGNALS:
        if signal.getsignal(one) is not signal.SIG_IGN:
            signal.signal(one, _watch.on_signal)
