"""The partial kernel of sparse decode attention for CDNA 3 and 4, in Gluon: fp8_ds_mla caches, native encoding (spec 4.3).

Arithmetic bounds fp8 decode there, so every number is converted once: a lane loads 16 bytes of a key just where the score
product wants them, converts them in registers, and leaves the 16-bit tile in shared memory for the value product. Scores
are keys x heads and values channels x heads. The next tile's bytes and the slots of the one after are on their way
meanwhile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dsv4dist.kernels._triton.output_factor import output_factor

KEYS = gl.constexpr(64)  # keys of one tile: 16 for each of 4 waves
HEADS = gl.constexpr(16)
DIM = gl.constexpr(512)
MFMA3 = gl.constexpr(gl.amd.AMDMFMALayout(3, [16, 16, 16], False, [4, 1]))
MFMA4 = gl.constexpr(gl.amd.AMDMFMALayout(4, [16, 16, 32], False, [4, 1]))

_LANE_KEYS = [[1, 0], [2, 0], [4, 0], [8, 0]]
_WAVE_KEYS = [[16, 0], [32, 0]]
# 16 adjacent channels of one key a lane, of each group of 64: 4 dwords of fp8, or 8 of bf16.
FP8 = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1], [0, 2]], [*_LANE_KEYS, [0, 4], [0, 8]], _WAVE_KEYS, [], [64, 16])
)
ROPE = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4]], [*_LANE_KEYS, [0, 8], [0, 16]], _WAVE_KEYS, [], [64, 32])
)
# CDNA 3 has no transposing load from shared memory: a lane reads 4 adjacent channels of 4 keys at a time.
BLOCKS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [1, 0], [2, 0], [16, 0]],
        [[0, 4], [0, 8], [0, 16], [0, 32], [4, 0], [8, 0]], [[0, 64], [0, 128]], [], [32, 256],
    )
)  # fmt: skip

# Four dwords of e4m3 -> eight registers of two fp16, scaled: $0, $1 hold bytes 0 and 1 of dwords 0 and 2, $2, $3 bytes 2
# and 3 of the same, $4 to $7 dwords 1 and 3. A matrix instruction must not read a result in the next two cycles; the
# compiler, which sees to that, does not look in here, hence the last line.
_OCP_TO_FP16 = gl.constexpr("""v_cvt_scalef32_pk_f16_fp8 $0, $8, $12
v_cvt_scalef32_pk_f16_fp8 $2, $8, $12 op_sel:[1,0,0]
v_cvt_scalef32_pk_f16_fp8 $4, $9, $12
v_cvt_scalef32_pk_f16_fp8 $6, $9, $12 op_sel:[1,0,0]
v_cvt_scalef32_pk_f16_fp8 $1, $10, $12
v_cvt_scalef32_pk_f16_fp8 $3, $10, $12 op_sel:[1,0,0]
v_cvt_scalef32_pk_f16_fp8 $5, $11, $12
v_cvt_scalef32_pk_f16_fp8 $7, $11, $12 op_sel:[1,0,0]
s_nop 1""")
# The same in two steps; every e4m3 is an fp16, so rounding towards zero does nothing. $8 to $23: byte 0 of the dwords
# 0 to 3, then byte 1, ...; $24: the scale in fp16.
_FNUZ_TO_FP32 = gl.constexpr("v_cvt_pk_f32_fp8 $0, $2\nv_cvt_pk_f32_fp8_sdwa $1, $2 src0_sel:WORD_1")
_FP32_TO_FP16 = gl.constexpr("""v_cvt_pkrtz_f16_f32 $0, $8, $12
v_cvt_pkrtz_f16_f32 $1, $10, $14
v_cvt_pkrtz_f16_f32 $2, $16, $20
v_cvt_pkrtz_f16_f32 $3, $18, $22
v_cvt_pkrtz_f16_f32 $4, $9, $13
v_cvt_pkrtz_f16_f32 $5, $11, $15
v_cvt_pkrtz_f16_f32 $6, $17, $21
v_cvt_pkrtz_f16_f32 $7, $19, $23
v_pk_mul_f16 $0, $0, $24 op_sel_hi:[1,0]
v_pk_mul_f16 $1, $1, $24 op_sel_hi:[1,0]
v_pk_mul_f16 $2, $2, $24 op_sel_hi:[1,0]
v_pk_mul_f16 $3, $3, $24 op_sel_hi:[1,0]
v_pk_mul_f16 $4, $4, $24 op_sel_hi:[1,0]
v_pk_mul_f16 $5, $5, $24 op_sel_hi:[1,0]
v_pk_mul_f16 $6, $6, $24 op_sel_hi:[1,0]
v_pk_mul_f16 $7, $7, $24 op_sel_hi:[1,0]
s_nop 1""")
_OCP_REGISTERS = gl.constexpr(",".join(["=&v"] * 8 + ["v"] * 8))
_FNUZ_REGISTERS = gl.constexpr(",".join(["=&v"] * 8 + ["v"] * 20))


@gluon.jit
def places(lists, tile, layout: gl.constexpr):
    """Where the slots [64] of a tile of the joined lists stand in their list, and where that ends."""
    _, main_begin, main_end, main_tiles, _, _, extra_begin, extra_end, _ = lists
    is_main = tile < main_tiles
    first = gl.where(is_main, main_begin + tile * KEYS, extra_begin + (tile - main_tiles) * KEYS)
    return first + gl.arange(0, KEYS, layout), gl.where(is_main, main_end, extra_end)


@gluon.jit
def load_slots(lists, tile, layout: gl.constexpr):
    """Listed slots [64] of a tile; behind the end of its list, the last one. `lists` as built in the kernel.

    They are not looked at here: whoever asks for the slots of a later tile must not wait for them.
    """
    main_indices_ptr, _, _, main_tiles, _, extra_indices_ptr, _, _, _ = lists
    at, last = places(lists, tile, layout)
    return gl.load(gl.where(tile < main_tiles, main_indices_ptr, extra_indices_ptr) + gl.minimum(at, last - 1))


@gluon.jit
def is_there(lists, slot, tile, layout: gl.constexpr):
    """Which of the slots [64] of a tile are listed, and lie in its cache."""
    _, _, _, main_tiles, main_slots, _, _, _, extra_slots = lists
    at, last = places(lists, tile, layout)
    num_slots = gl.where(tile < main_tiles, main_slots, extra_slots)
    return (at < last) & (slot.to(gl.uint32, bitcast=True) < num_slots.to(gl.uint32, bitcast=True))


@gluon.jit
def locate(pages, slot, is_main):
    """Pointers to the keys of slots, as dwords, and to their 8 scale bytes; `pages` as built in the kernel."""
    main_ptr, main_stride, main_shift, extra_ptr, extra_stride, extra_shift = pages
    shift = gl.where(is_main, main_shift, extra_shift)
    block = (slot >> shift).to(gl.int64)
    within = slot & ((1 << shift) - 1)
    page_ptr = gl.where(is_main, main_ptr, extra_ptr) + block * gl.where(is_main, main_stride, extra_stride)
    row_ptr = page_ptr + within * 576
    word_ptr = page_ptr + ((576 << shift) + within * 8)
    return row_ptr.to(gl.pointer_type(gl.int32), bitcast=True), word_ptr.to(gl.pointer_type(gl.int64), bitcast=True)


@gluon.jit
def find_spare(lists, pages, begin, end, main_tiles):
    """The first of the tiles [begin, end) with a key in its cache, or end; and the pointers of such a key.

    Absent keys of all tiles are read there, for a weight of 0: that spares every load a mask and zeros to start from.
    """
    everywhere: gl.constexpr = gl.BlockedLayout([1], [64], [4], [0])
    slot = -1
    while (slot < 0) & (begin < end):
        listed = load_slots(lists, begin, everywhere)
        slot = gl.max(gl.where(is_there(lists, listed, begin, everywhere), listed, -1), 0)
        begin += (slot < 0).to(gl.int32)
    row_ptr, word_ptr = locate(pages, slot, begin < main_tiles)
    return begin, (row_ptr, word_ptr)


@gluon.jit
def load_rows(pages, slot, there, spare, is_main):
    """Bytes of the keys of `slot` [64], of the spare one where not `there`: 7 x [64, 16] and [64, 32] dwords, words [64]."""
    row_ptr, word_ptr = locate(pages, slot, is_main)
    row_ptr = gl.where(there, row_ptr, spare[0])
    column = gl.arange(0, 16, gl.SliceLayout(0, FP8))[None, :]
    rows = ()
    for g in gl.static_range(7):
        rows = rows + (gl.load(row_ptr[:, None] + (column + g * 16)),)
    rope_ptr = gl.convert_layout(row_ptr, gl.SliceLayout(1, ROPE), assert_trivial=True)
    column = gl.arange(0, 32, gl.SliceLayout(0, ROPE))[None, :]
    rows = rows + (gl.load(rope_ptr[:, None] + (column + 112)),)
    return rows, gl.load(gl.where(there, word_ptr, spare[1]))


@gluon.jit
def decode(dwords, byte, CDNA: gl.constexpr):
    """fp16 [64, 64] of fp8 dwords [64, 16], times 2^(byte - 127) of each key."""
    bits = byte << 23
    if CDNA == 4:
        a, b, c, d = gl.inline_asm_elementwise(
            _OCP_TO_FP16, _OCP_REGISTERS, [dwords, bits[:, None]],
            dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        low, high = gl.inline_asm_elementwise(
            _FNUZ_TO_FP32, "=&v,=v,v", [dwords], dtype=(gl.int64, gl.int64), is_pure=True, pack=1
        )
        byte0 = low.to(gl.int32).to(gl.float32, bitcast=True)
        byte1 = (low >> 32).to(gl.int32).to(gl.float32, bitcast=True)
        byte2 = high.to(gl.int32).to(gl.float32, bitcast=True)
        byte3 = (high >> 32).to(gl.int32).to(gl.float32, bitcast=True)
        scale = bits.to(gl.float32, bitcast=True).to(gl.float16).to(gl.int16, bitcast=True).to(gl.int32)
        a, b, c, d = gl.inline_asm_elementwise(
            _FP32_TO_FP16, _FNUZ_REGISTERS, [byte0, byte1, byte2, byte3, scale[:, None]],
            dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=4,
        )  # fmt: skip
    # [key, dword pair, byte, which two bytes, which dword] -> channels in order
    values = gl.reshape(gl.join(gl.join(a, b), gl.join(c, d)), (KEYS, 8, 2, 2, 2))
    return gl.reshape(gl.permute(values, (0, 1, 4, 3, 2)), (KEYS, 64))


@gluon.jit
def decode_scrubbed(dwords, byte, CDNA: gl.constexpr):
    """As decode in bf16, with NaN, and all numbers of an infinite scale, turned into 0."""
    bits = byte << 23
    scale = gl.where(bits == 0, 0x00400000, gl.where(bits == 0x7F800000, 0x7FC00000, bits))
    scale = scale.to(gl.float32, bitcast=True)[:, None]
    FORMAT: gl.constexpr = gl.float8e4nv if CDNA == 4 else gl.float8e4b8
    values = ()
    for i in gl.static_range(4):
        value = (dwords >> (8 * i)).to(gl.uint8).to(FORMAT, bitcast=True).to(gl.float32) * scale
        values = values + (gl.where(value == value, value, 0.0).to(gl.bfloat16),)
    pairs = gl.join(gl.join(values[0], values[1]), gl.join(values[2], values[3]))
    return gl.reshape(gl.permute(pairs, (0, 1, 3, 2)), (KEYS, 64))


@gluon.jit
def decode_tile(rows, word, OPERAND: gl.constexpr, SCRUB: gl.constexpr, CDNA: gl.constexpr):
    """The keys as 8 tensors [64, 64] in the score product's layout: fp16, or bf16 without NaN if SCRUB."""
    low = word.to(gl.int32)
    high = (word >> 32).to(gl.int32)
    keys = ()
    for g in gl.static_range(7):
        byte = ((low if g < 4 else high) >> (8 * (g % 4))) & 0xFF
        if SCRUB:
            key = decode_scrubbed(rows[g], byte, CDNA)
        else:
            key = decode(rows[g], byte, CDNA)
        keys = keys + (gl.convert_layout(key, OPERAND, assert_trivial=True),)
    even = (rows[7] << 16).to(gl.float32, bitcast=True)
    odd = (rows[7] & -65536).to(gl.float32, bitcast=True)
    if SCRUB:
        even = gl.where(even == even, even, 0.0)
        odd = gl.where(odd == odd, odd, 0.0)
    DTYPE: gl.constexpr = gl.bfloat16 if SCRUB else gl.float16
    rope = gl.reshape(gl.join(even.to(DTYPE), odd.to(DTYPE)), (KEYS, 64))
    return keys + (gl.convert_layout(rope, OPERAND, assert_trivial=True),)


