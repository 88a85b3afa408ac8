"""The partial kernel of sparse decode attention for Hopper, in Gluon: fp8_ds_mla caches in OCP encoding (spec 4.3).

Scores are computed as keys x heads and values as channels x heads, so the 64 rows of a warpgroup instruction are keys or
channels and few heads waste nothing. One tile of 64 or 128 keys lies once in shared memory, as 16-bit numbers, and serves
both products; the bytes of the next tile and the slots of the one after are on their way meanwhile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsv4dist.kernels._triton.early_launch import wait_for_previous_gluon
from dsv4dist.kernels._triton.output_factor import output_factor

WARPS = gl.constexpr(8)
CHANNELS = gl.constexpr(128)  # of one product with the values: 64 for each warpgroup
PARTS = gl.constexpr(4)  # products that have all 512
PANEL16 = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
PANEL32 = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
BYTES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))

# Four e4m3 bytes -> two pairs of fp16, times a pair of equal scales.
_FP8_TO_FP16 = gl.constexpr("""{ .reg .b16 a, b; mov.b32 {a, b}, $2;
    cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; mul.rn.f16x2 $0, $0, $3; mul.rn.f16x2 $1, $1, $3; }""")
# The same in bf16 through fp32, with NaN turned into 0.
_FP8_TO_BF16 = gl.constexpr("""{ .reg .b16 a, b, h<4>; .reg .b32 x, y; .reg .f32 f<4>; .reg .pred p<4>;
    mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 x, a; cvt.rn.f16x2.e4m3x2 y, b;
    mov.b32 {h0, h1}, x; mov.b32 {h2, h3}, y;
    cvt.f32.f16 f0, h0; cvt.f32.f16 f1, h1; cvt.f32.f16 f2, h2; cvt.f32.f16 f3, h3;
    mul.f32 f0, f0, $3; mul.f32 f1, f1, $3; mul.f32 f2, f2, $3; mul.f32 f3, f3, $3;
    setp.nan.f32 p0, f0, f0; setp.nan.f32 p1, f1, f1; setp.nan.f32 p2, f2, f2; setp.nan.f32 p3, f3, f3;
    selp.f32 f0, 0f00000000, f0, p0; selp.f32 f1, 0f00000000, f1, p1;
    selp.f32 f2, 0f00000000, f2, p2; selp.f32 f3, 0f00000000, f3, p3;
    cvt.rn.bf16x2.f32 $0, f1, f0; cvt.rn.bf16x2.f32 $1, f3, f2; }""")
_BF16_TO_FP16 = gl.constexpr("""{ .reg .f32 f<2>; .reg .b32 t<2>; shl.b32 t0, $1, 16; and.b32 t1, $1, 0xffff0000;
    mov.b32 f0, t0; mov.b32 f1, t1; cvt.rn.f16x2.f32 $0, f1, f0; }""")
_BF16_SCRUB = gl.constexpr("""{ .reg .f32 f<2>; .reg .b32 t<2>; .reg .pred p<2>; shl.b32 t0, $1, 16;
    and.b32 t1, $1, 0xffff0000; mov.b32 f0, t0; mov.b32 f1, t1;
    setp.nan.f32 p0, f0, f0; setp.nan.f32 p1, f1, f1; selp.f32 f0, 0f00000000, f0, p0; selp.f32 f1, 0f00000000, f1, p1;
    cvt.rn.bf16x2.f32 $0, f1, f0; }""")
_SCALE_PAIR = gl.constexpr("""{ .reg .b32 t; .reg .f32 f; and.b32 t, $1, 255; shl.b32 t, t, 23; mov.b32 f, t;
    cvt.rn.f16x2.f32 $0, f, f; }""")


# All were renamed between Triton 3.6 and 3.9.
_REINTERPRETS = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
_HAS_BARRIER = gl.constexpr(hasattr(gl, "barrier"))
# Chosen here: Triton looks up every attribute that a kernel names, also in branches that it drops.
load_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def view(smem, DTYPE: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Shared memory as [ROWS, COLUMNS] of a 16-bit type."""
    if _REINTERPRETS:
        return smem.reinterpret(DTYPE, [ROWS, COLUMNS], PANEL16)
    else:
        return smem._reinterpret(DTYPE, [ROWS, COLUMNS], PANEL16)


@gluon.jit
def barrier():
    """Wait for all threads of the program."""
    if _HAS_BARRIER:
        gl.barrier()
    else:
        gl.thread_barrier()


