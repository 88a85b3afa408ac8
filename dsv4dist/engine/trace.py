"""A trace of every step in the Chrome trace format, for chrome://tracing or Perfetto."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any


class StepTrace:
    """Collects spans in a file that is complete JSON whenever it is closed; without a path nothing is kept.

    Spans are written as they end, so that a run that fails leaves those before.
    """

    def __init__(self, path: Path | None) -> None:
        """Raises: OSError when the file cannot be written."""
        self._file = path.open("w", encoding="utf-8") if path is not None else None
        self._started = time.perf_counter()
        self._first = True
        if self._file is not None:
            self._file.write('{"displayTimeUnit": "ms", "traceEvents": [')

    @contextmanager
    def span(self, name: str, **args: Any) -> Iterator[dict[str, Any]]:
        """One span; what the block puts into the dictionary it gets is shown with it."""
        if self._file is None:
            yield args
            return
        start = time.perf_counter()
        try:
            yield args
        finally:
            event = {"name": name, "ph": "X", "pid": 0, "tid": 0, "args": args}
            event |= {"ts": (start - self._started) * 1e6, "dur": (time.perf_counter() - start) * 1e6}
            self._file.write(("\n" if self._first else ",\n") + json.dumps(event))
            self._first = False

    def close(self) -> None:
        """Finish the file; a second call does nothing."""
        if self._file is not None:
            self._file.write("\n]}\n")
            self._file.close()
            self._file = None

    def __enter__(self) -> StepTrace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
