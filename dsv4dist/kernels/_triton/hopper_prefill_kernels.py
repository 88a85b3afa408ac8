"""The kernels of `hopper_prefill`, in Gluon: one program a query and its heads (spec 4.3, 4.4).

Unlike in decode, keys come from the L2 and a program has all keys of its query, so what counts is how often a key crosses
shared memory. Bytes go from memory straight to registers, in the order in which a matrix instruction wants keys: scores
are computed from there, and shared memory sees a key twice, written and read as 16-bit values.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from dsv4dist.kernels._triton.hopper_decode import (
    _BF16_SCRUB,
    _BF16_TO_FP16,
    PANEL16,
    fp8_pairs,
    load_slots,
    rotate_back,
    view,
    within_cache,
)
from dsv4dist.kernels._triton.output_factor import output_factor

DIM = gl.constexpr(512)
KEYS = gl.constexpr(64)  # keys of one tile
FEW_WARPS = gl.constexpr(4)

# [64 keys, 16 dwords], 16 bytes a lane, four lanes a key. FEW_ROWS: a warp has the 16 keys that its rows of a product are.
FEW_ROWS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 16]
    )
)
FEW_PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))

_HALVES = gl.constexpr("mov.b32 {$0, $1}, $2;")


@gluon.jit
def fetch_rows(pages, slot, present, is_main, ROWS: gl.constexpr):
    """Start loading the keys of `slot` [64]: 9 tensors [64, 16] of dwords (7 of fp8, 2 of bf16) and scale words [64].

    Absent keys become 0 and are not read.
    """
    data_ptr, main_stride, main_shift, pages_delta, extra_stride, extra_shift = pages
    shift = gl.where(is_main, main_shift, extra_shift)
    stride = gl.where(is_main, main_stride, extra_stride)
    block = (slot >> shift).to(gl.int64)
    within = slot & ((1 << shift) - 1)
    page = block * stride + gl.where(is_main, pages_delta * 0, pages_delta)  # in units of 16 bytes
    words_ptr = data_ptr.to(gl.pointer_type(gl.int64), bitcast=True)
    word = gl.load(words_ptr + (page * 2 + (72 << shift) + within), mask=present, other=0)
    dwords_ptr = data_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    column = gl.arange(0, 16, gl.SliceLayout(0, ROWS))[None, :]
    row_ptr = dwords_ptr + (page + within * 36)[:, None] * 4 + column
    raw = ()
    for g in gl.static_range(9):
        raw = raw + (gl.load(row_ptr + g * 16, mask=present[:, None], other=0),)
    return raw, word


@gluon.jit
def pairs_of(raw, word, g: gl.constexpr, SCRUB: gl.constexpr):
    """Group g of 64 channels as pairs [64, 32] of 16-bit numbers, scaled; fp16, or if SCRUB bf16 without NaN."""
    if g == 7:
        convert: gl.constexpr = _BF16_SCRUB if SCRUB else _BF16_TO_FP16
        first = gl.inline_asm_elementwise(convert, "=r,r", [raw[7]], dtype=gl.int32, is_pure=True, pack=1)
        second = gl.inline_asm_elementwise(convert, "=r,r", [raw[8]], dtype=gl.int32, is_pure=True, pack=1)
        pairs = gl.permute(gl.join(first, second), (0, 2, 1))  # the two halves, one after the other
    else:
        first, second = fp8_pairs(raw[g], word, g, SCRUB)
        pairs = gl.join(first, second)
    return gl.reshape(pairs, (KEYS, 32))


@gluon.jit
def operand_order(x, g: gl.constexpr, ROWS: gl.constexpr, UNIT: gl.constexpr):
    """Reorder channels of group g, x [ROWS, 32, UNIT] in units of a pair, to those of a product: [ROWS, 32 * UNIT].

    A lane loads 16 adjacent bytes, and the channels in them become those that a matrix instruction wants of that lane:
    in steps of 16 channels, each of two halves in which every lane has a pair.
    """
    if g < 7:  # lane, step, half -> step, half, lane
        parts = gl.permute(gl.reshape(x, (ROWS, 4, 4, 2, UNIT)), (0, 2, 3, 1, 4))
    else:  # two half groups of lane, step, half
        parts = gl.permute(gl.reshape(x, (ROWS, 2, 4, 2, 2, UNIT)), (0, 1, 3, 4, 2, 5))
    return gl.reshape(parts, (ROWS, 32 * UNIT))


@gluon.jit
def channel_order(x, g: gl.constexpr, ROWS: gl.constexpr):
    """Undo `operand_order` of single channels: x [ROWS, 64]."""
    if g < 7:
        parts = gl.permute(gl.reshape(x, (ROWS, 4, 2, 4, 2)), (0, 3, 1, 2, 4))
    else:
        parts = gl.permute(gl.reshape(x, (ROWS, 2, 2, 2, 4, 2)), (0, 1, 4, 2, 3, 5))
    return gl.reshape(parts, (ROWS, 64))


@gluon.jit
def key_operand(pairs, g: gl.constexpr, DTYPE: gl.constexpr):
    """The pairs [64, 32] of group g as the left operand [64 keys, 64 channels] of a product; nothing moves for it."""
    pairs = operand_order(gl.reshape(pairs, (KEYS, 32, 1)), g, KEYS, 1)
    low, high = gl.inline_asm_elementwise(_HALVES, "=h,=h,r", [pairs], dtype=(gl.int16, gl.int16), is_pure=True, pack=1)
    keys = gl.reshape(gl.join(low, high), (KEYS, 64)).to(DTYPE, bitcast=True)
    return gl.convert_layout(keys, gl.DotOperandLayout(0, FEW_PRODUCT, 2))


@gluon.jit
def load_query(q_row_ptr, heads_left, stride_head, q_smem, AS_OPERAND: gl.constexpr, DTYPE: gl.constexpr,
               HEADS: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """q [HEADS, 512] to q_smem [8, HEADS, 64]; AS_OPERAND: the channels of a group in the order of `operand_order`."""
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    head = gl.arange(0, HEADS, gl.SliceLayout(1, LOAD))
    channel = gl.arange(0, 64, gl.SliceLayout(0, LOAD))
    row_ptr = q_row_ptr + head.to(gl.int64)[:, None] * stride_head + channel[None, :]
    for g in gl.static_range(8):
        q = gl.load(row_ptr + g * 64, mask=(head < heads_left)[:, None], other=0.0).to(DTYPE)
        if AS_OPERAND:
            q = operand_order(gl.reshape(q, (HEADS, 32, 2)), g, HEADS, 2)
        view(q_smem.index(g), DTYPE, HEADS, 64).store(q)


@gluon.jit
def attend_few(
    q_row_ptr, heads_left, stride_head, lists, pages, main_tiles, tiles, scale_log2,
    q_smem, tile_smem, weight_smem, top_smem, total_smem, SCRUB: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Online softmax, base 2, over all tiles: maximum [HEADS], sum [HEADS], values, 8 x [64 channels, HEADS].

    Every warp has a running maximum of its own keys; weights meet it in shared memory and are brought to the common one
    there, so that a tile takes one exchange.
    """
    DTYPE: gl.constexpr = gl.bfloat16 if SCRUB else gl.float16
    SCORE_Q: gl.constexpr = gl.DotOperandLayout(1, FEW_PRODUCT, 2)
    BY_HEAD: gl.constexpr = gl.SliceLayout(0, FEW_PRODUCT)
    # [4 warps, HEADS] with all warps' values in every lane that has the head in a product.
    HALVES: gl.constexpr = [[0, 1]] if HEADS == 8 else [[0, 1], [0, 8]]
    ALL_TOPS: gl.constexpr = gl.DistributedLinearLayout(
        HALVES + [[1, 0], [2, 0]], [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]], [[0, 0], [0, 0]], [], [4, HEADS]
    )
    load_query(q_row_ptr, heads_left, stride_head, q_smem, True, DTYPE, HEADS, FEW_WARPS)
    by_row: gl.constexpr = gl.SliceLayout(1, FEW_ROWS)
    by_key: gl.constexpr = gl.SliceLayout(1, FEW_PRODUCT)
    slot = load_slots(lists, 0, KEYS, by_row)
    present = within_cache(lists, slot, 0) & (tiles > 0)
    raw, word = fetch_rows(pages, slot, present, main_tiles > 0, FEW_ROWS)
    slot = load_slots(lists, 1, KEYS, by_row)
    shown = load_slots(lists, 0, KEYS, by_key)
    total = gl.reshape(gl.zeros((KEYS, HEADS), gl.float32, FEW_PRODUCT), (4, 16, HEADS))
    top = gl.full((4, HEADS), float("-inf"), gl.float32, gl.SliceLayout(1, total.type.layout))
    highest = gl.full((HEADS,), float("-inf"), gl.float32, BY_HEAD)
    acc = ()
    for _ in gl.static_range(8):
        acc = acc + (gl.zeros((64, HEADS), gl.float32, FEW_PRODUCT),)
    for tile in range(0, tiles):
        scores = gl.zeros((KEYS, HEADS), gl.float32, FEW_PRODUCT)
        for g in gl.static_range(8):
            keys = key_operand(pairs_of(raw, word, g, SCRUB), g, DTYPE)
            view(tile_smem[g], DTYPE, KEYS, 64).store(keys)
            q = view(q_smem.index(g), DTYPE, HEADS, 64).permute((1, 0)).load(SCORE_Q)
            scores = mma_v2(keys, q, scores)
        seen = within_cache(lists, shown, tile)
        present = within_cache(lists, slot, tile + 1) & (tile + 1 < tiles)
        raw, word = fetch_rows(pages, slot, present, tile + 1 < main_tiles, FEW_ROWS)
        slot = load_slots(lists, tile + 2, KEYS, by_row)
        shown = load_slots(lists, tile + 1, KEYS, by_key)

        scores = gl.where(seen[:, None], scores * scale_log2, float("-inf"))
        scores = gl.reshape(scores, (4, 16, HEADS))
        new_top = gl.maximum(top, gl.max(scores, 1))
        base = gl.where(new_top == float("-inf"), 0.0, new_top)
        weight = gl.exp2(scores - base[:, None, :])
        fade = gl.exp2(top - base)
        total = total * fade[:, None, :] + weight
        top = new_top
        top_smem.store(top)
        weights = view(weight_smem, DTYPE, HEADS, KEYS)
        weights.store(gl.permute(gl.reshape(weight, (KEYS, HEADS)).to(DTYPE), (1, 0)))

        before = highest
        highest = gl.max(top_smem.load(ALL_TOPS), 0)
        highest = gl.convert_layout(highest, BY_HEAD)
        fade = gl.exp2(before - gl.where(highest == float("-inf"), 0.0, highest))
        weight = gl.reshape(weights.permute((1, 0)).load(SCORE_Q), (4, 16, HEADS))
        tops = top_smem.load(gl.SliceLayout(1, weight.type.layout))
        common = gl.max(tops, 0)
        common = gl.where(common == float("-inf"), 0.0, common)
        weight = weight * gl.exp2(tops - common[None, :]).to(DTYPE)[:, None, :]
        weight = gl.convert_layout(gl.reshape(weight, (KEYS, HEADS)), SCORE_Q)
        new_acc = ()
        for g in gl.static_range(8):
            values = view(tile_smem[g], DTYPE, KEYS, 64).permute((1, 0))
            values = values.load(gl.DotOperandLayout(0, FEW_PRODUCT, 2))
            new_acc = new_acc + (mma_v2(values, weight, acc[g] * fade[None, :]),)
        acc = new_acc
    top_smem.store(top)
    total_smem.store(gl.sum(total, 1))
    tops = top_smem.load(ALL_TOPS)
    base = gl.where(highest == float("-inf"), 0.0, highest)
    base = gl.convert_layout(base, gl.SliceLayout(0, ALL_TOPS))
    whole = gl.sum(total_smem.load(ALL_TOPS) * gl.exp2(tops - base[None, :]), 0)
    return highest, gl.convert_layout(whole, BY_HEAD), acc


