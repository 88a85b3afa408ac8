"""Scheduled requests -> the sections of a step packet."""

from __future__ import annotations

import numpy as np

from dsv4dist.cache.blocks import NO_BLOCK, GroupBlocks
from dsv4dist.cache.groups import GROUP_NAMES
from dsv4dist.engine.scheduler import ScheduledRequest
from dsv4dist.workers.packet import Int32Array, RowKind, StepKind, StepPlan

NO_TARGET = -1


def build_step_plan(chosen: list[ScheduledRequest], generation: int, step_id: int) -> StepPlan:
    """What all ranks need to know of a step; see PacketShape.sections for the contents."""
    requests = [one.request for one in chosen]
    counts = np.array([one.num_tokens for one in chosen], dtype=np.int32)
    starts = [one.request.num_computed for one in chosen]
    ends = [start + int(count) for start, count in zip(starts, counts, strict=True)]
    token_ids, targets = [], []
    for request, start, end in zip(requests, starts, ends, strict=True):
        token_ids += request.tokens(start, end)
        following = request.tokens(start + 1, end + 1)
        targets += following + [NO_TARGET] * (end - start - len(following))
    row_kinds = [
        request.row_kind if request.row_kind is not RowKind.SAMPLE or end == request.num_tokens else RowKind.NOTHING
        for request, end in zip(requests, ends, strict=True)
    ]
    seeds = np.array([request.seed for request in requests], dtype=np.uint64)
    sections: dict[str, Int32Array] = {
        "query_start_loc": np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        "seq_lens": np.array(ends, dtype=np.int32),
        "row_kind": np.array(row_kinds, dtype=np.int32),
        "num_drafts": np.zeros(len(requests), dtype=np.int32),
        "temperature": _float_bits([request.params.temperature for request in requests]),
        "top_p": _float_bits([request.params.top_p for request in requests]),
        "top_k": np.array([request.params.top_k for request in requests], dtype=np.int32),
        "seed": seeds.view(np.uint32).reshape(-1, 2).view(np.int32),
        "token_ids": np.array(token_ids, dtype=np.int32),
        "targets": np.array(targets, dtype=np.int32),
    }
    for name in GROUP_NAMES:
        tables = [request.tables.get(name, GroupBlocks()) for request in requests]
        sections[f"{name}.first_block"] = np.array([table.first_block for table in tables], dtype=np.int32)
        sections[f"{name}.blocks"] = _padded([table.blocks for table in tables])
    return StepPlan(generation, step_id, _kind(chosen), sections)


def _kind(chosen: list[ScheduledRequest]) -> StepKind:
    prefill = [bool(one.request.num_prompt_left) for one in chosen]
    if not any(prefill):
        return StepKind.DECODE
    return StepKind.PREFILL if all(prefill) else StepKind.MIXED


def _padded(rows: list[list[int]]) -> Int32Array:
    table = np.full((len(rows), max(map(len, rows), default=0)), NO_BLOCK, dtype=np.int32)
    for row, blocks in zip(table, rows, strict=True):
        row[: len(blocks)] = blocks
    return table


def _float_bits(values: list[float]) -> Int32Array:
    return np.array(values, dtype=np.float32).view(np.int32)
