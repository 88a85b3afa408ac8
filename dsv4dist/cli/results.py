"""What became of each request: a JSON line for every one, a line on standard error for those that failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsv4dist.cli.jsonl import BadRequest, InputRequest
from dsv4dist.cli.output import JsonLines, complain


class Results:
    """Counts and writes results. `empty` holds the fields that a request without a result has on its line."""

    def __init__(self, lines: JsonLines, empty: dict[str, Any]) -> None:
        self._lines, self._empty = lines, empty
        self.done = self.failed = 0

    def add(self, record: dict[str, Any]) -> None:
        """A request that was served."""
        self.done += 1
        self._lines.write(record)

    def reject(self, request: InputRequest | BadRequest, error: str, record: dict[str, Any] | None = None) -> None:
        """A request that was not served, or only as far as `record` goes; says so on standard error."""
        self.fail(request, error, record)
        complain(f"error: {request.source}: {error}")

    def fail(self, request: InputRequest | BadRequest, error: str, record: dict[str, Any] | None = None) -> None:
        """The same without the line on standard error, for failures whose cause is told once for all."""
        self.failed += 1
        place = {} if request.line is None else {"line": request.line}
        values = record if record is not None else {"id": request.id, **self._empty}
        self._lines.write({**values, **place, "finish_reason": "error", "error": error})

    def servable(self, requests: list[InputRequest | BadRequest]) -> list[InputRequest]:
        """Reject those that could not be read and return the others."""
        good = []
        for request in requests:
            if isinstance(request, BadRequest):
                self.reject(request, request.error)
            else:
                good.append(request)
        return good

    def close(self, output: Path | None) -> int:
        """Sum up where results went to a file, or nowhere; returns the exit code."""
        if not self.done and not self.failed:
            complain("the input holds no requests")
        elif output is not None:
            complain(f"{self.done} done, {self.failed} failed; results in {output}")
        return 1 if self.failed else 0
