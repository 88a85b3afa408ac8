"""The step packet: everything that crosses to a rank at a step, as one int32 buffer, and its checked way back.

A fixed header, then sections whose sizes follow from the header. The same table of sections packs on the driver and
finds the sections on the device, where the whole buffer arrives in one copy. float32 values travel as their bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from dsv4dist.cache.groups import GROUP_NAMES
from dsv4dist.errors import WorkerError

Int32Array = npt.NDArray[np.int32]

MAGIC = 0x44535634
VERSION = 1
COUNTERS = ("magic", "version", "generation", "step_id", "kind", "num_requests", "num_tokens")
HEADER = (*COUNTERS, *(f"{name}.width" for name in GROUP_NAMES))


class StepKind(IntEnum):
    """What a step holds; decides whether a captured graph may run it."""

    PREFILL = 0
    MIXED = 1
    DECODE = 2


class RowKind(IntEnum):
    """What a request wants of this step's rows."""

    NOTHING = 0  # a prompt that goes on in the next step
    SAMPLE = 1  # one token, from its last row
    VERIFY = 2  # one token from each of its rows: its newest token and drafts of those that follow
    SCORE = 3  # the log-probability of the target of every row
    SCORE_LOGITS = 4  # the same, and the logits of every row


@dataclass(frozen=True)
class PacketShape:
    """The numbers in the header that decide the size of every section."""

    num_requests: int
    num_tokens: int
    widths: tuple[int, ...]  # block table columns of each of GROUP_NAMES

    def sections(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every section, in buffer order. R requests, T tokens:

        query_start_loc [R + 1]  prefix sums of the requests' tokens in this step
        seq_lens        [R]      tokens of each request including this step's
        row_kind        [R]      a RowKind
        temperature, top_p [R]   float32 bits; temperature 0 = greedy
        top_k           [R]      0 = no limit
        seed            [R, 2]   low and high half
        token_ids       [T]
        targets         [T]      the token whose log-probability a SCORE row asks for, -1 = none
        GROUP.first_block [R], GROUP.blocks [R, width]   see kernels.block_table
        """
        r, t = self.num_requests, self.num_tokens
        shapes: dict[str, tuple[int, ...]] = {
            "query_start_loc": (r + 1,),
            "seq_lens": (r,),
            "row_kind": (r,),
            "temperature": (r,),
            "top_p": (r,),
            "top_k": (r,),
            "seed": (r, 2),
            "token_ids": (t,),
            "targets": (t,),
        }
        for name, width in zip(GROUP_NAMES, self.widths, strict=True):
            shapes[f"{name}.first_block"] = (r,)
            shapes[f"{name}.blocks"] = (r, width)
        return shapes

    @property
    def num_words(self) -> int:
        return len(HEADER) + sum(int(np.prod(shape)) for shape in self.sections().values())


@dataclass(frozen=True)
class StepPlan:
    """One step as the driver planned it: header values and int32 sections by name."""

    generation: int
    step_id: int
    kind: StepKind
    sections: dict[str, Int32Array]

    def pack(self) -> Int32Array:
        """The packet; every section must have the shape that the others imply."""
        shape = PacketShape(
            num_requests=len(self.sections["seq_lens"]),
            num_tokens=len(self.sections["token_ids"]),
            widths=tuple(self.sections[f"{name}.blocks"].shape[1] for name in GROUP_NAMES),
        )
        packet = np.empty(shape.num_words, dtype=np.int32)
        header = (MAGIC, VERSION, self.generation, self.step_id, self.kind, shape.num_requests, shape.num_tokens)
        packet[: len(HEADER)] = header + shape.widths
        views = split_sections(packet, shape)
        assert views.keys() == self.sections.keys(), f"sections differ: {views.keys() ^ self.sections.keys()}"
        for name, values in self.sections.items():
            assert values.shape == views[name].shape, f"{name}: {values.shape} instead of {views[name].shape}"
            views[name][...] = values
        return packet


@dataclass(frozen=True)
class PacketHeader:
    """The header of a received packet, checked against its size."""

    generation: int
    step_id: int
    kind: StepKind
    shape: PacketShape


def read_header(packet: Int32Array, max_requests: int, max_tokens: int) -> PacketHeader:
    """Check a received packet.  Raises: WorkerError saying what was found."""
    if packet.ndim != 1 or packet.dtype != np.int32 or packet.size < len(HEADER):
        raise WorkerError(f"step packet: {packet.size} words are less than its header of {len(HEADER)}")
    values = {name: int(value) for name, value in zip(HEADER, packet, strict=False)}
    if (values["magic"], values["version"]) != (MAGIC, VERSION):
        raise WorkerError(
            f"step packet: magic {values['magic']:#x} version {values['version']}; expected {MAGIC:#x} {VERSION}"
        )
    counts = {name: value for name, value in values.items() if name.startswith("num_") or name.endswith(".width")}
    limits = {"num_requests": max_requests, "num_tokens": max_tokens}
    for name, value in counts.items():
        if value < 0 or value > limits.get(name, packet.size):
            raise WorkerError(f"step packet: {name} is {value}; the limit is {limits.get(name, packet.size)}")
    shape = PacketShape(
        values["num_requests"], values["num_tokens"], tuple(values[f"{name}.width"] for name in GROUP_NAMES)
    )
    if packet.size != shape.num_words:
        raise WorkerError(f"step packet: {packet.size} words; its header asks for {shape.num_words}")
    if values["kind"] not in list(StepKind):
        raise WorkerError(f"step packet: kind {values['kind']} is unknown")
    return PacketHeader(values["generation"], values["step_id"], StepKind(values["kind"]), shape)


def split_sections(buffer: Any, shape: PacketShape) -> dict[str, Any]:
    """Views of every section of a packet, for a numpy array or a torch tensor of it."""
    views, offset = {}, len(HEADER)
    for name, dims in shape.sections().items():
        size = int(np.prod(dims))
        views[name] = buffer[offset : offset + size].reshape(dims)
        offset += size
    return views
