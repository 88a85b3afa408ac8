"""The step packet: everything that crosses to a rank at a step, as one int32 buffer, and its checked way back.

A fixed header, then sections whose sizes follow from the header. The same table of sections packs on the driver and
finds the sections on the device, where the whole buffer arrives in one copy. float32 values travel as their bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from dsv4dist.cache.groups import GROUP_NAMES
from dsv4dist.config.runtime import MAX_RUN_AHEAD
from dsv4dist.errors import WorkerError
from dsv4dist.step.sections import HEADER, PacketShape, split_sections

Int32Array = npt.NDArray[np.int32]

MAGIC = 0x44535634
VERSION = 2


class StepKind(IntEnum):
    """What a step holds; decides whether a captured graph may run it."""

    PREFILL = 0
    MIXED = 1
    DECODE = 2


class RowKind(IntEnum):
    """What a request wants of this step's rows."""

    NOTHING = 0  # a prompt that goes on in the next step
    SAMPLE = 1  # one token from its last row, and one more for each draft that turns out right
    SCORE = 2  # the log-probability of the target of every row
    SCORE_LOGITS = 3  # the same, and the logits of every row


@dataclass(frozen=True)
class StepPlan:
    """One step as the driver planned it: header values and int32 sections by name.

    num_steps  more than 1: the step and those that follow from it, each request going on by the token it sampled, with
               the numbers step_id + 1, ...; decode steps without drafts only
    """

    generation: int
    step_id: int
    kind: StepKind
    sections: dict[str, Int32Array]
    num_steps: int = 1

    def pack(self) -> Int32Array:
        """The packet; every section must have the shape that the others imply."""
        shape = PacketShape(
            num_requests=len(self.sections["seq_lens"]),
            num_tokens=len(self.sections["token_ids"]),
            widths=tuple(self.sections[f"{name}.blocks"].shape[1] for name in GROUP_NAMES),
        )
        packet = np.empty(shape.num_words, dtype=np.int32)
        counters = (MAGIC, VERSION, self.generation, self.step_id, self.kind, self.num_steps)
        packet[: len(HEADER)] = (*counters, shape.num_requests, shape.num_tokens, *shape.widths)
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
    num_steps: int
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
    limits = {"num_steps": MAX_RUN_AHEAD, "num_requests": max_requests, "num_tokens": max_tokens}
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
    kind, num_steps = StepKind(values["kind"]), values["num_steps"]
    if num_steps != 1 and (num_steps == 0 or kind is not StepKind.DECODE):
        raise WorkerError(f"step packet: {num_steps} steps of kind {kind.name}; only decode steps can be several")
    return PacketHeader(values["generation"], values["step_id"], kind, num_steps, shape)
