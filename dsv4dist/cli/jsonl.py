"""Requests from JSON lines: each line becomes a request or a report of what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

SAMPLING_TYPES: dict[str, str] = {
    "max_tokens": "an integer",
    "temperature": "a number",
    "top_p": "a number",
    "top_k": "an integer",
    "seed": "an integer",
    "ignore_eos": "true or false",
}
"""Optional keys of a line; the values' ranges are SamplingParams' business."""

_KEYS = ("id", "prompt", "prompt_token_ids", *SAMPLING_TYPES)
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class InputRequest:
    """One thing to serve. `source` says where it came from, as people count: `line 3` or `--prompt 1`."""

    id: str
    source: str
    prompt: str | list[int]
    sampling: dict[str, Any] = field(default_factory=dict)
    """Only the keys that the line has; the command line's values apply to the others."""
    line: int | None = None


@dataclass(frozen=True)
class BadRequest:
    """Something that cannot be served, and why."""

    id: str
    source: str
    error: str
    line: int | None = None


def read_requests(lines: Iterable[bytes]) -> list[InputRequest | BadRequest]:
    """Parse JSON lines in UTF-8, blank ones skipped; never raises for what a line holds.

    A line without an id gets `line-N`. A BadRequest has every problem of its line, a second use of an id included."""
    found: list[InputRequest | BadRequest] = []
    first_use: dict[str, int] = {}
    for number, raw in enumerate(lines, start=1):
        if number == 1:
            raw = raw.removeprefix(_BYTE_ORDER_MARK)
        if not raw.strip():
            continue
        request = _parse_line(number, raw)
        if request.id in first_use:
            missing = " (it has no id of its own)" if request.id == f"line-{number}" else ""
            error = f"id {request.id!r}{missing} is already used on line {first_use[request.id]}"
            if isinstance(request, BadRequest):
                error = f"{request.error}; {error}"
            request = BadRequest(f"line-{number}", request.source, error, number)
        first_use.setdefault(request.id, number)
        found.append(request)
    return found


def _parse_line(number: int, raw: bytes) -> InputRequest | BadRequest:
    source, default_id = f"line {number}", f"line-{number}"
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        return BadRequest(default_id, source, f"not JSON ({_reason(error)})", number)
    if not isinstance(value, dict):
        return BadRequest(default_id, source, f"expected an object, found {_kind(value)}", number)
    values = {key: one for key, one in value.items() if one is not None}
    problems = [f"unknown key {key!r}; known are {', '.join(_KEYS)}" for key in values if key not in _KEYS]
    name = values.get("id", default_id)
    if not isinstance(name, str) or not name or not _has_utf8(name):
        problems.append(f"id is {_shown(name)}; expected a text that is not empty")
        name = default_id
    prompt = _prompt(values, problems)
    sampling = {key: values[key] for key in SAMPLING_TYPES if key in values}
    problems += [
        f"{key} is {_shown(one)}; expected {SAMPLING_TYPES[key]}"
        for key, one in sampling.items()
        if not _is(one, SAMPLING_TYPES[key])
    ]
    if problems:
        return BadRequest(name, source, "; ".join(problems), number)
    return InputRequest(name, source, prompt, sampling, number)


def _prompt(values: dict[str, Any], problems: list[str]) -> str | list[int]:
    text, ids = values.get("prompt"), values.get("prompt_token_ids")
    if text is None and ids is None:
        problems.append("there is neither prompt nor prompt_token_ids")
    elif text is not None and ids is not None:
        problems.append("there are both prompt and prompt_token_ids; give one")
    elif text is not None:
        if isinstance(text, str) and _has_utf8(text):
            return text
        problems.append(f"prompt is {_shown(text)}; expected a text" + " with a UTF-8 form" * isinstance(text, str))
    elif isinstance(ids, list) and all(_is(one, "an integer") for one in ids):
        return ids
    else:
        problems.append(f"prompt_token_ids is {_shown(ids)}; expected a list of integers")
    return ""


def parse_token_ids(text: str) -> list[int]:
    """Read `1,2,3`.  Raises: ValueError naming the part that is not a number."""
    ids = []
    for part in text.split(","):
        try:
            ids.append(int(part))
        except ValueError:
            raise ValueError(f"{part.strip()!r} is not a token id; expected numbers with commas, as in 1,2,3") from None
    return ids


def _has_utf8(text: str) -> bool:
    """False for half of a surrogate pair, which JSON can spell but no file can hold."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _is(value: object, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "true or false"
    return isinstance(value, int) if kind == "an integer" else isinstance(value, (int, float)) and kind == "a number"


def _kind(value: object) -> str:
    return {list: "a list", str: "a text", bool: "a truth value", type(None): "null"}.get(type(value), "a number")


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(n for n in names if names.count(n) > 1)!r} appears twice")
    return values


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start + 1} is not UTF-8"
    return str(error).replace(" line 1 ", " ")
