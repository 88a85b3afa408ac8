"""Which slots a query attends to, as ragged lists built on the device (attention spec 1.4, 3.3 to 3.5).

Lists have a fixed capacity, rows * width: only the first indptr[rows] indices are defined. Few rows take one launch;
many take two, one that counts and one in which every program adds up the counts before its own rows and fills.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4dist.errors import ShapeError
from dsv4dist.kernels._triton.checks import check_dense, check_integers, check_table, power_of_2_up_to
from dsv4dist.kernels._triton.compile_spec import CompileSpec, spec
from dsv4dist.kernels._triton.early_launch import early_launch, wait_for_previous
from dsv4dist.kernels._triton.quantise import lookup_slots
from dsv4dist.kernels.block_table import BlockTable

WINDOW = tl.constexpr(0)
LISTED = tl.constexpr(1)
VISIBLE = tl.constexpr(2)  # from here on rows carry their length
DENSE = tl.constexpr(3)

FEW_ROWS = 4
MAX_BLOCK = 1024
TILE = 1024


@triton.jit
def _keys(
    blocks_ptr, first_block_ptr, req_ptr, row_ptr, entries_ptr, row, column, wanted, stride_req, stride_entries,
    num_columns, limit, width, MODE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Slots [N, C] of columns [C] of the rows [N], -1 where there is none.

    `row_ptr` holds one value a row: the position (WINDOW), or how many columns the row has (VISIBLE, DENSE).
    Entries, positions and slots fit int32, as the lists that they end in.
    """
    inside = wanted[:, None] & (column < width)[None, :]
    if MODE != LISTED:
        row_value = tl.load(row_ptr + row, mask=wanted, other=0).to(tl.int32)[:, None]
    if MODE == WINDOW:
        entry = row_value - (width - 1) + column[None, :]
    elif MODE == VISIBLE:
        inside &= column[None, :] < row_value
        entry = tl.broadcast_to(column[None, :], inside.shape)
    else:
        if MODE == DENSE:
            inside &= column[None, :] < row_value
        entry_ptr = entries_ptr + row.to(tl.int64)[:, None] * stride_entries + column[None, :]
        entry = tl.load(entry_ptr, mask=inside, other=-1).to(tl.int32)
        inside = entry >= 0
    if MODE == DENSE:
        return tl.where(inside & (entry < limit), entry, -1)
    else:
        req = tl.load(req_ptr + row, mask=wanted, other=0).to(tl.int64)
        first_block = tl.load(first_block_ptr + req)[:, None]
        req_blocks_ptr = (blocks_ptr + req * stride_req)[:, None]
        return lookup_slots(req_blocks_ptr, first_block, entry, inside, num_columns, BLOCK_SIZE)


