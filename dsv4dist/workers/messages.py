"""The messages between driver and rank as ZeroMQ frames: a fixed int32 header, then raw arrays; checked on arrival.

Header words: magic, version, kind, generation, sequence, rank, then up to six counts of the kind; the rest is 0.
`sequence` numbers the packets, and the results, of one generation. Nothing is pickled, so a message can at worst be
refused. Every frame costs both ends as much time as some KB do, so that small arrays share the header's.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from dsv4dist.errors import WorkerError
from dsv4dist.workers.executor import Int32Array, StepResult

Buffer = bytes | memoryview
MAGIC = 0x44345057
VERSION = 2
HEADER_WORDS = 12
_FIXED_WORDS = 6
_HEADER = struct.Struct(f"={HEADER_WORDS}i")
MAX_PACKET_BYTES = 256 << 20
"""Largest packet: block tables of many long requests are a few MiB."""
MAX_RESULT_BYTES = 4 << 30
"""Largest frame of a result: the logits of 8,192 rows and a vocabulary of 131,072."""
SEQUENCE_MASK = 0x7FFFFFFF


class Kind(IntEnum):
    """What a message is."""

    HELLO = 1  # rank -> driver, once: the rank listens
    STEP = 2  # driver -> rank, with one frame: the packet
    RESULT = 3  # rank 0 -> driver, token_ids and logprobs behind the header; if there are logits, one frame with them
    STOP = 4  # driver -> rank: leave the loop


@dataclass(frozen=True)
class Header:
    """A received header whose magic, version, kind and size are right."""

    kind: Kind
    generation: int
    sequence: int
    rank: int
    counts: tuple[int, ...]


def encode_signal(kind: Kind, generation: int, rank: int) -> list[Buffer]:
    """The frames of a HELLO or STOP."""
    return [_header(kind, generation, 0, rank, ())]


def encode_step(packet: Int32Array, generation: int, sequence: int, rank: int) -> list[Buffer]:
    """The frames of a STEP; the packet is not copied.  Raises: WorkerError when it is too large."""
    assert packet.dtype == np.int32, f"a packet of {packet.dtype} instead of int32"
    assert packet.ndim == 1, f"a packet of {packet.ndim} dimensions instead of 1"
    if packet.nbytes > MAX_PACKET_BYTES:
        raise WorkerError(f"step packet of {packet.nbytes} bytes; at most {MAX_PACKET_BYTES}: use fewer requests")
    return [_header(Kind.STEP, generation, sequence, rank, (packet.size,)), _bytes_of(packet)]


def encode_result(result: StepResult, generation: int, sequence: int, rank: int) -> list[Buffer]:
    """The frames of a RESULT.  Raises: WorkerError for a result of another generation or one that is too large."""
    if result.generation != generation:
        raise WorkerError(f"the runner answered for generation {result.generation}; this is generation {generation}")
    arrays = (
        np.ascontiguousarray(result.token_ids, dtype=np.int32),
        np.ascontiguousarray(result.logprobs, dtype=np.float32),
        np.ascontiguousarray(result.logits, dtype=np.float32),
    )
    assert arrays[2].ndim == 2, f"logits have {arrays[2].ndim} dimensions instead of 2"
    for name, array in zip(("token_ids", "logprobs", "logits"), arrays, strict=True):
        if array.nbytes > MAX_RESULT_BYTES:
            raise WorkerError(f"{name} take {array.nbytes} bytes; at most {MAX_RESULT_BYTES}: use smaller steps")
    elapsed_us = min(result.elapsed_us, SEQUENCE_MASK)
    counts = (result.step_id, elapsed_us, arrays[0].size, arrays[1].size, *arrays[2].shape)
    head = _header(Kind.RESULT, generation, sequence, rank, counts) + arrays[0].tobytes() + arrays[1].tobytes()
    return [head, _bytes_of(arrays[2])] if arrays[2].size else [head]


def decode_header(frames: Sequence[Buffer], rank: int, generation: int, allowed: tuple[Kind, ...]) -> Header:
    """Check a message's first frame.  Raises: WorkerError naming the sender and all that is wrong with it."""
    sender = f"message between driver and rank {rank}"
    size = len(frames[0]) if frames else 0
    if size < _HEADER.size:
        raise WorkerError(f"{sender}: header of {size} bytes; expected {_HEADER.size}")
    words = _HEADER.unpack_from(frames[0])
    if words[:2] != (MAGIC, VERSION):
        raise WorkerError(
            f"{sender}: magic {words[0]:#x} version {words[1]}; expected {MAGIC:#x} {VERSION}: "
            "run the same dsv4dist on every node"
        )
    problems = []
    if words[2] not in allowed:
        problems.append(f"kind {words[2]}; expected {' or '.join(kind.name for kind in allowed)}")
    if words[3] != generation:
        problems.append(f"generation {words[3]}; expected {generation}")
    if words[5] != rank:
        problems.append(f"rank {words[5]}; expected {rank}")
    if size > _HEADER.size and words[2] != Kind.RESULT:
        problems.append(f"header of {size} bytes; expected {_HEADER.size}")
    if words[4] < 0:
        problems.append(f"sequence {words[4]} is negative")
    if problems:
        raise WorkerError(f"{sender}: {'; '.join(problems)}")
    return Header(Kind(words[2]), words[3], words[4], words[5], words[_FIXED_WORDS:])


