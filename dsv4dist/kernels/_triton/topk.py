"""Exact top-k of each row: a search for the k-th largest key, tile by tile, then again over the tiles' winners."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from dsv4dist.errors import ShapeError
from dsv4dist.kernels._triton.compile_spec import CompileSpec, spec

NO_ENTRY = tl.constexpr(-(1 << 31))  # key of a column that is not there; below the key of -inf
MIN_TILE = 64
TILE = 4096
MAX_TILE = 65536
KEYS_PER_THREAD = 16


@triton.jit
def order_key(bits):
    """int32 keys of fp32 bit patterns in the order of the numbers; -0 equals 0, and every NaN equals -inf."""
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, -0x800000, bits)
    bits = tl.where(bits == NO_ENTRY, 0, bits)  # the bit pattern of -0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def kth_largest(key, k):
    """The largest value that at least `k` of `key` reach, two bits a step from the top; NO_ENTRY if there is none.

    It may stop early at a lower value that exactly `k` keys reach: the same keys are chosen.
    """
    found = tl.full((), 0, tl.uint32)  # the answer with its sign bit flipped, so that bits can be added from the top
    shift = 30
    while shift >= 0:
        step = tl.full((), 1, tl.uint32) << shift
        low = ((found + step) ^ 0x80000000).to(tl.int32, bitcast=True)
        middle = ((found + step * 2) ^ 0x80000000).to(tl.int32, bitcast=True)
        high = ((found + step * 3) ^ 0x80000000).to(tl.int32, bitcast=True)
        # Both counts are at most the tile's width, so two fit one reduction.
        outer = tl.sum((key >= low).to(tl.int64) + ((key >= high).to(tl.int64) << 32), 0)
        at_low = (outer & 0x7FFFFFFF).to(tl.int32)
        at_high = (outer >> 32).to(tl.int32)
        at_middle = tl.sum((key >= middle).to(tl.int32), 0)
        digit = (at_low >= k).to(tl.uint32) + (at_middle >= k).to(tl.uint32) + (at_high >= k).to(tl.uint32)
        found += step * digit
        done = (at_low == k) | (at_middle == k) | (at_high == k)
        shift = tl.where(done, -1, shift - 2)
    return (found ^ 0x80000000).to(tl.int32, bitcast=True)


@triton.jit
def _topk_kernel(
    key_ptr,
    entry_ptr,
    lens_ptr,
    out_entry_ptr,
    out_key_ptr,
    width,
    readable,
    k,
    stride_key_row,
    stride_out_row,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    TILE: tl.constexpr,
    K_PADDED: tl.constexpr,
):
    """Tile `tile` of row `row`: its k largest keys, ascending by entry, then NO_ENTRY and -1.

    FIRST: columns are logits, read as bits, valid below the row's length, and a column is its own entry; otherwise they
    are the winners of earlier tiles. LAST: keys are not written. Columns below `readable` >= width exist in memory.
    """
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    lane = tl.arange(0, TILE)
    column = tile * TILE + lane
    count = width
    if FIRST:
        count = tl.minimum(tl.load(lens_ptr + row).to(tl.int32), width)
    out_row = row * stride_out_row + tile.to(tl.int64) * k
    valid = column < count
    total = tl.full((), 0, tl.int32)
    if tile * TILE < count:  # a tile beyond the row's length has nothing to read
        # Whole groups of 4 columns, so that loads are wide where rows are aligned: up to 3 undefined ones come along.
        inside = column < tl.minimum(tl.cdiv(count, 4) * 4, readable)
        key = tl.load(key_ptr + row * stride_key_row + column, mask=inside, other=NO_ENTRY)
        if FIRST:
            key = tl.where(valid, order_key(key), NO_ENTRY)
            entry = column
        else:
            entry = tl.load(entry_ptr + row * stride_key_row + column, mask=inside, other=-1)
        bound = kth_largest(key, k)
        above = key > bound
        equal = (key == bound) & (key != NO_ENTRY)
        total_above = tl.sum(above.to(tl.int32), 0)
        # One scan counts both: the winners so far in the upper half, those that tie with the bound in the lower.
        seen = tl.cumsum((above.to(tl.int64) << 32) + equal.to(tl.int64), 0)
        ties = (seen & 0x7FFFFFFF).to(tl.int32)
        spare = k - total_above
        chosen = above | (equal & (ties <= spare))
        place = (seen >> 32).to(tl.int32) + tl.minimum(ties, spare) - 1
        total = tl.sum(chosen.to(tl.int32), 0)
        tl.store(out_entry_ptr + out_row + place, entry, mask=chosen)
        if not LAST:
            tl.store(out_key_ptr + out_row + place, key, mask=chosen)
    rest = tl.arange(0, K_PADDED)
    unused = (rest >= total) & (rest < k)
    tl.store(out_entry_ptr + out_row + rest, tl.full((K_PADDED,), -1, tl.int32), mask=unused)
    if not LAST:
        tl.store(out_key_ptr + out_row + rest, tl.full((K_PADDED,), NO_ENTRY, tl.int32), mask=unused)


def topk_entries(logits: torch.Tensor, lens: torch.Tensor, k: int, *, tile: int = 0) -> torch.Tensor:
    """The `k` largest entries of each row among its first lens[t] columns, ascending; NaN counts as -inf (spec 4.8).

        logits  [T, W] fp32, unit stride in W; columns at or beyond lens[t] may hold anything
        lens    [T] int32 or int64, values below 0 count as 0, above W as W
        tile    columns of one program, a power of two, 2 k at least; 0 = chosen from W and k
    Ties go to the lowest entry; -0 equals 0. Returns int32 [T, k], the valid entries first, then -1.
    Capture: launches depend on sizes only.  Raises: ShapeError.
    """
    rows, width = logits.shape
    _check(logits, lens, k, tile)
    out = torch.empty((rows, k), dtype=torch.int32, device=logits.device)
    if rows == 0 or k == 0:
        return out
    lens = lens.contiguous()
    keys, entries = logits.view(torch.int32), None
    for level, (tile_width, tiles) in enumerate(plan_tiles(width, k, tile)):
        last = tiles == 1
        winners = out if last else torch.empty((2, rows, tiles * k), dtype=torch.int32, device=logits.device)
        out_entry, out_key = (out, None) if last else winners.unbind(0)
        _topk_kernel[(rows, tiles)](
            keys,
            entries,
            lens,
            out_entry,
            out_key,
            width,
            _readable(keys, width),
            k,
            keys.stride(0),
            out_entry.stride(0),
            FIRST=level == 0,
            LAST=last,
            TILE=tile_width,
            K_PADDED=triton.next_power_of_2(k),
            num_warps=_warps(tile_width),
        )
        entries, keys, width = out_entry, out_key, tiles * k
    return out


def plan_tiles(width: int, k: int, tile: int = 0) -> Iterator[tuple[int, int]]:
    """(tile width, tiles) of each pass over a row: every pass but the last leaves `k` winners of each tile."""
    largest = tile or max(TILE, min(8 * triton.next_power_of_2(k), 2 * TILE), 2 * triton.next_power_of_2(k))
    while True:
        tiles = max(1, -(-width // largest))
        yield (largest if tiles > 1 or tile else max(MIN_TILE, triton.next_power_of_2(max(width, 1)))), tiles
        if tiles == 1:
            return
        width = tiles * k


def _readable(keys: torch.Tensor, width: int) -> int:
    """`width` rounded up to whole wide loads, unless the memory ends before: then the last columns are read one by one."""
    rounded = -(-width // 16) * 16
    last = keys.storage_offset() + (keys.shape[0] - 1) * keys.stride(0) + rounded
    return rounded if last * keys.element_size() <= keys.untyped_storage().nbytes() else width


def _warps(tile_width: int) -> int:
    return min(16, max(1, tile_width // (32 * KEYS_PER_THREAD)))


def _check(logits: torch.Tensor, lens: torch.Tensor, k: int, tile: int) -> None:
    if logits.dtype != torch.float32 or (logits.shape[1] > 1 and logits.stride(1) != 1):
        raise ShapeError("logits", "fp32 with unit stride in a row", f"{logits.dtype}, strides {logits.stride()}")
    if lens.shape != logits.shape[:1] or lens.dtype not in (torch.int32, torch.int64):
        raise ShapeError("lens", f"int32 or int64 {[logits.shape[0]]}", f"{lens.dtype} {list(lens.shape)}")
    if not 0 <= k <= MAX_TILE // 2:
        raise ShapeError("k", f"0 to {MAX_TILE // 2}", k)
    if tile and (tile < 2 * k or tile & (tile - 1) or not MIN_TILE <= tile <= MAX_TILE):
        raise ShapeError("tile", f"a power of two from 2 k on, {MIN_TILE} to {MAX_TILE}", tile)


def compile_specs() -> list[CompileSpec]:
    """512 (Flash) and 1024 (Pro) of few entries, in one pass, and of the entries of a million tokens, in several."""
    specs: dict[str, CompileSpec] = {}
    for k, width in ((512, 512), (512, 4096), (512, 1 << 18), (1024, 1 << 18)):
        for level, (tile, tiles) in enumerate(plan_tiles(width, k)):
            first, last = level == 0, tiles == 1
            numbers = dict.fromkeys(("width", "readable", "k", "stride_key_row", "stride_out_row"), "i32")
            signature = {"key_ptr": "*i32", "lens_ptr": "*i64", "out_entry_ptr": "*i32", **numbers}
            values = {"FIRST": first, "LAST": last, "TILE": tile, "K_PADDED": triton.next_power_of_2(k)}
            absent = {"entry_ptr": first, "out_key_ptr": last}
            signature |= {name: "*i32" for name, missing in absent.items() if not missing}
            values |= {name: None for name, missing in absent.items() if missing}
            name = f"topk {k} of {tile}" + (" first" if first else "") + (" last" if last else "")
            specs[name] = spec(_topk_kernel, name, signature, constexprs=values, num_warps=_warps(tile),
                               aligned=("readable", "k") if first else ("width", "readable", "k"))  # fmt: skip
    return list(specs.values())