@triton.jit
def _count(
    blocks_ptr, first_block_ptr, req_ptr, row_ptr, entries_ptr, row, wanted, stride_req, stride_entries, num_columns,
    limit, width, MODE: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """int32 keys of each row [ROWS]."""
    count = tl.zeros((ROWS,), tl.int32)
    for start in range(0, _columns(row_ptr, row, wanted, width, MODE), BLOCK):
        slot = _keys(
            blocks_ptr, first_block_ptr, req_ptr, row_ptr, entries_ptr, row, start + tl.arange(0, BLOCK), wanted,
            stride_req, stride_entries, num_columns, limit, width, MODE, BLOCK_SIZE,
        )  # fmt: skip
        count += tl.sum(tl.where(slot >= 0, 1, 0), 1)
    return count


@triton.jit
def _columns(row_ptr, row, wanted, width, MODE: tl.constexpr):
    """Columns that the longest of the rows has; rows that carry their length are not read beyond it."""
    if MODE >= VISIBLE:
        longest = tl.max(tl.load(row_ptr + row, mask=wanted, other=0), 0)
        return tl.minimum(longest.to(tl.int32), width)
    else:
        return width


@triton.jit
def _count_kernel(
    blocks_ptr, first_block_ptr, req_ptr, row_ptr, entries_ptr, counts_ptr, stride_req, stride_entries, num_rows,
    num_columns, limit, width, MODE: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    wait_for_previous()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    wanted = row < num_rows
    count = _count(
        blocks_ptr, first_block_ptr, req_ptr, row_ptr, entries_ptr, row, wanted, stride_req, stride_entries,
        num_columns, limit, width, MODE, BLOCK_SIZE, ROWS, BLOCK,
    )  # fmt: skip
    tl.store(counts_ptr + row, count, mask=wanted)


@triton.jit
def _fill_kernel(
    blocks_ptr, first_block_ptr, req_ptr, row_ptr, entries_ptr, counts_ptr, indices_ptr, indptr_ptr, stride_req,
    stride_entries, num_rows, num_columns, limit, width, MODE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, ALONE: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """Write the keys of ROWS rows behind those of all earlier rows.

    ALONE: there is one program, which counts too. ONCE: and a row has at most BLOCK columns, so slots are looked up once.
    """
    wait_for_previous()
    first_row = tl.program_id(0) * ROWS
    row = first_row + tl.arange(0, ROWS)
    wanted = row < num_rows
    before = 0
    if ONCE:
        slot = _keys(
            blocks_ptr, first_block_ptr, req_ptr, row_ptr, entries_ptr, row, tl.arange(0, BLOCK), wanted, stride_req,
            stride_entries, num_columns, limit, width, MODE, BLOCK_SIZE,
        )  # fmt: skip
        count = tl.sum((slot >= 0).to(tl.int32), 1)
    elif ALONE:
        count = _count(
            blocks_ptr, first_block_ptr, req_ptr, row_ptr, entries_ptr, row, wanted, stride_req, stride_entries,
            num_columns, limit, width, MODE, BLOCK_SIZE, ROWS, BLOCK,
        )  # fmt: skip
    else:
        count = tl.load(counts_ptr + row, mask=wanted, other=0)
        for start in range(0, first_row, 1024):
            earlier = start + tl.arange(0, 1024)
            before += tl.sum(tl.load(counts_ptr + earlier, mask=earlier < first_row, other=0), 0)
    end = before + tl.cumsum(count, 0)
    tl.store(indptr_ptr + row + 1, end, mask=wanted)
    tl.store(indptr_ptr + row, before + row, mask=row == 0)
    at = end - count
    if ONCE:
        _store_keys(indices_ptr, slot, at)
    else:
        for start in range(0, _columns(row_ptr, row, wanted, width, MODE), BLOCK):
            slot = _keys(
                blocks_ptr, first_block_ptr, req_ptr, row_ptr, entries_ptr, row, start + tl.arange(0, BLOCK), wanted,
                stride_req, stride_entries, num_columns, limit, width, MODE, BLOCK_SIZE,
            )  # fmt: skip
            at += _store_keys(indices_ptr, slot, at)


@triton.jit
def _store_keys(indices_ptr, slot, at):
    """Store the slots [N, C] that are there, those of a row one after the other from `at` [N]; how many of each row."""
    found = (slot >= 0).to(tl.int32)
    place = at[:, None] + tl.cumsum(found, 1) - found
    tl.store(indices_ptr + place, slot.to(tl.int32), mask=slot >= 0)
    return tl.sum(found, 1)


def window_key_list(
    table: BlockTable, token_to_req: torch.Tensor, positions: torch.Tensor, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots of the last `window` tokens up to and including each token's own, oldest first (spec 3.3).

    token_to_req, positions [T] int32 or int64. Returns indices int32 [T * window], of which the first indptr[T] are
    defined, and indptr int32 [T + 1].  Capture: launches depend on sizes only.  Raises: ShapeError.
    """
    return _ragged(table, token_to_req, positions, None, window, WINDOW, 0)


def entry_key_list(
    table: BlockTable, token_to_req: torch.Tensor, entries: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots of the compressed `entries` [T, width] int32 or int64 (negative = absent) of each token's request.

    Order is kept, what has no slot is left out (spec 3.4, 3.5). Returns indices int32 [T * width], of which the first
    indptr[T] are defined, and indptr int32 [T + 1].  Capture: launches depend on sizes only.  Raises: ShapeError.
    """
    check_dense("entries", entries)
    return _ragged(table, token_to_req, None, entries, entries.shape[1], LISTED, 0)


def visible_key_list(
    table: BlockTable, token_to_req: torch.Tensor, visible_lens: torch.Tensor, max_entries: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots of entries 0 to visible_lens[t] - 1 of each token's request, at most `max_entries` of them (spec 3.4).

    visible_lens [T] int32 or int64. Returns indices int32 [T * max_entries], of which the first indptr[T] are defined,
    and indptr int32 [T + 1].  Capture: launches depend on sizes only.  Raises: ShapeError.
    """
    return _ragged(table, token_to_req, visible_lens, None, max_entries, VISIBLE, 0)


def compact_rows(dense: torch.Tensor, lens: torch.Tensor, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The values 0 <= v < limit of the first lens[t] columns of each row of `dense` [T, width], in order (spec 3.5).

    dense, lens [T] int32 or int64. Returns indices int32 [T * width], of which the first indptr[T] are defined, and
    indptr int32 [T + 1].  Capture: launches depend on sizes only.  Raises: ShapeError.
    """
    check_dense("dense", dense)
    return _ragged(None, None, lens, dense, dense.shape[1], DENSE, limit)


def _ragged(
    table: BlockTable | None,
    token_to_req: torch.Tensor | None,
    row_values: torch.Tensor | None,
    entries: torch.Tensor | None,
    width: int,
    mode: tl.constexpr,
    limit: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check, allocate, and launch the kernels for one kind of list."""
    anything = next(one for one in (token_to_req, row_values) if one is not None)
    count, device = anything.shape[0], anything.device
    for name, one in (("token_to_req", token_to_req), ("one value per row", row_values)):
        if one is not None:
            check_integers(name, one, (count,))
    if table is not None:
        check_table("table", table)
    if entries is not None and entries.shape[0] != count:
        raise ShapeError("entries", f"{count} rows", list(entries.shape))
    if count * width >= 1 << 31:
        raise ShapeError("key list", "fewer than 2**31 slots; use smaller chunks", f"{count} rows of {width}")
    indices = torch.empty(count * width, dtype=torch.int32, device=device)
    if count == 0 or width == 0:
        return indices, torch.zeros(count + 1, dtype=torch.int32, device=device)
    indptr = torch.empty(count + 1, dtype=torch.int32, device=device)
    blocks, first, size = (table.blocks, table.first_block, table.block_size) if table else (anything, anything, 1)
    block = min(MAX_BLOCK, triton.next_power_of_2(width))
    alone = count <= FEW_ROWS
    rows = triton.next_power_of_2(count) if alone else _rows_per_program(count, block)
    counts = torch.empty(0 if alone else count, dtype=torch.int32, device=device)
    inputs = (blocks, first, anything if token_to_req is None else token_to_req,
              anything if row_values is None else row_values, anything if entries is None else entries)  # fmt: skip
    strides = (blocks.stride(0), 0 if entries is None else entries.stride(0))
    sizes = (count, blocks.shape[-1], limit, width)
    shape = {
        "MODE": mode.value,
        "BLOCK_SIZE": size,
        "ROWS": rows,
        "BLOCK": block,
        "num_warps": _warps(rows) if alone else 4,
        **early_launch(device),
    }
    grid = (triton.cdiv(count, rows),)
    if not alone:
        _count_kernel[grid](*inputs, counts, *strides, *sizes, **shape)
    _fill_kernel[grid](
        *inputs, counts, indices, indptr, *strides, *sizes, ALONE=alone, ONCE=alone and width <= block, **shape
    )
    return indices, indptr


def _warps(rows: int) -> int:
    """Of a program that looks up all rows: look-ups wait for memory, so rows are to wait side by side."""
    return min(16, 4 * rows)


def _rows_per_program(num_rows: int, block: int) -> int:
    """Enough for a tile of TILE slots, but first of all some hundred programs."""
    return max(1, min(TILE // block, power_of_2_up_to(num_rows // 256)))


def compile_specs() -> list[CompileSpec]:
    """Window and HCA lists of the step, and the CSA lists of Flash (512 entries) and Pro (1024), few rows and many."""
    pointers = {"blocks_ptr": "*i32", "first_block_ptr": "*i32", "req_ptr": "*i64", "row_ptr": "*i64",
                "entries_ptr": "*i32", "counts_ptr": "*i32"}  # fmt: skip
    numbers = dict.fromkeys(("stride_req", "stride_entries", "num_rows", "num_columns", "limit", "width"), "i32")
    outputs = {"indices_ptr": "*i32", "indptr_ptr": "*i32"}
    specs = []
    lists = (
        ("window", 0, 128, 64),
        ("csa", 1, 512, 64),
        ("csa", 1, 1024, 64),
        ("hca", 2, 1024, 2),
        ("dense", 3, 1024, 1),
    )
    narrow = {0: "a key costs a look-up in a block table", 2: "a key costs a look-up in a block table",
              3: "a row has any number of entries"}  # fmt: skip
    for name, mode, width, size in lists:
        for rows, alone in ((1, True), (TILE // width, False)):
            reason = narrow.get(mode, "512 entries over 4 waves are 8 bytes a thread" if rows * width == 512 else "")
            values = {"MODE": mode, "BLOCK_SIZE": size, "ROWS": rows, "BLOCK": width}
            title = f"{name} {width} x{rows}" + (" alone" if alone else "")
            if not alone:
                specs.append(spec(_count_kernel, f"count_keys {title}", {**pointers, **numbers}, constexprs=values,
                                  unaligned=("stride_req",), aligned=("width",), narrow_because=reason))  # fmt: skip
            specs.append(spec(_fill_kernel, f"fill_keys {title}", {**pointers, **outputs, **numbers},
                              constexprs={**values, "ALONE": alone, "ONCE": alone}, unaligned=("stride_req",), aligned=("width",), narrow_because=reason))  # fmt: skip
    return specs
