"""A trace of every step in the Chrome trace format, for chrome://tracing or Perfetto."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from dsv4dist.errors import ConfigError

log = logging.getLogger(__name__)


class StepTrace:
    """Collects spans in a file that is complete JSON whenever it is closed; without a path nothing is kept.

    Spans are written as they end, so that a run that fails leaves those before. When the file cannot be written any
    more, the trace ends with a warning; what is traced goes on.
    """

    def __init__(self, path: Path | None) -> None:
        """Raises: ConfigError when the file cannot be written."""
        try:
            self._file = path.open("w", encoding="utf-8") if path is not None else None
        except OSError as error:
            raise ConfigError(f"--trace {path}: {error.strerror}; choose a file that can be written") from None
        self._started = time.perf_counter()
        self._first = True
        self._write('{"displayTimeUnit": "ms", "traceEvents": [')

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
            self._write(("\n" if self._first else ",\n") + json.dumps(event))
            self._first = False

    def close(self) -> None:
        """Finish the file; a second call does nothing."""
        self._write("\n]}\n", last=True)

    def _write(self, text: str, last: bool = False) -> None:
        if self._file is None:
            return
        try:
            self._file.write(text)
            if not last:
                return
            self._file.close()
        except OSError as error:
            log.warning("the trace ends early: %s: %s", self._file.name, error.strerror)
            with suppress(OSError):  # it tries once more to write what it holds
                self._file.close()
        self._file = None

    def __enter__(self) -> StepTrace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