@gluon.jit
def load_queries(q_row_ptr, heads_left, stride_head, smem, OPERAND: gl.constexpr):
    """q as 8 tensors [64, 16] of the type of smem [64, C], through which it goes so that each wave converts a part."""
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 16], [4, 1], [1, 0])
    head = gl.arange(0, HEADS, gl.SliceLayout(1, LOAD))
    channel = gl.arange(0, 128, gl.SliceLayout(0, LOAD))
    q_tile_ptr = q_row_ptr + head.to(gl.int64)[:, None] * stride_head + channel[None, :]
    q_smem = smem.slice(0, HEADS)
    COLUMNS: gl.constexpr = smem.shape[1]
    queries = ()
    for part in gl.static_range(DIM // COLUMNS):
        for i in gl.static_range(COLUMNS // 128):
            q = gl.load(q_tile_ptr + (part * COLUMNS + i * 128), mask=(head < heads_left)[:, None], other=0.0)
            q_smem.slice(i * 128, 128, 1).store(q.to(smem.dtype))
        for g in gl.static_range(COLUMNS // 64):
            queries = queries + (q_smem.slice(g * 64, 64, 1).permute((1, 0)).load(OPERAND),)
    return queries


@gluon.jit
def load_values(smem, OPERAND: gl.constexpr, CDNA: gl.constexpr):
    """32 keys [32, C] as an operand [C, 32] of the value product; its rows as `in_order` expects them."""
    if CDNA == 4:
        return smem.permute((1, 0)).load(OPERAND)
    else:
        blocks = gl.permute(gl.reshape(smem.load(BLOCKS), (32, 64, 4)), (2, 1, 0))
        return gl.convert_layout(gl.reshape(blocks, (256, 32)), OPERAND, assert_trivial=True)


@gluon.jit
def in_order(value, CDNA: gl.constexpr):
    """Rows of a value product [C, 16] as channels: on CDNA 3, row 64 j + i is channel 4 i + j."""
    if CDNA == 4:
        return value
    else:
        return gl.reshape(gl.permute(gl.reshape(value, (4, 64, HEADS)), (1, 0, 2)), (256, HEADS))


@gluon.jit
def attend(
    q_row_ptr, heads_left, stride_head, lists, pages, spare, begin, end, main_tiles, scale_log2, SCRUB: gl.constexpr,
    CDNA: gl.constexpr,
):  # fmt: skip
    """Online softmax, base 2, over tiles [begin, end), at least one: maximum [16], sum [16], values, a tuple of [C, 16]."""
    DTYPE: gl.constexpr = gl.bfloat16 if SCRUB else gl.float16
    MFMA: gl.constexpr = MFMA4 if CDNA == 4 else MFMA3
    WIDTH: gl.constexpr = 8 if CDNA == 4 else 4
    COLUMNS: gl.constexpr = 512 if CDNA == 4 else 256  # that fit shared memory at a time
    GROUPS: gl.constexpr = COLUMNS // 64
    KEY: gl.constexpr = gl.DotOperandLayout(0, MFMA, 16)
    VALUE: gl.constexpr = gl.DotOperandLayout(0, MFMA, WIDTH)
    WEIGHT: gl.constexpr = gl.DotOperandLayout(1, MFMA, WIDTH)
    BY_KEY: gl.constexpr = gl.SliceLayout(1, FP8)
    smem = gl.allocate_shared_memory(DTYPE, [KEYS, COLUMNS], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    weight_smem = gl.allocate_shared_memory(
        DTYPE, [KEYS, HEADS], gl.PaddedSharedLayout.with_identity_for([[KEYS, 8]], [KEYS, HEADS], [0, 1])
    )
    queries = load_queries(q_row_ptr, heads_left, stride_head, smem, gl.DotOperandLayout(1, MFMA, 16))
    ones = gl.full((4 * WIDTH, HEADS), 1.0, DTYPE, WEIGHT)
    top = gl.full((HEADS,), float("-inf"), gl.float32, gl.SliceLayout(0, MFMA))
    total = gl.zeros((KEYS, HEADS), gl.float32, MFMA)
    acc = ()
    for _ in gl.static_range(DIM // COLUMNS):
        acc = acc + (gl.zeros((COLUMNS, HEADS), gl.float32, MFMA),)
    slot = load_slots(lists, begin, BY_KEY)
    there = is_there(lists, slot, begin, BY_KEY)
    rows, word = load_rows(pages, slot, there, spare, begin < main_tiles)
    slot = load_slots(lists, gl.minimum(begin + 1, end - 1), BY_KEY)
    for tile in range(begin, end):
        keys = decode_tile(rows, word, KEY, SCRUB, CDNA)
        shift = gl.where(there, 0.0, float("-inf")).to(DTYPE)
        following = gl.minimum(tile + 1, end - 1)
        there = is_there(lists, slot, following, BY_KEY)
        rows, word = load_rows(pages, slot, there, spare, following < main_tiles)
        slot = load_slots(lists, gl.minimum(tile + 2, end - 1), BY_KEY)
        for g in gl.static_range(GROUPS):
            smem.slice(g * 64, 64, 1).store(keys[g])
        # Absent keys get -inf by a product with ones: lanes know of other keys here than they hold scores of.
        shift = gl.convert_layout(shift, gl.SliceLayout(1, VALUE), assert_trivial=True)[:, None]
        scores = gl.zeros((KEYS, HEADS), gl.float32, MFMA)
        scores = gl.amd.cdna3.mfma(shift.broadcast_to((KEYS, 4 * WIDTH)), ones, scores)
        for g in gl.static_range(8):
            scores = gl.amd.cdna3.mfma(keys[g], queries[g], scores)
        scores = scores * scale_log2
        new_top = gl.maximum(top, gl.max(scores, 0))
        base = gl.where(new_top == float("-inf"), 0.0, new_top)
        weight = gl.exp2(scores - base[None, :])
        fade = gl.exp2(top - base)[None, :]
        total = total * fade + weight
        top = new_top
        weight_smem.store(weight.to(DTYPE))
        products = ()
        for part in gl.static_range(DIM // COLUMNS):
            if part > 0:
                for g in gl.static_range(GROUPS):
                    smem.slice(g * 64, 64, 1).store(keys[part * GROUPS + g])
            product = acc[part] * fade
            for half in gl.static_range(2):  # for fewer registers
                values = load_values(smem.slice(half * 32, 32), VALUE, CDNA)
                product = gl.amd.cdna3.mfma(values, weight_smem.slice(half * 32, 32).load(WEIGHT), product)
            products = products + (product,)
        acc = products
    return top, gl.sum(total, 0), acc


@gluon.jit(do_not_specialize=("main_shift", "extra_shift", "main_slots", "extra_slots", "num_heads", "num_splits"))
def sparse_decode_partial_cdna_kernel(
    q_ptr,
    main_ptr,
    main_indices_ptr,
    main_indptr_ptr,
    extra_ptr,
    extra_indices_ptr,
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
    CDNA: gl.constexpr,
):
    """As sparse_decode_partial_kernel, with 4 waves. CDNA: 3 reads FNUZ, 4 OCP. A page has 1 << shift slots."""
    MFMA: gl.constexpr = MFMA4 if CDNA == 4 else MFMA3
    BY_HEAD: gl.constexpr = gl.SliceLayout(0, MFMA)
    COLUMNS: gl.constexpr = 512 if CDNA == 4 else 256
    PARTS: gl.constexpr = DIM // COLUMNS
    head_blocks = gl.cdiv(num_heads, HEADS)
    shared = gl.program_id(0) // head_blocks  # neighbours share keys, which then come from the cache
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
    lists = (
        main_indices_ptr, main_begin, main_end, main_tiles, main_slots,
        extra_indices_ptr, extra_begin, extra_end, extra_slots,
    )  # fmt: skip
    pages = (main_ptr, main_stride, main_shift, extra_ptr, extra_stride, extra_shift)
    end = gl.minimum(split * share + share, tiles)
    begin, spare = find_spare(lists, pages, split * share, end, main_tiles)
    heads_left = num_heads - first_head
    head = first_head + gl.arange(0, HEADS, BY_HEAD)
    wanted = head < num_heads
    head_at = (query * num_heads + head) * num_splits + split
    line = query * stride_out + head.to(gl.int64) * stride_out_head
    if begin >= end:
        if FINISH:
            for part in gl.static_range(PARTS):
                zero = gl.zeros((COLUMNS, HEADS), gl.float32, MFMA)
                store_channels(out_ptr, line, wanted, zero, part, cos_sin_ptr, 0, False, CDNA)
        else:
            gl.store(total_ptr + head_at, gl.zeros((HEADS,), gl.float32, BY_HEAD), mask=wanted)
    else:
        q_row_ptr = q_ptr + query * stride_q + first_head * stride_head
        top, total, acc = attend(
            q_row_ptr, heads_left, stride_head, lists, pages, spare, begin, end, main_tiles, scale_log2, False, CDNA
        )
        size = gl.sum(gl.abs(acc[0]), 0)
        for part in gl.static_range(1, PARTS):
            size += gl.sum(gl.abs(acc[part]), 0)
        bad = gl.max((size < float("inf")).to(gl.int32) ^ 1, 0)
        if bad != 0:
            top, total, acc = attend(
                q_row_ptr, heads_left, stride_head, lists, pages, spare, begin, end, main_tiles, scale_log2, True, CDNA
            )
        if FINISH:
            factor = output_factor(top, total, sink_ptr, head, num_heads, HAS_SINK)
            position = 0
            if ROTATE:
                position = gl.load(positions_ptr + query)
            for part in gl.static_range(PARTS):
                value = acc[part] * factor[None, :]
                store_channels(out_ptr, line, wanted, value, part, cos_sin_ptr, position, ROTATE, CDNA)
        else:
            gl.store(top_ptr + head_at, top, mask=wanted)
            gl.store(total_ptr + head_at, total, mask=wanted)
            for part in gl.static_range(PARTS):
                store_channels(acc_ptr, head_at * DIM, wanted, acc[part], part, cos_sin_ptr, 0, False, CDNA)


@gluon.jit
def store_channels(
    to_ptr, line, wanted, value, part: gl.constexpr, cos_sin_ptr, position, ROTATE: gl.constexpr, CDNA: gl.constexpr
):
    """Write a part of a value product [C, 16] to `line` [16] of to_ptr where `wanted`, channel by channel."""
    COLUMNS: gl.constexpr = value.shape[0]
    value = in_order(value, CDNA)
    LAYOUT: gl.constexpr = value.type.layout
    BY_HEAD: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    if ROTATE and (part + 1) * COLUMNS == DIM:
        value = gl.convert_layout(rotate_back(value, cos_sin_ptr, position), LAYOUT, assert_trivial=True)
    channel = gl.arange(0, COLUMNS, gl.SliceLayout(1, LAYOUT)) + part * COLUMNS
    line_ptr = to_ptr + gl.convert_layout(line, BY_HEAD, assert_trivial=True)
    wanted = gl.convert_layout(wanted, BY_HEAD, assert_trivial=True)
    gl.store(line_ptr[None, :] + channel[:, None], value.to(to_ptr.dtype.element_ty), mask=wanted[None, :])


@gluon.jit
def rotate_back(value, cos_sin_ptr, position):
    """Undo the rotation of the last 64 of [C, 16] by one position: pairs (2i, 2i + 1) (spec 1.3, 4.10)."""
    PAIRS: gl.constexpr = value.shape[0] // 2
    even, odd = gl.split(gl.permute(gl.reshape(value, (PAIRS, 2, HEADS)), (0, 2, 1)))
    pair = gl.arange(0, PAIRS, gl.SliceLayout(1, even.type.layout)) - (PAIRS - 32)
    cos = gl.load(cos_sin_ptr + position * 64 + pair, mask=pair >= 0, other=1.0)[:, None]
    sin = gl.load(cos_sin_ptr + position * 64 + 32 + pair, mask=pair >= 0, other=0.0)[:, None]
    back = gl.join(even * cos + odd * sin, odd * cos - even * sin)
    return gl.reshape(gl.permute(back, (0, 2, 1)), (PAIRS * 2, HEADS))
