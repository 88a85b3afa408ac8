"""The step packet: what is packed is what arrives, and nothing damaged is taken."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dsv4dist.cache.groups import GROUP_NAMES
from dsv4dist.errors import WorkerError
from dsv4dist.workers.packet import HEADER, PacketShape, StepKind, StepPlan, read_header, split_sections


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    shape = PacketShape(draw(st.integers(0, 4)), draw(st.integers(0, 9)), draw(st.tuples(*[st.integers(0, 3)] * 4)))
    sections = {name: draw(hnp.arrays(np.int32, dims)) for name, dims in shape.sections().items()}
    return StepPlan(draw(st.integers(0, 9)), draw(st.integers(0, 9)), draw(st.sampled_from(StepKind)), sections)


@settings(max_examples=50)
@given(plans())
def test_round_trip(plan: StepPlan) -> None:
    packet = plan.pack()
    header = read_header(packet, 4, 9)
    assert (header.generation, header.step_id, header.kind) == (plan.generation, plan.step_id, plan.kind)
    on_device = split_sections(torch.from_numpy(packet), header.shape)
    assert on_device.keys() == plan.sections.keys()
    for name, values in plan.sections.items():
        assert np.array_equal(on_device[name].numpy(), values), name


@settings(max_examples=100)
@given(plans(), st.data())
def test_a_damaged_header_is_refused_or_describes_the_same_buffer(plan: StepPlan, data: st.DataObject) -> None:
    packet = plan.pack()
    packet[data.draw(st.integers(0, len(HEADER) - 1))] = data.draw(st.integers(-(2**31), 2**31 - 1))
    with contextlib.suppress(WorkerError):
        assert read_header(packet, 4, 9).shape.num_words == packet.size


def test_truncated_and_oversized_packets_are_refused() -> None:
    shape = PacketShape(2, 3, (1, 0, 0, 0))
    plan = StepPlan(0, 0, StepKind.DECODE, {n: np.zeros(d, np.int32) for n, d in shape.sections().items()})
    packet = plan.pack()
    for broken in (packet[:3], packet[:-1], np.append(packet, packet[:1])):
        with pytest.raises(WorkerError, match="words"):
            read_header(broken, 2, 3)
    with pytest.raises(WorkerError, match="num_requests is 2; the limit is 1"):
        read_header(packet, 1, 3)
    assert len(GROUP_NAMES) == len(shape.widths)
