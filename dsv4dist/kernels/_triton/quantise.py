"""Device functions that other kernels share: rounding, e4m3 bytes, scale bytes, rotation, and storing one entry.

Encodings are integer arithmetic on every target: these kernels wait for memory, some targets convert only one of
the two encodings, and equal instructions give equal bytes everywhere, in Triton's interpreter too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4dist.kernels.paged_cache import (
    INDEX_DIM,
    INDEX_SCALE_BYTES,
    NOPE_DIM,
    ROPE_DIM,
    SCALE_GROUP,
    TOKEN_BYTES,
    TOKEN_SCALE_BYTES,
)

ROWS = tl.constexpr(0)
DS_MLA = tl.constexpr(1)
INDEX = tl.constexpr(2)

_SMALLEST_AMAX = tl.constexpr(0x38D1B717)  # bits of fp32 1e-4
_INFINITY = tl.constexpr(0x7F800000)
_TOKEN_BYTES = tl.constexpr(TOKEN_BYTES)
_TOKEN_SCALE_BYTES = tl.constexpr(TOKEN_SCALE_BYTES)
_NOPE = tl.constexpr(NOPE_DIM)
_GROUP = tl.constexpr(SCALE_GROUP)
_GROUPS = tl.constexpr((NOPE_DIM + ROPE_DIM) // SCALE_GROUP)
_INDEX_BYTES = tl.constexpr(INDEX_DIM)
_INDEX_SCALE_BYTES = tl.constexpr(INDEX_SCALE_BYTES)
# The interpreter cuts fp32 to bf16 where every GPU rounds to nearest even.
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def to_bf16(x):
    """fp32 to bf16, to nearest even; NaN stays NaN."""
    if _INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, near.to(tl.float32, bitcast=True), x)
    return x.to(tl.bfloat16)


@triton.jit
def cast(x, DTYPE: tl.constexpr):
    """fp32 to any float type, rounded once to nearest even."""
    return to_bf16(x) if DTYPE == tl.bfloat16 else x.to(DTYPE)  # noqa: SIM300


@triton.jit
def encode_e4m3(x, FNUZ: tl.constexpr):
    """uint8 e4m3 codes of fp32 `x`, |x| <= 448 (OCP) or 224 (FNUZ), to nearest even; FNUZ never writes 0x80."""
    if FNUZ:
        x = x * 2.0  # the same bytes are worth half
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Normal: round at mantissa bit 20, move the exponent bias from 127 to 7.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    # Below 2^-6: one step is 2^-9, the last mantissa bit of 2^14, so the addition rounds.
    tiny = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, tiny, normal)
    sign = (bits >> 24) & 0x80
    if FNUZ:
        sign = tl.where(code == 0, 0, sign)
    return (code | sign).to(tl.uint8)


@triton.jit
def decode_e4m3(byte, FNUZ: tl.constexpr):
    """fp32 values of uint8 e4m3 codes, NaN codes as NaN.

    The fields move into an fp16, whose exponent bias is larger by 8 (OCP) or 7 (FNUZ); subnormals keep their meaning.
    """
    wide = byte.to(tl.uint16)
    size = (wide & 0x7F) << 7
    nan = wide == 0x80 if FNUZ else size == 0x3F80
    size = tl.where(nan, 0x7E00, size)
    value = (((wide & 0x80) << 8) | size).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return value * (128.0 if FNUZ else 256.0)


@triton.jit
def decode_scale(byte):
    """fp32 2^(b - 127) of scale bytes; byte 0 is 2^-127, byte 255 is NaN."""
    bits = byte.to(tl.int32) << 23
    bits = tl.where(bits == 0, 0x00400000, bits)
    return tl.where(bits == _INFINITY, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def magnitude(x):
    """The bits of |x| as int32: their order is that of the numbers, with inf and then NaN above all."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_exponent(amax_bits, FNUZ: tl.constexpr):
    """int32 scale byte of a block with that largest `magnitude`: 127 + ceil(log2(amax / max)), 255 if not finite.

    The exponent fields' difference, plus one if amax has the larger mantissa (spec 2.2); max is 1.75 * 2^8 or 2^7.
    """
    bits = tl.maximum(amax_bits, _SMALLEST_AMAX)
    exponent = ((bits + 0x1FFFFF) >> 23) - (7 if FNUZ else 8)
    return tl.where(bits >= _INFINITY, 255, exponent)


@triton.jit
def encode_scaled(x, exponent, FNUZ: tl.constexpr):
    """uint8 codes of x * 2^(127 - exponent); zeros where the exponent says that the block is not finite."""
    finite = exponent < 255
    inverse = (tl.where(finite, 254 - exponent, 127) << 23).to(tl.float32, bitcast=True)
    return encode_e4m3(tl.where(finite, x * inverse, 0.0), FNUZ)


@triton.jit
def rotate_rows(x, cos_sin_ptr, position, stride_table, num_positions, ROTARY: tl.constexpr, WIDTH: tl.constexpr,
                INVERSE: tl.constexpr):  # fmt: skip
    """Rotate the last ROTARY of WIDTH channels of fp32 x [N, BLOCK >= WIDTH] by `position` [N] or [1] (spec 1.3).

    Positions outside the table, which only padding has, are taken as its nearest row.
    """
    cos, sin = load_rotation(cos_sin_ptr, position, stride_table, num_positions, ROTARY, WIDTH, x.shape[1])
    return rotate_by(x, cos, sin, ROTARY, WIDTH, INVERSE)


