"""Scheduled requests -> the sections of a step packet."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from dsv4dist.cache.blocks import NO_BLOCK, GroupBlocks
from dsv4dist.cache.groups import GROUP_NAMES
from dsv4dist.engine.scheduler import ScheduledRequest
from dsv4dist.workers.packet import Int32Array, RowKind, StepKind, StepPlan

NO_TARGET = -1
_NO_BLOCKS = GroupBlocks()


def build_step_plan(chosen: Sequence[ScheduledRequest], generation: int, step_id: int, num_steps: int = 1) -> StepPlan:
    """What all ranks need to know of a step, or several; see StepPlan and PacketShape.sections for the contents."""
    requests = [one.request for one in chosen]
    tables = [request.tables for request in requests]
    counts = np.array([one.num_tokens for one in chosen], dtype=np.int32)
    query_start_loc = np.zeros(len(chosen) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_start_loc[1:])
    params = np.frombuffer(b"".join([request.packed_params() for request in requests]), dtype=np.int32).reshape(-1, 5)
    row_kinds, num_drafts, num_prefills, token_ids = _rows(chosen)
    sections: dict[str, Int32Array] = {
        "query_start_loc": query_start_loc,
        "seq_lens": counts + np.array([request.num_computed for request in requests], dtype=np.int32),
        "row_kind": np.array(row_kinds, dtype=np.int32),
        "num_drafts": np.array(num_drafts, dtype=np.int32),
        "temperature": params[:, 0],
        "top_p": params[:, 1],
        "top_k": params[:, 2],
        "seed": params[:, 3:],
        "token_ids": np.array(token_ids, dtype=np.int32),
        "targets": _targets(chosen, query_start_loc),
    }
    for name in GROUP_NAMES:
        # A model has the same groups for every request.
        group = [table[name] for table in tables] if name in tables[0] else [_NO_BLOCKS] * len(tables)
        sections[f"{name}.first_block"] = np.array([table.first_block for table in group], dtype=np.int32)
        sections[f"{name}.blocks"] = _padded([table.blocks for table in group])
    kind = StepKind.DECODE if not num_prefills else StepKind.MIXED
    kind = StepKind.PREFILL if num_prefills == len(chosen) else kind
    return StepPlan(generation, step_id, kind, sections, num_steps)


def _rows(chosen: Sequence[ScheduledRequest]) -> tuple[list[RowKind], list[int], int, list[int]]:
    """What each request wants of its rows, its drafts among them, how many requests are no decode, and all tokens.

    A decode runs its newest output token and drafts; a preempted request that is computed again is none.
    """
    row_kinds: list[RowKind] = []
    num_drafts: list[int] = []
    num_prefills = 0
    token_ids: list[int] = []
    for request, num_tokens in chosen:
        start, prompt, output = request.num_computed, len(request.prompt_token_ids), request.output_token_ids
        is_next = start + 1 == prompt + len(output)
        if is_next and num_tokens == 1 and output:
            token_ids.append(output[-1])
        else:
            token_ids += request.tokens(start, start + num_tokens)
            num_prefills += start < prompt or num_tokens > 1 + len(request.draft_token_ids)
        drafts = start + num_tokens - prompt - len(output)
        wants_token = request.row_kind is not RowKind.SAMPLE or drafts >= 0
        row_kinds.append(request.row_kind if wants_token else RowKind.NOTHING)
        num_drafts.append(max(0, drafts))
    return row_kinds, num_drafts, num_prefills, token_ids


def _targets(chosen: Sequence[ScheduledRequest], query_start_loc: Int32Array) -> Int32Array:
    """The token after every row, as far as it is known: what scores are of, and what a draft layer starts from."""
    targets = np.full(query_start_loc[-1], NO_TARGET, dtype=np.int32)
    for one, row in zip(chosen, query_start_loc.tolist(), strict=False):
        if not one.request.is_decoding:
            start = one.request.num_computed + 1
            following = one.request.tokens(start, start + one.num_tokens)
            targets[row : row + len(following)] = following
    return targets


def _padded(rows: list[array[int]]) -> Int32Array:
    """The rows side by side, int32 [rows, longest], with NO_BLOCK behind each."""
    lens = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    width = int(lens.max(initial=0))
    flat = np.frombuffer(b"".join(rows), dtype=np.int32)
    if flat.size == len(rows) * width:
        return flat.reshape(len(rows), width)
    table = np.full((len(rows), width), NO_BLOCK, dtype=np.int32)
    table[np.arange(width) < lens[:, np.newaxis]] = flat
    return table