def decode_step(header: Header, frames: Sequence[Buffer]) -> Int32Array:
    """The packet of a STEP as a new, writable buffer.  Raises: WorkerError when sizes disagree."""
    (packet,) = _arrays(header, frames[1:], (header.counts[0],), ("packet",), MAX_PACKET_BYTES)
    return np.frombuffer(packet, dtype=np.int32).copy()


def decode_result(header: Header, frames: Sequence[Buffer], sequence: int) -> StepResult:
    """The RESULT with the number `sequence`; logits stay in the message's memory, read-only.

    Raises: WorkerError when it has another number, or when sizes disagree or exceed the limits.
    """
    if header.sequence != sequence:
        raise WorkerError(f"rank {header.rank} sent result {header.sequence}; expected {sequence}")
    step_id, elapsed_us, tokens, logprobs, rows, columns = header.counts
    if rows < 0 or columns < 0:
        raise WorkerError(f"result of rank {header.rank}: logits of shape [{rows}, {columns}]")
    # A small message may lie at any address: copied, its arrays are aligned.
    body = bytes(memoryview(frames[0])[_HEADER.size :])
    found = [body[: 4 * max(0, tokens)], body[4 * max(0, tokens) :], *frames[1:]]
    counts, names = [tokens, logprobs], ["token_ids", "logprobs"]
    if rows * columns:
        counts.append(rows * columns)
        names.append("logits")
    arrays = _arrays(header, found, counts, names, MAX_RESULT_BYTES)
    logits = memoryview(arrays[2]).toreadonly() if rows * columns else b""
    return StepResult(
        generation=header.generation,
        step_id=step_id,
        token_ids=np.frombuffer(arrays[0], dtype=np.int32),
        logprobs=np.frombuffer(arrays[1], dtype=np.float32),
        logits=np.frombuffer(logits, dtype=np.float32).reshape(rows, columns),
        elapsed_us=elapsed_us,
    )


def _header(kind: Kind, generation: int, sequence: int, rank: int, counts: tuple[int, ...]) -> bytes:
    rest = (0,) * (HEADER_WORDS - _FIXED_WORDS - len(counts))
    return _HEADER.pack(MAGIC, VERSION, kind, generation, sequence, rank, *counts, *rest)


def _arrays(
    header: Header, frames: Sequence[Buffer], counts: Sequence[int], names: Sequence[str], limit: int
) -> Sequence[Buffer]:
    what = f"{header.kind.name} message of rank {header.rank}"
    if len(frames) != len(counts):
        raise WorkerError(f"{what}: {len(frames)} arrays; expected {len(counts)}")
    problems = []
    for name, frame, count in zip(names, frames, counts, strict=True):
        if count < 0 or 4 * count > limit:
            problems.append(f"{name} announced with {count} words; the limit is {limit // 4}")
        elif len(frame) != 4 * count:
            problems.append(f"{name} has {len(frame)} bytes; {4 * count} announced")
    if problems:
        raise WorkerError(f"{what}: {'; '.join(problems)}")
    return frames


def _bytes_of(array: npt.NDArray[np.generic]) -> memoryview:
    # memoryview.cast refuses arrays with a dimension of 0.
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