@gluon.jit
def load_slots(lists, tile, KEYS: gl.constexpr, layout: gl.constexpr):
    """Listed slots [KEYS] of a tile of the joined lists, -1 behind its end; `lists` as built in the kernel.

    They are not looked at here: whoever asks for the slots of a later tile must not wait for them.
    """
    indices_ptr, main_begin, main_end, main_tiles, main_slots, indices_delta, extra_begin, extra_end, extra_slots = (
        lists
    )
    is_main = tile < main_tiles
    first = gl.where(is_main, main_begin + tile * KEYS, extra_begin + (tile - main_tiles) * KEYS)
    last = gl.where(is_main, main_end, extra_end)
    at = first + gl.arange(0, KEYS, layout)
    from_ptr = indices_ptr + gl.where(is_main, indices_delta * 0, indices_delta)
    return gl.load(from_ptr + at, mask=at < last, other=-1)


@gluon.jit
def within_cache(lists, slot, tile):
    """Which of the slots [KEYS] of a tile lie in its cache."""
    _, _, _, main_tiles, main_slots, _, _, _, extra_slots = lists
    return (slot >= 0) & (slot < gl.where(tile < main_tiles, main_slots, extra_slots))


@gluon.jit
def load_rows(pages, slot, present, is_main, bytes_smem, ROW: gl.constexpr):
    """Start copying the fp8 bytes of `slot` [KEYS] to bytes_smem; returns rope dwords [KEYS, 32] and scale words [KEYS].

    Absent keys become 0 and are not read.
    """
    data_ptr, main_stride, main_shift, pages_delta, extra_stride, extra_shift = pages
    shift = gl.where(is_main, main_shift, extra_shift)
    stride = gl.where(is_main, main_stride, extra_stride)
    block = (slot >> shift).to(gl.int64)
    within = slot & ((1 << shift) - 1)
    page = block * stride + gl.where(is_main, pages_delta * 0, pages_delta)  # in units of 16 bytes
    row = (page + within * 36) * 4
    dwords_ptr = data_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    words_ptr = data_ptr.to(gl.pointer_type(gl.int64), bitcast=True)
    word = gl.load(words_ptr + (page * 2 + (72 << shift) + within), mask=present, other=0)
    column = gl.arange(0, 16, gl.SliceLayout(0, ROW))[None, :]
    wanted = present[:, None]
    for g in gl.static_range(7):
        from_ptr = dwords_ptr + row[:, None] + (column + g * 16)
        load_to_shared(bytes_smem[g], from_ptr, mask=wanted)
    async_copy.commit_group()
    wide = gl.arange(0, 32, gl.SliceLayout(0, ROW))[None, :]
    return gl.load(dwords_ptr + row[:, None] + (wide + 112), mask=wanted, other=0), word


