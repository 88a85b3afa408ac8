from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4dist.errors import WorkerError
from dsv4dist.workers import messages
from dsv4dist.workers.executor import StepResult
from dsv4dist.workers.messages import (
    HEADER_WORDS,
    Kind,
    decode_header,
    decode_result,
    decode_step,
    encode_result,
    encode_signal,
    encode_step,
)

INT32 = st.integers(-(2**31), 2**31 - 1)
COUNT = st.integers(0, 2**31 - 1)


def wire(frames: list[Any]) -> list[bytes]:
    """What arrives: bytes that share nothing with the sender's arrays."""
    return [bytes(frame) for frame in frames]


def result(tokens: int = 3, logprobs: int = 2, rows: int = 2, columns: int = 5, **fields: Any) -> StepResult:
    values: dict[str, Any] = {
        "generation": 4,
        "step_id": 9,
        "token_ids": np.arange(tokens, dtype=np.int32) - 1,
        "logprobs": -np.arange(logprobs, dtype=np.float32),
        "logits": np.arange(rows * columns, dtype=np.float32).reshape(rows, columns),
        "elapsed_us": 1234,
    }
    return StepResult(**{**values, **fields})


@given(words=st.lists(INT32, max_size=50), generation=COUNT, sequence=COUNT, rank=st.integers(0, 1000))
def test_step_round_trip(words: list[int], generation: int, sequence: int, rank: int) -> None:
    frames = wire(encode_step(np.array(words, dtype=np.int32), generation, sequence, rank))
    header = decode_header(frames, rank, generation, (Kind.STEP, Kind.STOP))
    packet = decode_step(header, frames)
    assert (header.kind, header.sequence) == (Kind.STEP, sequence)
    assert packet.tolist() == words
    assert packet.dtype == np.int32
    assert packet.flags.writeable


@given(
    tokens=st.integers(0, 20),
    logprobs=st.integers(0, 20),
    rows=st.integers(0, 4),
    columns=st.integers(0, 4),
    elapsed_us=st.integers(0, 2**40),
)
def test_result_round_trip(tokens: int, logprobs: int, rows: int, columns: int, elapsed_us: int) -> None:
    sent = result(tokens, logprobs, rows, columns, elapsed_us=elapsed_us)
    frames = wire(encode_result(sent, 4, 17, 0))
    got = decode_result(decode_header(frames, 0, 4, (Kind.RESULT,)), frames, 17)
    for name in ("token_ids", "logprobs", "logits"):
        a, b = getattr(sent, name), getattr(got, name)
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()
    assert (got.generation, got.step_id) == (4, 9)
    assert got.elapsed_us == min(elapsed_us, 2**31 - 1)


def test_special_floats_keep_their_bits() -> None:
    bits = np.array([0x7FC00001, 0xFF800000, 0x80000000, 1], dtype=np.uint32)
    frames = wire(encode_result(result(logprobs=0, rows=1, logits=bits.view(np.float32).reshape(1, 4)), 4, 0, 0))
    got = decode_result(decode_header(frames, 0, 4, (Kind.RESULT,)), frames, 0)
    assert got.logits.view(np.uint32).ravel().tolist() == bits.tolist()


def test_strided_and_wide_arrays_are_sent_as_their_values() -> None:
    wide = np.arange(24, dtype=np.float64).reshape(4, 6)[::2, ::3]
    frames = wire(encode_result(result(logits=wide), 4, 0, 0))
    got = decode_result(decode_header(frames, 0, 4, (Kind.RESULT,)), frames, 0)
    assert got.logits.tolist() == wide.tolist()


@given(st.lists(st.binary(max_size=80), max_size=5))
def test_foreign_bytes_are_refused_and_never_crash(frames: list[bytes]) -> None:
    with pytest.raises(WorkerError):
        decode_header(frames, 0, 0, (Kind.STEP,))


