"""What each row of a step is and where it writes, in one Triton launch (attention spec 1.4, 1.5, 2.7)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from dsv4dist.errors import ShapeError
from dsv4dist.kernels._triton.checks import check_integers, check_table
from dsv4dist.kernels._triton.compile_spec import CompileSpec
from dsv4dist.kernels._triton.early_launch import early_launch, wait_for_previous
from dsv4dist.kernels._triton.quantise import lookup_slots
from dsv4dist.kernels.block_table import BlockTable
from dsv4dist.kernels.step_rows import CompressedRows, CompressedTables, StepRows

ROWS = 32
REQS = 256
MAX_KINDS = 2

_ROW_ARRAYS = 5
"""Outputs that every model has; each kind of compression adds _KIND_ARRAYS."""
_KIND_ARRAYS = 3

_TABLES = ("window", "a_entries", "a_states", "b_entries", "b_states")
_POINTERS = ("token_ids_ptr", "starts_ptr", "seq_lens_ptr",
             *(f"{table}_{part}_ptr" for table in _TABLES for part in ("blocks", "first")))  # fmt: skip
_NUMBERS = ("num_rows", "num_reqs", "stride_out",
            *(f"{part}_{table}" for table in _TABLES for part in ("stride", "columns")))  # fmt: skip


@triton.jit
def _slots(blocks_ptr, first_ptr, stride, num_columns, req, entry, wanted, BLOCK_SIZE: tl.constexpr):
    """int64 slots of entry [N] of requests [N], -1 where not `wanted` or not there."""
    first_block = tl.load(first_ptr + req, mask=wanted, other=0)
    return lookup_slots(blocks_ptr + req.to(tl.int64) * stride, first_block, entry, wanted, num_columns, BLOCK_SIZE)


@triton.jit
def _compressed(
    out_ptr, stride_out, entries_blocks_ptr, entries_first_ptr, stride_entries, columns_entries, states_blocks_ptr,
    states_first_ptr, stride_states, columns_states, row, wanted, req, position, RATIO: tl.constexpr,
    ENTRIES_SIZE: tl.constexpr, STATES_SIZE: tl.constexpr,
):  # fmt: skip
    """Write one kind's arrays of the rows [N], from `out_ptr` on."""
    real = position >= 0
    completes = real & ((position + 1) % RATIO == 0)
    entry_slots = _slots(entries_blocks_ptr, entries_first_ptr, stride_entries, columns_entries, req, position // RATIO,
                         completes, ENTRIES_SIZE)  # fmt: skip
    state_slots = _slots(states_blocks_ptr, states_first_ptr, stride_states, columns_states, req, position, real,
                         STATES_SIZE)  # fmt: skip
    tl.store(out_ptr + row, entry_slots, mask=wanted)
    tl.store(out_ptr + stride_out + row, ((position + 1) // RATIO).to(tl.int64), mask=wanted)
    tl.store(out_ptr + 2 * stride_out + row, state_slots, mask=wanted)


# Inputs lie in a packet, where a section's place and width change with every step; compiled for each alignment and
# width there would be thousands of variants.
@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def _step_rows_kernel(
    token_ids_ptr, starts_ptr, seq_lens_ptr, window_blocks_ptr, window_first_ptr, a_entries_blocks_ptr,
    a_entries_first_ptr, a_states_blocks_ptr, a_states_first_ptr, b_entries_blocks_ptr, b_entries_first_ptr,
    b_states_blocks_ptr, b_states_first_ptr, out_ptr, num_rows, num_reqs, stride_out, stride_window, columns_window,
    stride_a_entries, columns_a_entries, stride_a_states, columns_a_states, stride_b_entries, columns_b_entries,
    stride_b_states, columns_b_states, WINDOW_SIZE: tl.constexpr, A_RATIO: tl.constexpr, A_ENTRIES_SIZE: tl.constexpr,
    A_STATES_SIZE: tl.constexpr, B_RATIO: tl.constexpr, B_ENTRIES_SIZE: tl.constexpr, B_STATES_SIZE: tl.constexpr,
    ROWS: tl.constexpr, REQS: tl.constexpr, ROW_ARRAYS: tl.constexpr, KIND_ARRAYS: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows of every array. A kind of ratio 0 is absent. Positions fit int32."""
    wait_for_previous()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    wanted = row < num_rows
    ended = tl.zeros((ROWS,), tl.int32)
    for first_req in range(0, num_reqs, REQS):
        reqs = first_req + tl.arange(0, REQS)
        ends = tl.load(starts_ptr + 1 + reqs, mask=reqs < num_reqs, other=0x7FFFFFFF).to(tl.int32)
        ended += tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), 1)
    # No request before a row's own ends behind it, and all requests of no rows before it have ended.
    req = tl.minimum(ended, num_reqs - 1)
    end = tl.load(starts_ptr + 1 + req, mask=wanted, other=0).to(tl.int32)
    seq_len = tl.load(seq_lens_ptr + req, mask=wanted, other=0).to(tl.int32)
    position = tl.where(row < end, seq_len - end + row, -1)
    window_slots = _slots(window_blocks_ptr, window_first_ptr, stride_window, columns_window, req, position,
                          position >= 0, WINDOW_SIZE)  # fmt: skip
    token = tl.load(token_ids_ptr + row, mask=wanted, other=0)
    tl.store(out_ptr + row, token.to(tl.int64), mask=wanted)
    tl.store(out_ptr + stride_out + row, req.to(tl.int64), mask=wanted)
    tl.store(out_ptr + 2 * stride_out + row, position.to(tl.int64), mask=wanted)
    tl.store(out_ptr + 3 * stride_out + row, tl.maximum(position, 0).to(tl.int64), mask=wanted)
    tl.store(out_ptr + 4 * stride_out + row, window_slots, mask=wanted)
    if A_RATIO:
        _compressed(
            out_ptr + ROW_ARRAYS * stride_out, stride_out, a_entries_blocks_ptr, a_entries_first_ptr, stride_a_entries,
            columns_a_entries, a_states_blocks_ptr, a_states_first_ptr, stride_a_states, columns_a_states, row, wanted,
            req, position, A_RATIO, A_ENTRIES_SIZE, A_STATES_SIZE,
        )  # fmt: skip
    if B_RATIO:
        _compressed(
            out_ptr + (ROW_ARRAYS + KIND_ARRAYS) * stride_out, stride_out, b_entries_blocks_ptr, b_entries_first_ptr,
            stride_b_entries, columns_b_entries, b_states_blocks_ptr, b_states_first_ptr, stride_b_states,
            columns_b_states, row, wanted, req, position, B_RATIO, B_ENTRIES_SIZE, B_STATES_SIZE,
        )  # fmt: skip


def step_rows(
    token_ids: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    window: BlockTable,
    compressed: Sequence[CompressedTables] = (),
) -> StepRows:
    """The request, position and slots of each of T rows of R requests.

        token_ids        [T]; rows from query_start_loc[R] on are padding
        query_start_loc  [R + 1], the first row of each request; a request may have none
        seq_lens         [R], tokens of each request, those of its rows included
        compressed       tables of at most two kinds
    All int32 or int64; positions fit int32, slots are int64.
    Capture: one launch, which depends on sizes only.  Raises: ShapeError, also for rows without requests.
    """
    count, num_reqs = token_ids.numel(), seq_lens.numel()
    check_integers("token_ids", token_ids, (count,))
    check_integers("seq_lens", seq_lens, (num_reqs,))
    check_integers("query_start_loc", query_start_loc, (num_reqs + 1,))
    if len(compressed) > MAX_KINDS:
        raise ShapeError("compressed", f"at most {MAX_KINDS} kinds", len(compressed))
    names = ["window", *(f"ratio {one.ratio} {part}" for one in compressed for part in ("entries", "states"))]
    tables = [window, *(table for one in compressed for table in (one.entries, one.states))]
    for name, table in zip(names, tables, strict=True):
        check_table(name, table)
        if table.blocks.shape[0] != num_reqs:
            raise ShapeError(f"{name} blocks", f"{num_reqs} requests", list(table.blocks.shape))
    if count and not num_reqs:
        raise ShapeError("token_ids", "no rows, since there are no requests", list(token_ids.shape))
    # Arrays start at multiples of 16 bytes, so that kernels that read them find the same alignment at every T.
    num_arrays, stride = _ROW_ARRAYS + _KIND_ARRAYS * len(compressed), count + count % 2
    out = torch.empty(num_arrays, stride, dtype=torch.int64, device=token_ids.device)
    if count:
        num_absent = 2 * len(_TABLES) - 2 * len(tables)
        pointers = [part for table in tables for part in (table.blocks, table.first_block)]
        strides = [number for table in tables for number in (table.blocks.stride(0), table.blocks.shape[1])]
        kinds = {}
        for letter, one in zip("AB", [*compressed, None, None], strict=False):
            kinds[f"{letter}_RATIO"] = one.ratio if one else 0
            kinds[f"{letter}_ENTRIES_SIZE"] = one.entries.block_size if one else 1
            kinds[f"{letter}_STATES_SIZE"] = one.states.block_size if one else 1
        _step_rows_kernel[(triton.cdiv(count, ROWS),)](
            token_ids, query_start_loc, seq_lens, *pointers, *[None] * num_absent, out, count, num_reqs, stride,
            *strides, *[0] * num_absent, WINDOW_SIZE=window.block_size, **kinds, ROWS=ROWS, REQS=REQS,
            ROW_ARRAYS=_ROW_ARRAYS, KIND_ARRAYS=_KIND_ARRAYS, num_warps=4, **early_launch(token_ids.device),
        )  # fmt: skip
    arrays = list(out[:, :count])
    each_kind = range(_ROW_ARRAYS, num_arrays, _KIND_ARRAYS)
    return StepRows(
        *arrays[:_ROW_ARRAYS], tuple(CompressedRows(*arrays[first : first + _KIND_ARRAYS]) for first in each_kind)
    )


def compile_specs() -> list[CompileSpec]:
    """A step of Flash and Pro, which compress by 4 and by 128, and one of a model that sees windows only."""
    signature = {**dict.fromkeys(_POINTERS, "*i32"), "out_ptr": "*i64", **dict.fromkeys(_NUMBERS, "i32")}
    shape = {"WINDOW_SIZE": 64, "ROWS": ROWS, "REQS": REQS, "ROW_ARRAYS": _ROW_ARRAYS, "KIND_ARRAYS": _KIND_ARRAYS}
    compressed = {"A_RATIO": 4, "A_ENTRIES_SIZE": 64, "A_STATES_SIZE": 4,
                  "B_RATIO": 128, "B_ENTRIES_SIZE": 2, "B_STATES_SIZE": 8}  # fmt: skip
    absent = {name: int(not name.endswith("RATIO")) for name in compressed}
    unused = dict.fromkeys(name for name in _POINTERS if name.startswith(("a_", "b_")))
    windows_only = {name: kind for name, kind in signature.items() if name not in unused}
    rest = {"divisible": frozenset({"out_ptr"}), "narrow_because": "a row costs look-ups in block tables"}
    return [
        CompileSpec(_step_rows_kernel, "step_rows csa hca", signature, {**shape, **compressed}, **rest),
        CompileSpec(_step_rows_kernel, "step_rows window", windows_only, {**shape, **absent, **unused}, **rest),
    ]