@gluon.jit
def fp8_pairs(raw, word, g: gl.constexpr, SCRUB: gl.constexpr):
    """Two pairs of 16-bit numbers for each dword of fp8 of group g, scaled; fp16, or if SCRUB bf16 without NaN.

    raw [KEYS, n] has the bytes, word [KEYS] the scales of all groups.
    """
    byte = (word >> (8 * g)).to(gl.int32)
    if SCRUB:
        bits = (byte & 0xFF) << 23
        scale = gl.where(bits == 0, 0x00400000, gl.where(bits == 0x7F800000, 0x7FC00000, bits))
        scale = scale.to(gl.float32, bitcast=True)
        return gl.inline_asm_elementwise(
            _FP8_TO_BF16, "=r,=r,r,r", [raw, scale[:, None]], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
    else:
        scale = gl.inline_asm_elementwise(_SCALE_PAIR, "=r,r", [byte], dtype=gl.int32, is_pure=True, pack=1)
        return gl.inline_asm_elementwise(
            _FP8_TO_FP16, "=r,=r,r,r", [raw, scale[:, None]], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )


@gluon.jit
def store_tile(bytes_smem, rope, word, tile_smem, ROW: gl.constexpr, SCRUB: gl.constexpr, KEYS: gl.constexpr):
    """Write a tile to shared memory as pairs of 16-bit numbers [KEYS, 32] a group; scaled, bf16 without NaN if SCRUB."""
    for first in gl.static_range(2):  # the first groups of all allocations before any second: one barrier
        for g in gl.static_range(first, 7, 2):
            low, high = fp8_pairs(bytes_smem[g].load(ROW), word, g, SCRUB)
            group_of(tile_smem, g).store(gl.reshape(gl.join(low, high), (KEYS, 32)))
    convert: gl.constexpr = _BF16_SCRUB if SCRUB else _BF16_TO_FP16
    pairs = gl.inline_asm_elementwise(convert, "=r,r", [rope], dtype=gl.int32, is_pure=True, pack=1)
    group_of(tile_smem, 7).store(pairs)


@gluon.jit
def attend(
    q_row_ptr, heads_left, stride_head, lists, pages, begin, end, main_tiles, scale_log2,
    q_smem, bytes_smem, tile_smem, weight_smem,
    SCRUB: gl.constexpr, HEADS: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Online softmax, base 2, over tiles [begin, end): maximum [HEADS], sum [HEADS], values, PARTS of [CHANNELS, HEADS].

    Both warpgroups take half the keys of the scores each, or with 64 keys half the heads.
    """
    DTYPE: gl.constexpr = gl.bfloat16 if SCRUB else gl.float16
    ROW: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [WARPS, 1], [1, 0])  # 16 bytes a thread
    BY_KEY: gl.constexpr = KEYS // 16  # warps along the keys, the others along the heads
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [BY_KEY, WARPS // BY_KEY], [16, HEADS * BY_KEY // WARPS, 16]
    )
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HEADS, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, ROW)
    by_key: gl.constexpr = gl.SliceLayout(1, SCORES)
    slot = load_slots(lists, begin, KEYS, by_row)
    shown = load_slots(lists, begin, KEYS, by_key)
    present = within_cache(lists, slot, begin) & (begin < end)
    rope, word = load_rows(pages, slot, present, begin < main_tiles, bytes_smem, ROW)
    slot = load_slots(lists, begin + 1, KEYS, by_row)
    # The query behind the keys, which are longer on their way.
    LOAD_Q: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    head = gl.arange(0, HEADS, gl.SliceLayout(1, LOAD_Q))
    channel = gl.arange(0, 64, gl.SliceLayout(0, LOAD_Q))
    q_tile_ptr = q_row_ptr + head.to(gl.int64)[:, None] * stride_head + channel[None, :]
    for g in gl.static_range(8):
        q = gl.load(q_tile_ptr + g * 64, mask=(head < heads_left)[:, None], other=0.0)
        view(q_smem[g], DTYPE, HEADS, 64).store(q.to(DTYPE))
    top = gl.full((HEADS,), float("-inf"), gl.float32, gl.SliceLayout(0, SCORES))
    total = gl.zeros((KEYS, HEADS), gl.float32, SCORES)
    acc = ()
    for _ in gl.static_range(PARTS):
        acc = acc + (gl.zeros((CHANNELS, HEADS), gl.float32, VALUES),)
    for tile in range(begin, end):
        async_copy.wait_group(0)
        barrier()
        store_tile(bytes_smem, rope, word, tile_smem, ROW, SCRUB, KEYS)
        seen = within_cache(lists, shown, tile)
        fence_async_shared()
        barrier()
        # Behind the barrier: all threads have taken the bytes of this tile.
        present = within_cache(lists, slot, tile + 1) & (tile + 1 < end)
        rope, word = load_rows(pages, slot, present, tile + 1 < main_tiles, bytes_smem, ROW)
        slot = load_slots(lists, tile + 2, KEYS, by_row)
        shown = load_slots(lists, tile + 1, KEYS, by_key)
        scores = gl.zeros((KEYS, HEADS), gl.float32, SCORES)
        for g in gl.static_range(8):
            scores = warpgroup_mma(
                view(group_of(tile_smem, g), DTYPE, KEYS, 64), view(q_smem[g], DTYPE, HEADS, 64).permute((1, 0)),
                scores, use_acc=g > 0, is_async=True,
            )  # fmt: skip
        scores = warpgroup_mma_wait(0, deps=[scores])
        scores = gl.where(seen[:, None], scores * scale_log2, float("-inf"))
        new_top = gl.maximum(top, gl.max(scores, 0))
        base = gl.where(new_top == float("-inf"), 0.0, new_top)
        weight = gl.exp2(scores - base[None, :])
        fade = gl.exp2(top - base)
        total = total * fade[None, :] + weight
        top = new_top
        weights = view(weight_smem, DTYPE, HEADS, KEYS)
        weights.store(gl.permute(weight.to(DTYPE), (1, 0)))
        fade = gl.convert_layout(fade, gl.SliceLayout(0, VALUES))
        fence_async_shared()
        barrier()
        products = ()
        for part in gl.static_range(PARTS):
            values = channels_of(tile_smem, part, DTYPE, KEYS)
            faded = acc[part] * fade[None, :]
            products = products + (warpgroup_mma(values, weights.permute((1, 0)), faded, is_async=True),)
        acc = warpgroup_mma_wait(0, deps=products)
    async_copy.wait_group(0)
    by_head: gl.constexpr = gl.SliceLayout(0, VALUES)
    return gl.convert_layout(top, by_head), gl.convert_layout(gl.sum(total, 0), by_head), acc


@gluon.jit
def group_of(tile_smem, g: gl.constexpr):
    """Group g of 64 channels of the tile, pairs [KEYS, 32]; an allocation has the two that `channels_of` takes at once."""
    return tile_smem[g // 2].index(g % 2)


@gluon.jit
def channels_of(tile_smem, part: gl.constexpr, DTYPE: gl.constexpr, KEYS: gl.constexpr):
    """Part `part` of the tile as [CHANNELS, KEYS]."""
    return view(tile_smem[part], DTYPE, KEYS, CHANNELS).permute((1, 0))


@gluon.jit(do_not_specialize=("main_shift", "extra_shift", "main_slots", "extra_slots", "num_heads", "num_splits"))
def sparse_decode_hopper_kernel(
    q_ptr,
    data_ptr,
    indices_ptr,
    main_indptr_ptr,
    extra_indptr_ptr,
    sink_ptr,
    positions_ptr,
    cos_sin_ptr,
    top_ptr,
    total_ptr,
    acc_ptr,
    out_ptr,
    stride_q,
    stride_head,
    stride_out,
    stride_out_head,
    pages_delta: gl.int64,
    indices_delta: gl.int64,
    main_stride,
    extra_stride,
    main_shift,
    extra_shift,
    main_slots,
    extra_slots,
    num_heads,
    num_splits,
    scale_log2,
    EXTRA: gl.constexpr,
    HAS_SINK: gl.constexpr,
    ROTATE: gl.constexpr,
    FINISH: gl.constexpr,
    HEADS: gl.constexpr,
    KEYS: gl.constexpr,
):
    """As sparse_decode_partial_kernel. Page strides and pages_delta (extra - main pages) count 16 bytes."""
    wait_for_previous_gluon()
    head_blocks = gl.cdiv(num_heads, HEADS)
    shared = gl.program_id(0) // head_blocks
    first_head = gl.program_id(0) % head_blocks * HEADS
    split = shared % num_splits
    query = (shared // num_splits).to(gl.int64)
    main_begin = gl.load(main_indptr_ptr + query)
    main_end = gl.load(main_indptr_ptr + query + 1)
    main_tiles = gl.cdiv(main_end - main_begin, KEYS)
    tiles = main_tiles
    extra_begin = 0
    extra_end = 0
    if EXTRA:
        extra_begin = gl.load(extra_indptr_ptr + query)
        extra_end = gl.load(extra_indptr_ptr + query + 1)
        tiles += gl.cdiv(extra_end - extra_begin, KEYS)
    share = gl.cdiv(tiles, num_splits)
    begin = split * share
    end = gl.minimum(begin + share, tiles)
    heads_left = num_heads - first_head
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HEADS, 16])
    BY_HEAD: gl.constexpr = gl.SliceLayout(0, VALUES)
    lane = gl.arange(0, HEADS, BY_HEAD)
    head_at = (query * num_heads + first_head + lane) * num_splits + split
    if (not FINISH) and (begin >= tiles):
        gl.store(total_ptr + head_at, gl.zeros((HEADS,), gl.float32, BY_HEAD), mask=lane < heads_left)
    else:
        lists = (
            indices_ptr, main_begin, main_end, main_tiles, main_slots, indices_delta, extra_begin, extra_end, extra_slots,
        )  # fmt: skip
        pages = (data_ptr, main_stride, main_shift, pages_delta, extra_stride, extra_shift)
        # Several allocations: the compiler then sees that stores to two of them need no barrier between them.
        q_smem = ()
        for _ in gl.static_range(8):
            q_smem = q_smem + (gl.allocate_shared_memory(gl.float16, [HEADS, 64], PANEL16),)
        tile_smem = ()
        for _ in gl.static_range(PARTS):
            tile_smem = tile_smem + (gl.allocate_shared_memory(gl.int32, [2, KEYS, 32], PANEL32),)
        bytes_smem = ()
        for _ in gl.static_range(7):
            bytes_smem = bytes_smem + (gl.allocate_shared_memory(gl.int32, [KEYS, 16], BYTES),)
        weight_smem = gl.allocate_shared_memory(gl.float16, [HEADS, KEYS], PANEL16)
        q_row_ptr = q_ptr + query * stride_q + first_head * stride_head
        top, total, acc = attend(
            q_row_ptr, heads_left, stride_head, lists, pages, begin, end, main_tiles, scale_log2,
            q_smem, bytes_smem, tile_smem, weight_smem, False, HEADS, KEYS,
        )  # fmt: skip
        size = gl.abs(acc[0])
        for g in gl.static_range(1, PARTS):
            size += gl.abs(acc[g])
        bad = gl.max(gl.max((size < float("inf")).to(gl.int32) ^ 1, 1), 0)
        if bad != 0:
            top, total, acc = attend(
                q_row_ptr, heads_left, stride_head, lists, pages, begin, end, main_tiles, scale_log2,
                q_smem, bytes_smem, tile_smem, weight_smem, True, HEADS, KEYS,
            )  # fmt: skip
        OUT: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [WARPS, 1], [1, 0])
        out_head = gl.arange(0, HEADS, gl.SliceLayout(1, OUT))
        channel = gl.arange(0, CHANNELS, gl.SliceLayout(0, OUT))
        wanted = (out_head < heads_left)[:, None]
        if FINISH:
            factor = output_factor(top, total, sink_ptr + first_head, lane, heads_left, HAS_SINK)
            line = query * stride_out + (first_head + out_head).to(gl.int64) * stride_out_head
            for g in gl.static_range(PARTS):
                value = gl.convert_layout(gl.permute(acc[g] * factor[None, :], (1, 0)), OUT)
                if ROTATE and g == PARTS - 1:
                    value = rotate_back(value, cos_sin_ptr, gl.load(positions_ptr + query), HEADS, CHANNELS, OUT)
                to_ptr = out_ptr + line[:, None] + (channel + g * CHANNELS)[None, :]
                gl.store(to_ptr, value.to(out_ptr.dtype.element_ty), mask=wanted)
        else:
            gl.store(top_ptr + head_at, top, mask=lane < heads_left)
            gl.store(total_ptr + head_at, total, mask=lane < heads_left)
            if HEADS <= 16:  # straight from registers: 8 adjacent channels a head, and nobody waits for anybody
                own_channel = gl.arange(0, CHANNELS, gl.SliceLayout(1, VALUES))
                to_ptr = acc_ptr + (head_at * 512)[None, :] + own_channel[:, None]
                for g in gl.static_range(PARTS):
                    gl.store(to_ptr + g * CHANNELS, acc[g], mask=(lane < heads_left)[None, :])
            else:
                line = ((query * num_heads + first_head + out_head) * num_splits + split) * 512
                for g in gl.static_range(PARTS):
                    value = gl.convert_layout(gl.permute(acc[g], (1, 0)), OUT)
                    gl.store(acc_ptr + line[:, None] + (channel + g * CHANNELS)[None, :], value, mask=wanted)


@gluon.jit
def rotate_back(value, cos_sin_ptr, position, HEADS: gl.constexpr, CHANNELS: gl.constexpr, OUT: gl.constexpr):
    """Undo the rotation of the last 64 of [HEADS, CHANNELS] by one position: pairs (2i, 2i + 1) (spec 1.3, 4.10)."""
    even, odd = gl.split(gl.reshape(value, (HEADS, CHANNELS // 2, 2)))
    pair = gl.arange(0, CHANNELS // 2, gl.SliceLayout(0, even.type.layout)) - (CHANNELS // 2 - 32)
    cos = gl.load(cos_sin_ptr + position * 64 + pair, mask=pair >= 0, other=1.0)[None, :]
    sin = gl.load(cos_sin_ptr + position * 64 + 32 + pair, mask=pair >= 0, other=0.0)[None, :]
    back = gl.join(even * cos + odd * sin, odd * cos - even * sin)
    return gl.convert_layout(gl.reshape(back, (HEADS, CHANNELS)), OUT)