@given(word=st.integers(0, HEADER_WORDS - 1), value=INT32)
def test_any_changed_header_word_is_refused_or_harmless(word: int, value: int) -> None:
    frames = wire(encode_result(result(), 4, 17, 0))
    words = np.frombuffer(frames[0], dtype=np.int32).copy()
    words[word] = value
    frames[0] = words.tobytes()
    try:
        got = decode_result(decode_header(frames, 0, 4, (Kind.RESULT,)), frames, 17)
    except WorkerError:
        return
    # Only a step id or a time may pass unnoticed; and a shape with as many logits.
    assert got.token_ids.tolist() == [-1, 0, 1]
    assert got.logits.ravel().tolist() == list(range(10))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ((0, 7), "magic 0x7 version 2; expected 0x44345057 2"),
        ((1, 3), "version 3; expected 0x44345057 2: run the same dsv4dist on every node"),
        ((2, 3), "kind 3; expected STEP or STOP"),
        ((3, 5), "generation 5; expected 4"),
        ((4, -1), "sequence -1 is negative"),
        ((5, 3), "rank 3; expected 2"),
    ],
)
def test_refusals_name_what_was_found(change: tuple[int, int], found: str) -> None:
    frames = wire(encode_step(np.zeros(3, dtype=np.int32), 4, 0, 2))
    words = np.frombuffer(frames[0], dtype=np.int32).copy()
    words[change[0]] = change[1]
    with pytest.raises(WorkerError) as error:
        decode_header([words.tobytes(), frames[1]], 2, 4, (Kind.STEP, Kind.STOP))
    assert found in str(error.value)
    assert "\n" not in str(error.value)


def test_all_problems_of_a_header_are_reported_together() -> None:
    frames = wire(encode_signal(Kind.HELLO, 1, 5))
    with pytest.raises(WorkerError, match=r"kind 1.*generation 1; expected 2; rank 5; expected 6"):
        decode_header(frames, 6, 2, (Kind.RESULT,))


def test_sizes_that_disagree_with_the_header_are_refused() -> None:
    frames = wire(encode_step(np.zeros(3, dtype=np.int32), 0, 0, 0))
    header = decode_header(frames, 0, 0, (Kind.STEP,))
    with pytest.raises(WorkerError, match="packet has 11 bytes; 12 announced"):
        decode_step(header, [frames[0], frames[1][:-1]])
    with pytest.raises(WorkerError, match="0 arrays; expected 1"):
        decode_step(header, frames[:1])


def test_negative_shape_whose_product_fits_is_refused() -> None:
    frames = wire(encode_result(result(rows=2, columns=2), 4, 0, 0))
    words = np.frombuffer(frames[0], dtype=np.int32).copy()
    words[HEADER_WORDS - 2 : HEADER_WORDS] = (-2, -2)
    frames[0] = words.tobytes()
    with pytest.raises(WorkerError, match=r"logits of shape \[-2, -2\]"):
        decode_result(decode_header(frames, 0, 4, (Kind.RESULT,)), frames, 0)


def test_too_large_messages_are_refused_before_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_PACKET_BYTES", 16)
    monkeypatch.setattr(messages, "MAX_RESULT_BYTES", 16)
    with pytest.raises(WorkerError, match="20 bytes; at most 16"):
        encode_step(np.zeros(5, dtype=np.int32), 0, 0, 0)
    with pytest.raises(WorkerError, match="logits take 40 bytes; at most 16"):
        encode_result(result(), 4, 0, 0)
    encode_step(np.zeros(4, dtype=np.int32), 0, 0, 0)


def test_announced_size_beyond_the_limit_is_refused() -> None:
    frames = wire(encode_result(result(), 4, 0, 0))
    words = np.frombuffer(frames[0], dtype=np.int32).copy()
    words[HEADER_WORDS - 2 : HEADER_WORDS] = (2**31 - 1, 2**31 - 1)  # the product does not fit 32 bits either
    frames[0] = words.tobytes()
    with pytest.raises(WorkerError, match="the limit is"):
        decode_result(decode_header(frames, 0, 4, (Kind.RESULT,)), frames, 0)


def test_wrong_sequence_and_generation() -> None:
    frames = wire(encode_result(result(), 4, 17, 0))
    with pytest.raises(WorkerError, match="sent result 17; expected 18"):
        decode_result(decode_header(frames, 0, 4, (Kind.RESULT,)), frames, 18)
    with pytest.raises(WorkerError, match="answered for generation 4; this is generation 5"):
        encode_result(result(), 5, 0, 0)
