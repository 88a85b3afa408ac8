"""Input lines: what is accepted, and what is said about the others."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4dist.cli.jsonl import BadRequest, InputRequest, parse_token_ids, read_requests


def read(*lines: str | bytes | dict[str, object]) -> list[InputRequest | BadRequest]:
    raw = [json.dumps(line).encode() if isinstance(line, dict) else line for line in lines]
    return read_requests([line.encode() if isinstance(line, str) else line for line in raw])


def test_good_lines() -> None:
    sampling = {"max_tokens": 3, "temperature": 1, "top_p": 0.5, "top_k": 2, "seed": 7, "ignore_eos": True}
    found = read(
        {"id": "a", "prompt": "héllo"},
        "",
        {"id": "b", "prompt_token_ids": [1, 2], **sampling},
        "  \r\n",
        {"prompt": "no id"},
        {"id": "c", "prompt": None, "prompt_token_ids": [], "temperature": None},
    )
    assert found == [
        InputRequest("a", "line 1", "héllo", {}, 1),
        InputRequest("b", "line 3", [1, 2], sampling, 3),
        InputRequest("line-5", "line 5", "no id", {}, 5),
        InputRequest("c", "line 6", [], {}, 6),
    ]


BAD_LINES = [
    ("{", "not JSON"),
    (b'{"id": "\xff"}', "byte 9 is not UTF-8"),
    ('{"prompt": "a", "temperature": NaN}', "NaN is not a JSON number"),
    ("[" * 100_000, "nested too deeply"),
    ('{"prompt": "a", "seed": ' + "9" * 5000 + "}", "not JSON"),
    ('{"prompt": "a", "prompt": "b"}', "'prompt' appears twice"),
    ("[1, 2]", "expected an object, found a list"),
    ("null", "found null"),
    ("{}", "neither prompt nor prompt_token_ids"),
    ({"prompt": "a", "prompt_token_ids": [1]}, "both prompt and prompt_token_ids"),
    ({"prompt": 3}, "prompt is 3; expected a text"),
    ({"prompt": "a\ud800"}, "prompt.*UTF-8"),
    ({"prompt_token_ids": "1,2"}, 'prompt_token_ids is "1,2"; expected a list of integers'),
    ({"prompt_token_ids": [1, 2.0]}, "expected a list of integers"),
    ({"prompt_token_ids": [True]}, "expected a list of integers"),
    ({"prompt": "a", "max_token": 3}, "unknown key 'max_token'; known are id, prompt, "),
    ({"prompt": "a", "max_tokens": 3.5}, "max_tokens is 3.5; expected an integer"),
    ({"prompt": "a", "max_tokens": True}, "max_tokens is true; expected an integer"),
    ({"prompt": "a", "temperature": "hot"}, 'temperature is "hot"; expected a number'),
    ({"prompt": "a", "ignore_eos": 1}, "ignore_eos is 1; expected true or false"),
    ({"prompt": "a", "id": 7}, "id is 7; expected a text"),
    ({"prompt": "a", "id": "\udc80"}, "id is .*expected a text"),
    ({"prompt": "a", "id": ""}, "expected a text that is not empty"),
    ({"id": "a", "max_tokens": "x", "top_kk": 1}, "unknown key 'top_kk'.*neither prompt.*max_tokens is"),
]


@pytest.mark.parametrize(("line", "error"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_bad_line_is_named_and_does_not_stop_the_others(line: str | dict[str, object], error: str) -> None:
    first, bad, last = read({"id": "before", "prompt": "x"}, line, {"id": "after", "prompt": "y"})
    assert isinstance(first, InputRequest)
    assert isinstance(last, InputRequest)
    assert isinstance(bad, BadRequest)
    assert (bad.source, bad.line) == ("line 2", 2)
    assert re.search(error, bad.error), bad.error
    assert "\n" not in bad.error
    assert len(bad.error) < 400


def test_second_use_of_an_id() -> None:
    first, second, third = read(
        {"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}, {"id": "a", "prompt": "z", "top_k": ""}
    )
    assert isinstance(first, InputRequest)
    assert second == BadRequest("line-2", "line 2", "id 'a' is already used on line 1", 2)
    assert isinstance(third, BadRequest)
    assert "top_k" in third.error
    assert "already used" in third.error


def test_an_id_like_that_of_a_line_without_one() -> None:
    first, second = read({"id": "line-2", "prompt": "x"}, {"prompt": "y"})
    assert isinstance(first, InputRequest)
    assert isinstance(second, BadRequest)
    assert second.error == "id 'line-2' (it has no id of its own) is already used on line 1"


def test_byte_order_mark_is_not_text() -> None:
    assert read(b'\xef\xbb\xbf{"id": "a", "prompt": "x"}') == [InputRequest("a", "line 1", "x", {}, 1)]


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_any_bytes_are_read_or_reported(lines: list[bytes]) -> None:
    lines = [line.replace(b"\n", b" ").replace(b"\xef", b"") for line in lines]
    found = read_requests(lines)
    assert all(isinstance(one, BadRequest) for one in found)
    assert [one.line for one in found] == [number for number, line in enumerate(lines, start=1) if line.strip()]


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists, max_leaves=5))
def test_any_prompt_ids_are_read_or_reported(value: object) -> None:
    (one,) = read_requests([json.dumps({"prompt_token_ids": value}).encode()])
    good = isinstance(value, list) and all(type(token) is int for token in value)
    assert isinstance(one, InputRequest) == good


@given(st.lists(st.integers(0, 10**6), min_size=1))
def test_token_ids_from_text(ids: list[int]) -> None:
    assert parse_token_ids(",".join(map(str, ids))) == ids
    assert parse_token_ids(" , ".join(map(str, ids))) == ids


@pytest.mark.parametrize(("text", "part"), [("1,x,3", "'x'"), ("", "''"), ("1,,2", "''"), ("1.5", "'1.5'")])
def test_text_that_is_no_token_id(text: str, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        parse_token_ids(text)