@gluon.jit
def lists_and_pages(
    data_ptr, indices_ptr, main_indptr_ptr, extra_indptr_ptr, query, pages_delta, indices_delta, main_stride,
    extra_stride, main_shift, extra_shift, main_slots, extra_slots, EXTRA: gl.constexpr,
):  # fmt: skip
    """What `load_slots` and `fetch_rows` take of both segments, and how many tiles they and the main one have."""
    main_begin = gl.load(main_indptr_ptr + query)
    main_end = gl.load(main_indptr_ptr + query + 1)
    main_tiles = gl.cdiv(main_end - main_begin, KEYS)
    tiles = main_tiles
    extra_begin = main_end * 0
    extra_end = main_end * 0
    if EXTRA:
        extra_begin = gl.load(extra_indptr_ptr + query)
        extra_end = gl.load(extra_indptr_ptr + query + 1)
        tiles += gl.cdiv(extra_end - extra_begin, KEYS)
    lists = (
        indices_ptr, main_begin, main_end, main_tiles, main_slots, indices_delta, extra_begin, extra_end, extra_slots,
    )  # fmt: skip
    pages = (data_ptr, main_stride, main_shift, pages_delta, extra_stride, extra_shift)
    return lists, pages, main_tiles, tiles


@gluon.jit(do_not_specialize=("main_shift", "extra_shift", "main_slots", "extra_slots", "num_heads"))
def prefill_few_heads_kernel(
    q_ptr, data_ptr, indices_ptr, main_indptr_ptr, extra_indptr_ptr, sink_ptr, positions_ptr, cos_sin_ptr, out_ptr,
    stride_q, stride_head, stride_out, stride_out_head, pages_delta: gl.int64, indices_delta: gl.int64,
    main_stride, extra_stride, main_shift, extra_shift, main_slots, extra_slots, num_heads, scale_log2,
    EXTRA: gl.constexpr, HAS_SINK: gl.constexpr, ROTATE: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """One program: HEADS (8 or 16) heads of one query. Page strides and pages_delta (extra - main) count 16 bytes."""
    head_blocks = gl.cdiv(num_heads, HEADS)
    query = (gl.program_id(0) // head_blocks).to(gl.int64)
    first_head = gl.program_id(0) % head_blocks * HEADS
    heads_left = num_heads - first_head
    lists, pages, main_tiles, tiles = lists_and_pages(
        data_ptr, indices_ptr, main_indptr_ptr, extra_indptr_ptr, query, pages_delta, indices_delta, main_stride,
        extra_stride, main_shift, extra_shift, main_slots, extra_slots, EXTRA,
    )  # fmt: skip
    q_smem = gl.allocate_shared_memory(gl.float16, [8, HEADS, 64], PANEL16)
    tile_smem = ()  # one allocation a group: the compiler then sees that stores to two of them need no barrier
    for _ in gl.static_range(8):
        tile_smem = tile_smem + (gl.allocate_shared_memory(gl.float16, [KEYS, 64], PANEL16),)
    weight_smem = gl.allocate_shared_memory(gl.float16, [HEADS, KEYS], PANEL16)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    top_smem = gl.allocate_shared_memory(gl.float32, [4, HEADS], FLAT)
    total_smem = gl.allocate_shared_memory(gl.float32, [4, HEADS], FLAT)
    q_row_ptr = q_ptr + query * stride_q + first_head * stride_head
    top, total, acc = attend_few(
        q_row_ptr, heads_left, stride_head, lists, pages, main_tiles, tiles, scale_log2,
        q_smem, tile_smem, weight_smem, top_smem, total_smem, False, HEADS,
    )  # fmt: skip
    size = gl.abs(acc[0])
    for g in gl.static_range(1, 8):
        size += gl.abs(acc[g])
    bad = gl.max(gl.max((size < float("inf")).to(gl.int32) ^ 1, 1), 0)
    if bad != 0:
        top, total, acc = attend_few(
            q_row_ptr, heads_left, stride_head, lists, pages, main_tiles, tiles, scale_log2,
            q_smem, tile_smem, weight_smem, top_smem, total_smem, True, HEADS,
        )  # fmt: skip
    lane = gl.arange(0, HEADS, gl.SliceLayout(0, FEW_PRODUCT))
    factor = output_factor(top, total, sink_ptr + first_head, lane, heads_left, HAS_SINK)
    OUT: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [FEW_WARPS, 1], [1, 0])
    out_head = gl.arange(0, HEADS, gl.SliceLayout(1, OUT))
    channel = gl.arange(0, 64, gl.SliceLayout(0, OUT))
    line = query * stride_out + (first_head + out_head).to(gl.int64) * stride_out_head
    for g in gl.static_range(8):
        value = channel_order(gl.permute(acc[g] * factor[None, :], (1, 0)), g, HEADS)
        value = gl.convert_layout(value, OUT)
        if ROTATE and g == 7:
            value = rotate_back(value, cos_sin_ptr, gl.load(positions_ptr + query), HEADS, 64, OUT)
        to_ptr = out_ptr + line[:, None] + (channel + g * 64)[None, :]
        gl.store(to_ptr, value.to(out_ptr.dtype.element_ty), mask=(out_head < heads_left)[:, None])