@triton.jit
def load_rotation(cos_sin_ptr, position, stride_table, num_positions, ROTARY: tl.constexpr, WIDTH: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    """(cos, sin) [N, BLOCK / 2] for `rotate_by`, as `rotate_rows` has it."""
    FIRST: tl.constexpr = (WIDTH - ROTARY) // 2
    row = tl.minimum(tl.maximum(position.to(tl.int64), 0), num_positions - 1)
    pair = tl.arange(0, BLOCK // 2)
    rotary = (pair >= FIRST) & (pair < WIDTH // 2)
    table = cos_sin_ptr + row[:, None] * stride_table + (pair - FIRST)[None, :]
    cos = tl.load(table, mask=rotary[None, :], other=1.0)
    sin = tl.load(table + ROTARY // 2, mask=rotary[None, :], other=0.0)
    return cos, sin


@triton.jit
def rotate_by(x, cos, sin, ROTARY: tl.constexpr, WIDTH: tl.constexpr, INVERSE: tl.constexpr):
    """Rotate the last ROTARY of WIDTH channels of fp32 x [N, BLOCK]."""
    N: tl.constexpr = x.shape[0]
    BLOCK: tl.constexpr = x.shape[1]
    pair = tl.arange(0, BLOCK // 2)
    rotary = (pair >= (WIDTH - ROTARY) // 2) & (pair < WIDTH // 2)
    if INVERSE:
        sin = -sin
    even, odd = tl.split(tl.reshape(x, (N, BLOCK // 2, 2)))
    # Not by the masked 1 and 0 alone: an infinite neighbour times 0 would be NaN.
    turned_even = tl.where(rotary[None, :], even * cos - odd * sin, even)
    turned_odd = tl.where(rotary[None, :], odd * cos + even * sin, odd)
    return tl.reshape(tl.join(turned_even, turned_odd), (N, BLOCK))


@triton.jit
def split_rows(first_row, num_heads, ROWS: tl.constexpr, ONE_TOKEN: tl.constexpr):
    """(token, head) of the int64 rows first_row + [0, ROWS) of a flattened [tokens, heads].

    ONE_TOKEN: ROWS divides num_heads, so one token [1] has all of them, and what depends on it is loaded once.
    """
    lane = tl.arange(0, ROWS)
    if ONE_TOKEN:
        return first_row // num_heads + tl.arange(0, 1).to(tl.int64), first_row % num_heads + lane
    else:
        return (first_row + lane) // num_heads, (first_row + lane) % num_heads


@triton.jit
def store_entry(x, cache_ptr, slot, stride_block, stride_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
                FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr, FNUZ: tl.constexpr):  # fmt: skip
    """Store fp32 x [BLOCK] (WIDTH used) at int64 `slot` >= 0, rounded once to the cache's format (spec 2.2 to 2.5).

    Strides are in elements of the cache; in an fp8 cache, whose elements are bytes, stride_row is not used.
    """
    place = slot % BLOCK_SIZE
    page_ptr = cache_ptr + (slot // BLOCK_SIZE) * stride_block
    if FORMAT == ROWS:
        channel = tl.arange(0, BLOCK)
        value = cast(x, cache_ptr.dtype.element_ty)
        tl.store(page_ptr + place * stride_row + channel, value, mask=channel < WIDTH)
    elif FORMAT == DS_MLA:
        rounded = to_bf16(x)
        grouped = tl.reshape(rounded.to(tl.float32), (_GROUPS, _GROUP))
        exponent = scale_exponent(tl.max(magnitude(grouped), 1), FNUZ)
        code = encode_scaled(grouped, exponent[:, None], FNUZ)
        channel = tl.arange(0, BLOCK)
        token_ptr = page_ptr + place * _TOKEN_BYTES
        tl.store(token_ptr + channel, tl.reshape(code, (BLOCK,)), mask=channel < _NOPE)
        rope_ptr = (token_ptr + _NOPE).to(tl.pointer_type(tl.bfloat16))
        tl.store(rope_ptr + channel - _NOPE, rounded, mask=channel >= _NOPE)
        group = tl.arange(0, _GROUPS)
        scale_ptr = page_ptr + BLOCK_SIZE * _TOKEN_BYTES + place * _TOKEN_SCALE_BYTES
        tl.store(scale_ptr + group, tl.where(group < _GROUPS - 1, exponent, 0).to(tl.uint8))
    else:
        rounded = to_bf16(x).to(tl.float32)
        exponent = scale_exponent(tl.max(magnitude(rounded), 0), FNUZ)
        channel = tl.arange(0, BLOCK)
        tl.store(page_ptr + place * _INDEX_BYTES + channel, encode_scaled(rounded, exponent, FNUZ))
        scale_ptr = page_ptr + BLOCK_SIZE * _INDEX_BYTES + place * _INDEX_SCALE_BYTES
        tl.store(scale_ptr.to(tl.pointer_type(tl.float32)), decode_scale(exponent))


@triton.jit
def lookup_slots(req_blocks_ptr, first_block, entry, wanted, num_columns, BLOCK_SIZE: tl.constexpr):
    """int64 slots of `entry` in a block table's row at `req_blocks_ptr`; -1 where not `wanted` or not there (spec 2.7).

    The pointer and the row's first block broadcast against `entry`.
    """
    column = entry // BLOCK_SIZE - first_block
    inside = wanted & (entry >= 0) & (column >= 0) & (column < num_columns)
    block = tl.load(req_blocks_ptr + column, mask=inside, other=-1).to(tl.int64)
    return tl.where(block >= 0, block * BLOCK_SIZE + entry % BLOCK_SIZE, -1)
