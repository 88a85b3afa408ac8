"""Independent chains of a layer, side by side on streams inside a captured graph (attention spec 5.3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

R = TypeVar("R")
S = TypeVar("S")

NUM_SIDE_STREAMS = 2
"""Chains that a layer has beside its main one, at most."""


class Overlap:
    """Forks only while a graph is captured, where waiting for another stream becomes an edge of the graph.

    One layer at a time: `run` forks, `beside` goes on with the last of the chains, `join` ends it.

    streams               auxiliary streams, one per chain beside the main one; none = never fork
    main_first_tokens     steps of at most so many tokens enqueue the main chain before the others; this orders the
                          enqueueing only and never changes a result
    """

    def __init__(self, streams: Sequence[torch.cuda.Stream] = (), main_first_tokens: int = 0) -> None:
        self._streams, self._main_first_tokens = tuple(streams), main_first_tokens
        self._forked: tuple[torch.cuda.Stream, ...] = ()
        self.enabled = True
        """Unset to capture in sequence, for comparison."""

    @classmethod
    def on(cls, device: torch.device, main_first_tokens: int) -> Overlap:
        """On streams of its own."""
        return cls([torch.cuda.Stream(device) for _ in range(NUM_SIDE_STREAMS)], main_first_tokens)

    @property
    def is_open(self) -> bool:
        """Whether chains given to `run` now would overlap."""
        return self.enabled and bool(self._streams) and torch.cuda.is_current_stream_capturing()

    def run(self, main: Callable[[], R], others: Sequence[Callable[[], S]], num_tokens: int) -> tuple[R, list[S]]:
        """Run `main` and then the others, or all at once; the results of the others are for use after `join`."""
        self._forked = self._streams[: len(others)] if self.is_open else ()
        if not self._forked:
            return main(), [other() for other in others]
        assert len(others) <= len(self._streams), f"{len(others)} chains for {len(self._streams)} streams"
        start, main_first = torch.cuda.current_stream().record_event(), num_tokens <= self._main_first_tokens
        if main_first:
            result = main()
        results = []
        for other, stream in reversed(list(zip(others, self._forked, strict=True))):  # the longest chain is the last
            stream.wait_event(start)
            with torch.cuda.stream(stream):
                results.append(other())
        if not main_first:
            result = main()
        return result, results[::-1]

    def beside(self, more: Callable[[], R]) -> R:
        """Run `more` behind the last of the others and all that is enqueued so far; its result is for after `join`."""
        if not self._forked:
            return more()
        stream = self._forked[-1]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            return more()

    def join(self) -> None:
        """Let what follows on the current stream see all chains."""
        for stream in self._forked:
            torch.cuda.current_stream().wait_stream(stream)
        self._forked = ()
