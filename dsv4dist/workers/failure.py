"""What went wrong on the ranks, and which of several failures is the cause of the others."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from dsv4dist.errors import Dsv4Error, WorkerError

_MAX_CHARS = 600


class FailureKind(IntEnum):
    """How a rank failed; a lower value explains a higher one."""

    DIED = 0  # the process is gone
    DEVICE = 1  # its GPU failed under it
    RAISED = 2  # its own code raised
    STUCK = 3  # its process is there and does not go on
    LOST = 4  # its connection broke
    COLLECTIVE = 5  # a collective broke under it: another rank is the cause, if one is known

    @property
    def explains(self) -> bool:
        """Whether it needs no other failure as its cause."""
        return self <= FailureKind.RAISED

    @property
    def can_recover(self) -> bool:
        """Whether new processes may do better: what a rank's own code raises, it would raise again."""
        return self is not FailureKind.RAISED


class RankFailure(WorkerError):
    """The failure of one rank, as one line; it survives pickling."""

    def __init__(self, rank: int, kind: FailureKind, message: str, when_s: float, details: str = "") -> None:
        super().__init__(rank, kind, message, when_s, details)
        self.rank = rank
        self.kind = kind
        self.message = message
        self.when_s = when_s
        """Wall-clock seconds; clocks of different nodes may disagree."""
        self.details = details
        """A traceback, for the log."""
        self.unseen_s = 0.0
        """Seconds from the last sign of life of all ranks to this report; the driver fills it in."""

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.message}"


def first_cause(failures: Sequence[RankFailure]) -> RankFailure:
    """The failure that explains the others: the strongest kind, then the earliest, then the lowest rank."""
    return min(failures, key=lambda failure: (failure.kind, failure.when_s, failure.rank))


def one_line(text: object) -> str:
    """Any text on one line, at most 600 characters."""
    line = " ".join(str(text).split())
    return line if len(line) <= _MAX_CHARS else line[: _MAX_CHARS - 3] + "..."


def describe(error: BaseException) -> str:
    """An exception as one line; ours speak for themselves, others bring their class."""
    text = one_line(error)
    if isinstance(error, Dsv4Error):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
