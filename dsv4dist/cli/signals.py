"""Ctrl-C and SIGTERM as an exception, so that `with` and `finally` end everything that was started."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CLEAN_UP_LIMIT_S = 10.0
"""An exit that takes longer than this is cut short."""
_SAME_EVENT_S = 1.0
"""Signals this close together are one wish: some supervisors signal the process and then its group."""

_first_at: float | None = None
_cut: threading.Timer | None = None


class Interrupted(BaseException):
    """A signal asked this process to end. Not an Exception, so that nothing handles it by accident."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.exit_code = 128 + signum


@contextmanager
def signals_raise() -> Iterator[None]:
    """Raise Interrupted in the main thread for the first of SIGNALS; a second one ends the process at once."""
    global _first_at
    _first_at = None
    before: dict[signal.Signals, Any] = {one: signal.getsignal(one) for one in SIGNALS}
    take_signals()
    try:
        yield
    finally:
        if _cut is not None:
            _cut.cancel()
        for one, handler in before.items():
            signal.signal(one, handler)


def take_signals() -> None:
    """Install the handlers, again where a library has replaced them; a signal that is ignored stays ignored."""
    for one in SIGNALS:
        if signal.getsignal(one) is not signal.SIG_IGN:
            signal.signal(one, _on_signal)


def _on_signal(signum: int, frame: FrameType | None) -> None:
    global _first_at, _cut
    now = time.monotonic()
    if _first_at is None:
        _first_at = now
        _cut = threading.Timer(CLEAN_UP_LIMIT_S, os._exit, args=(128 + signum,))
        _cut.daemon = True
        _cut.start()
        raise Interrupted(signum)
    if now - _first_at > _SAME_EVENT_S:
        os._exit(128 + signum)
