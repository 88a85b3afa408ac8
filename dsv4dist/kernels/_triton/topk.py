"""Exact top-k of each row: a search for the k-th largest key, tile by tile, then again over the tiles' winners."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from dsv4dist.errors import ShapeError
from dsv4dist.kernels._triton.checks import check_integers, check_table
from dsv4dist.kernels._triton.compile_spec import CompileSpec, spec
from dsv4dist.kernels._triton.early_launch import early_launch, wait_for_previous
from dsv4dist.kernels._triton.quantise import lookup_slots
from dsv4dist.kernels.block_table import BlockTable

NO_ENTRY = tl.constexpr(-(1 << 31))  # key of a column that is not there; below the key of -inf
MIN_TILE = 64
TILE = 4096
EAGER_PROGRAMS = 128  # so few programs wait for memory, rather than share its rate
MAX_TILE = 32768  # counts and places of a tile fit 16 bits
KEYS_PER_THREAD = 16
LENS = tl.constexpr(1024)  # lengths of earlier rows that are added up at once


@triton.jit
def order_key(bits):
    """int32 keys of fp32 bit patterns in the order of the numbers; -0 equals 0, and every NaN equals -inf."""
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, -0x800000, bits)
    bits = tl.where(bits == NO_ENTRY, 0, bits)  # the bit pattern of -0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def split_by_four(x):
    """Elements 0, 1, 2 and 3 of every four of `x` [4 N]: four tensors [N]. A thread that loaded widely has all four."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0] // 4, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _steps_reached(order, found, shift):
    """Which of found + 1, 2, ..., 7 << shift each of `order` reaches: the first is a 1 in the lowest nibble."""
    last = found + (tl.full((), 0xFFFFFFFF, tl.uint32) >> (29 - shift))
    steps = (tl.minimum(tl.maximum(order, found), last) - found) >> shift
    return tl.full(order.shape, 0x01111111, tl.int32) >> (28 - steps.to(tl.int32) * 4)


