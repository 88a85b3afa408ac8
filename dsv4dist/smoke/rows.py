"""What every check reports: one row, with the next command where something is wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """One check of one place.

    node   the node's name; of several nodes all names
    gpu    Ray's id of the GPU, if it is about one
    value  what was found, `limit` what it is held against, both in `unit` where they are numbers
    hint   what to do next; empty where nothing is to be done
    note   what else people want to see beside the value
    more   fields for programs, beside those above
    """

    check: str
    node: str
    ok: bool
    value: float | str
    limit: float | str | None = None
    hint: str = ""
    gpu: str | None = None
    unit: str = ""
    note: str = ""
    more: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The row as JSON has it: `gpu` and `unit` only where they say something."""
        row: dict[str, Any] = {"check": self.check, "node": self.node}
        row |= {} if self.gpu is None else {"gpu": self.gpu}
        row |= {"ok": self.ok, "value": self.value, "limit": self.limit, "hint": self.hint}
        return row | ({"unit": self.unit} if self.unit else {}) | self.more

    def as_text(self) -> str:
        """The row for people: one line, and a second one with the limit and the hint where there is a hint."""
        where = self.node if self.gpu is None else f"{self.node} GPU {self.gpu}"
        text = f"{'ok' if self.ok else 'FAIL':<5} {self.check:<24} {where:<24} {_shown(self.value, self.unit)}"
        text += f", {self.note}" if self.note else ""
        if not self.hint:
            return text
        limit = "" if self.limit is None else f"limit {_shown(self.limit, self.unit)}; "
        return f"{text}\n      {limit}next: {self.hint}"


def _shown(value: float | str, unit: str) -> str:
    number = value if isinstance(value, str) else f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return f"{number} {unit}".rstrip()
