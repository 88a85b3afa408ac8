"""Independent chains of a layer, side by side on streams inside a captured graph (attention spec 5.3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

R = TypeVar("R")
S = TypeVar("S")


class Overlap:
    """Forks only while a graph is captured, where waiting for another stream becomes an edge of the graph.

    streams               auxiliary streams, one per chain beside the main one; none = never fork
    main_first_tokens     steps of at most so many tokens enqueue the main chain before the others; this orders the
                          enqueueing only and never changes a result
    """

    def __init__(self, streams: Sequence[torch.cuda.Stream] = (), main_first_tokens: int = 0) -> None:
        self._streams, self._main_first_tokens = tuple(streams), main_first_tokens
        self.enabled = True
        """Unset to capture in sequence, for comparison."""

    @property
    def is_open(self) -> bool:
        """Whether chains given to `run` now would overlap."""
        return self.enabled and bool(self._streams) and torch.cuda.is_current_stream_capturing()

    def run(self, main: Callable[[], R], others: Sequence[Callable[[], S]], num_tokens: int) -> tuple[R, list[S]]:
        """Run `main` and then the others, or all at once; returns their results.

        Whatever follows on the current stream sees all of them.
        """
        if not (others and self.is_open):
            return main(), [other() for other in others]
        assert len(others) <= len(self._streams), f"{len(others)} chains for {len(self._streams)} streams"
        current, main_first = torch.cuda.current_stream(), num_tokens <= self._main_first_tokens
        start = current.record_event()
        if main_first:
            result = main()
        results = []
        for other, stream in zip(others, self._streams, strict=False):
            stream.wait_event(start)
            with torch.cuda.stream(stream):
                results.append(other())
        if not main_first:
            result = main()
        for _, stream in zip(others, self._streams, strict=False):
            current.wait_stream(stream)
        return result, results