@triton.jit
def kth_largest(key0, key1, key2, key3, k):
    """(bound, above): the `k` largest of these keys are the `above` ones > bound, and k - above of those == bound.

    With fewer than k keys above NO_ENTRY, bound is NO_ENTRY and above counts them all. Each step, three bits from the
    top on, is one reduction of the whole block; a step ends the search if it finds a value that exactly k keys reach.
    """
    order0, order1 = (key0 ^ NO_ENTRY).to(tl.uint32, bitcast=True), (key1 ^ NO_ENTRY).to(tl.uint32, bitcast=True)
    order2, order3 = (key2 ^ NO_ENTRY).to(tl.uint32, bitcast=True), (key3 ^ NO_ENTRY).to(tl.uint32, bitcast=True)
    found = tl.full((), 0, tl.uint32)
    exact = tl.full((), 0, tl.uint32)
    shift = tl.full((), 29, tl.uint32)
    more = True
    while more:
        reached = _steps_reached(order0, found, shift) + _steps_reached(order1, found, shift)
        reached += _steps_reached(order2, found, shift) + _steps_reached(order3, found, shift)
        half, other_half = tl.split(tl.trans(tl.reshape(reached, (2, reached.shape[0] // 2))))
        reached = half + other_half  # of 8 keys, as a nibble can count
        # The counts of a tile take 16 bits, so two nibbles go to a word.
        word0, word1 = reached & 0x000F000F, (reached >> 4) & 0x000F000F
        word2, word3 = (reached >> 8) & 0x000F000F, (reached >> 12) & 0x000F000F
        counts = tl.sum(tl.join(tl.join(word0, word1), tl.join(word2, word3)), 0)
        # With k taken off and a bias added, the top bit of a half says whether k keys at least got there; or k + 1.
        enough = ((counts + (0x8000 - k) * 0x10001) >> 15) & 0x00010001
        too_many = ((counts + (0x7FFF - k) * 0x10001) >> 11) & 0x00100010
        steps = tl.sum(tl.sum(enough + too_many, 1), 0)
        steps = (steps + (steps >> 16)).to(tl.uint32)
        exact = (steps & 15) - ((steps >> 4) & 15)
        found += (steps & 15) << shift
        more = (exact == 0) & (shift > 0)
        shift = tl.where(shift > 3, shift - 3, 0)
    above = tl.full((), 0, tl.int32) + k
    if exact != 0:
        found -= 1
    else:
        greater = (order0 > found).to(tl.int32) + (order1 > found).to(tl.int32)
        greater += (order2 > found).to(tl.int32) + (order3 > found).to(tl.int32)
        above = tl.sum(greater, 0)
    return found.to(tl.int32, bitcast=True) ^ NO_ENTRY, above


@triton.jit
def _rank(key, bound):
    """1 << 16 for keys above the bound and 1 for those that tie with it, so that one sum counts both."""
    return tl.where(key > bound, 1 << 16, tl.where((key == bound) & (key != NO_ENTRY), 1, 0))


@triton.jit
def _store_chosen(out_entry_ptr, out_key_ptr, entry, key, rank, seen, spare, LAST: tl.constexpr):
    """Store what is above the bound and the first `spare` that tie. `seen`: the sum of ranks up to one's own."""
    ties = seen & 0xFFFF
    chosen = (rank > 1) | ((rank == 1) & (ties <= spare))
    place = (seen >> 16) + tl.minimum(ties, spare) - 1
    tl.store(out_entry_ptr + place, entry, mask=chosen)
    if not LAST:
        tl.store(out_key_ptr + place, key, mask=chosen)


@triton.jit
def _start_of_list(lens_ptr, indptr_ptr, row, most):
    """How many entries all rows before `row` choose, which each is min(length, most); notes where the row's own end."""
    before = tl.full((), 0, tl.int32)
    for start in range(0, row.to(tl.int32), LENS):
        earlier = start + tl.arange(0, LENS)
        length = tl.load(lens_ptr + earlier, mask=earlier < row, other=0).to(tl.int32)
        before += tl.sum(tl.minimum(tl.maximum(length, 0), most), 0)
    own = tl.minimum(tl.maximum(tl.load(lens_ptr + row).to(tl.int32), 0), most)
    tl.store(indptr_ptr + row + 1, before + own)
    tl.store(indptr_ptr + row, before, mask=row == 0)
    return before


@triton.jit(do_not_specialize=("first_row",))
def _topk_kernel(
    key_ptr,
    entry_ptr,
    lens_ptr,
    out_entry_ptr,
    out_key_ptr,
    req_ptr,
    blocks_ptr,
    first_block_ptr,
    indptr_ptr,
    width,
    readable,
    k,
    most,
    first_row,
    stride_key_row,
    stride_out_row,
    stride_req,
    num_columns,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    EAGER: tl.constexpr,
    TILE: tl.constexpr,
    K_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Tile `tile` of row `row`: its k largest keys, ascending by entry, then NO_ENTRY and -1.

    Rows of `lens`, requests and lists count from `first_row`. BLOCK_SIZE > 0, only with LAST: slots of the entries are
    stored behind those of all earlier rows, each of which has min(length, most), and nothing behind them.
    FIRST: columns are logits, read as bits, valid below the row's length, and a column is its own entry; otherwise they
    are the winners of earlier tiles. LAST: keys are not written. Columns below `readable` >= width exist in memory.
    EAGER: all columns are read, before the row's length has arrived.
    """
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    lane = tl.arange(0, TILE)
    column = tile * TILE + lane
    count = width
    if FIRST:
        count = tl.minimum(tl.load(lens_ptr + first_row + row).to(tl.int32), width)
    row_key_ptr = key_ptr + row * stride_key_row
    # Whole groups of 4 columns, so that loads are wide where rows are aligned: up to 3 undefined ones come along.
    inside = column < tl.minimum(tl.cdiv(width if EAGER else count, 4) * 4, readable)
    if EAGER:
        key = tl.load(row_key_ptr + column, mask=inside, other=NO_ENTRY)
    if BLOCK_SIZE:
        out_entry_ptr += _start_of_list(lens_ptr, indptr_ptr, first_row + row, most)
    else:
        out_entry_ptr += row * stride_out_row + tile.to(tl.int64) * k
    if not LAST:
        out_key_ptr += row * stride_out_row + tile.to(tl.int64) * k
    total = tl.full((), 0, tl.int32)
    if tile * TILE < count:  # a tile beyond the row's length has nothing to choose from
        if not EAGER:
            key = tl.load(row_key_ptr + column, mask=inside, other=NO_ENTRY)
        if FIRST:
            key = order_key(key)
            entry = column
        else:
            entry = tl.load(entry_ptr + row * stride_key_row + column, mask=inside, other=-1)
        if BLOCK_SIZE:  # of all entries, where they lie as they were loaded: the chosen ones are scattered
            req = tl.load(req_ptr + first_row + row).to(tl.int64)
            blocks = blocks_ptr + req * stride_req
            first_block = tl.load(first_block_ptr + req)
            entry = lookup_slots(blocks, first_block, entry, column < width, num_columns, BLOCK_SIZE).to(tl.int32)
        # Four parts, so that a thread can store one entry at a time from where it has loaded four.
        key0, key1, key2, key3 = split_by_four(tl.where(column < count, key, NO_ENTRY))
        entry0, entry1, entry2, entry3 = split_by_four(entry)
        bound, above = kth_largest(key0, key1, key2, key3, k)
        spare = k - above
        total = tl.where(bound == NO_ENTRY, above, k)
        rank0, rank1, rank2, rank3 = _rank(key0, bound), _rank(key1, bound), _rank(key2, bound), _rank(key3, bound)
        ranks = rank0 + rank1 + rank2 + rank3
        seen0 = tl.cumsum(ranks, 0) - ranks + rank0
        seen1 = seen0 + rank1
        seen2 = seen1 + rank2
        _store_chosen(out_entry_ptr, out_key_ptr, entry0, key0, rank0, seen0, spare, LAST)
        _store_chosen(out_entry_ptr, out_key_ptr, entry1, key1, rank1, seen1, spare, LAST)
        _store_chosen(out_entry_ptr, out_key_ptr, entry2, key2, rank2, seen2, spare, LAST)
        _store_chosen(out_entry_ptr, out_key_ptr, entry3, key3, rank3, seen2 + rank3, spare, LAST)
    if (BLOCK_SIZE == 0) & (total < k):
        rest = tl.arange(0, K_PADDED)
        unused = (rest >= total) & (rest < k)
        tl.store(out_entry_ptr + rest, tl.full((K_PADDED,), -1, tl.int32), mask=unused)
        if not LAST:
            tl.store(out_key_ptr + rest, tl.full((K_PADDED,), NO_ENTRY, tl.int32), mask=unused)


def topk_entries(logits: torch.Tensor, lens: torch.Tensor, k: int, *, tile: int = 0) -> torch.Tensor:
    """The `k` largest entries of each row among its first lens[t] columns, ascending; NaN counts as -inf (spec 4.8).

        logits  [T, W] fp32, unit stride in W; columns at or beyond lens[t] may hold anything
        lens    [T] int32 or int64, values below 0 count as 0, above W as W
        tile    columns of one program, a power of two, 2 k at least; 0 = chosen from W and k
    Ties go to the lowest entry; -0 equals 0. Returns int32 [T, k], the valid entries first, then -1.
    Capture: launches depend on sizes only.  Raises: ShapeError.
    """
    _check(logits, lens, logits.shape[0], k, tile)
    out = torch.empty((logits.shape[0], k), dtype=torch.int32, device=logits.device)
    if out.numel():
        _search(logits, lens.contiguous(), 0, k, tile, out, None)
    return out


def topk_slots(
    logits: torch.Tensor,
    lens: torch.Tensor,
    k: int,
    table: BlockTable,
    token_to_req: torch.Tensor,
    indices: torch.Tensor,
    indptr: torch.Tensor,
    first_row: int = 0,
    *,
    tile: int = 0,
) -> None:
    """Write the slots of what `topk_entries` chooses as a ragged list, each row behind all earlier ones (spec 3.5).

        logits              [T, W] as there, rows first_row to first_row + T - 1 of the list
        lens, token_to_req  [N] int32 or int64, of all rows of the list
        table               where each request keeps its entries; one that is not there is listed as -1
        indices             int32 [>= N * k], of which these rows' part is written
        indptr              int32 [N + 1], of which these rows' ends are written, and with first_row = 0 the 0 in front
    Row t has min(lens[t], W, k) slots.  Capture: launches depend on sizes only.  Raises: ShapeError.
    """
    rows = len(lens)
    _check(logits, lens, rows, k, tile)
    if not 0 <= first_row <= rows - logits.shape[0]:
        raise ShapeError("rows of logits", f"at most {rows}", f"{first_row} + {logits.shape[0]}")
    check_integers("token_to_req", token_to_req, (rows,))
    check_table("table", table)
    for name, one, size in (("indices", indices, rows * k), ("indptr", indptr, rows + 1)):
        if one.dtype != torch.int32 or one.dim() != 1 or one.numel() < size or one.stride(0) != 1:
            raise ShapeError(name, f"contiguous int32, {size} or more", f"{one.dtype} {list(one.shape)}")
    if k == 0 or logits.shape[1] == 0:
        indptr[first_row : first_row + logits.shape[0] + 1] = 0
    elif len(logits):
        lists = (token_to_req.contiguous(), table.blocks, table.first_block, indptr)
        _search(logits, lens.contiguous(), first_row, k, tile, indices, lists, table.block_size)


def _search(
    logits: torch.Tensor,
    lens: torch.Tensor,
    first_row: int,
    k: int,
    tile: int,
    out: torch.Tensor,
    lists: tuple[torch.Tensor, ...] | None,
    block_size: int = 0,
) -> None:
    """Launch all passes; the last one writes entries to `out` [T, k], or slots to the list `out`."""
    rows, width = logits.shape
    most = min(width, k)
    keys, entries = logits.view(torch.int32), None
    for level, (tile_width, tiles) in enumerate(plan_tiles(width, k, tile)):
        last = tiles == 1
        winners = out if last else torch.empty((2, rows, tiles * k), dtype=torch.int32, device=logits.device)
        out_entry, out_key = (out, None) if last else winners.unbind(0)
        listed = lists if last else None
        _topk_kernel[(rows, tiles)](
            keys,
            entries,
            lens,
            out_entry,
            out_key,
            *(listed or (None,) * 4),
            width,
            _readable(keys, width),
            k,
            most,
            first_row,
            keys.stride(0),
            out_entry.stride(0),
            listed[1].stride(0) if listed else 0,
            listed[1].shape[1] if listed else 0,
            FIRST=level == 0,
            LAST=last,
            EAGER=level > 0 or rows * tiles <= EAGER_PROGRAMS,
            TILE=tile_width,
            K_PADDED=triton.next_power_of_2(k),
            BLOCK_SIZE=block_size if listed else 0,
            num_warps=_warps(tile_width),
            **early_launch(logits.device),
        )
        entries, keys, width = out_entry, out_key, tiles * k


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


def _check(logits: torch.Tensor, lens: torch.Tensor, num_lens: int, k: int, tile: int) -> None:
    if logits.dtype != torch.float32 or (logits.shape[1] > 1 and logits.stride(1) != 1):
        raise ShapeError("logits", "fp32 with unit stride in a row", f"{logits.dtype}, strides {logits.stride()}")
    if lens.shape != (num_lens,) or lens.dtype not in (torch.int32, torch.int64):
        raise ShapeError("lens", f"int32 or int64 {[num_lens]}", f"{lens.dtype} {list(lens.shape)}")
    if not 0 <= k <= MAX_TILE // 2:
        raise ShapeError("k", f"0 to {MAX_TILE // 2}", k)
    if tile and (tile < 2 * k or tile & (tile - 1) or not MIN_TILE <= tile <= MAX_TILE):
        raise ShapeError("tile", f"a power of two from 2 k on, {MIN_TILE} to {MAX_TILE}", tile)


def compile_specs() -> list[CompileSpec]:
    """512 (Flash) and 1024 (Pro) of few entries, in one pass, and of the entries of a million tokens, in several.

    The last pass gives entries, or slots, as layers have it.
    """
    specs: dict[str, CompileSpec] = {}
    for k, width in ((512, 512), (512, 4096), (512, 1 << 18), (1024, 1 << 18)):
        for level, (tile, tiles) in enumerate(plan_tiles(width, k)):
            first, last = level == 0, tiles == 1
            for eager in (True, False) if first else (True,):
                for slots in (False, True) if last else (False,):
                    values = {"FIRST": first, "LAST": last, "EAGER": eager, "TILE": tile,
                              "K_PADDED": triton.next_power_of_2(k), "BLOCK_SIZE": 64 if slots else 0}  # fmt: skip
                    name = (
                        f"topk {k} of {tile}" + " first" * first + " last" * last + " eager" * eager + " slots" * slots
                    )
                    specs[name] = _spec(name, values)
    return list(specs.values())


def _spec(name: str, values: dict[str, int]) -> CompileSpec:
    first, last, slots = values["FIRST"], values["LAST"], values["BLOCK_SIZE"]
    names = (
        "width",
        "readable",
        "k",
        "most",
        "first_row",
        "stride_key_row",
        "stride_out_row",
        "stride_req",
        "num_columns",
    )
    optional = {
        "entry_ptr": ("*i32", not first),
        "out_key_ptr": ("*i32", not last),
        "req_ptr": ("*i64", slots),
        **dict.fromkeys(("blocks_ptr", "first_block_ptr", "indptr_ptr"), ("*i32", slots)),
    }
    signature = {"key_ptr": "*i32", "lens_ptr": "*i64", "out_entry_ptr": "*i32", **dict.fromkeys(names, "i32")}
    signature |= {one: kind for one, (kind, there) in optional.items() if there}
    absent = {one: None for one, (_, there) in optional.items() if not there}
    aligned = ["readable", "k", *([] if first else ["width"]), *([] if slots else ["num_columns"])]
    return spec(_topk_kernel, name, signature, constexprs={**values, **absent}, num_warps=_warps(values["TILE"]),
                unaligned=("stride_req",) if slots else (), aligned=tuple(aligned))  # fmt: skip
