"""Device functions of sparse decode attention: one tile of keys, its scores, its values (attention spec 4.3)."""

from __future__ import annotations

import triton
import triton.language as tl

GROUP = tl.constexpr(64)  # channels that share one scale byte; also the rotary width
GROUPS = tl.constexpr(8)  # groups of one key; the last one is the rotary part
TOKEN_BYTES = tl.constexpr(576)  # fp8_ds_mla: 448 fp8, then 64 bf16 (spec 2.3)
ROPE_BYTES = tl.constexpr(448)
OCP = tl.constexpr(1)
FNUZ = tl.constexpr(2)
ROWS = tl.constexpr(3)


@triton.jit
def decode_bytes(byte, FORMAT: tl.constexpr, NATIVE: tl.constexpr, DTYPE: tl.constexpr):
    """The values of e4m3 bytes in DTYPE (fp16, bf16 or fp32; all exact), NaN codes as NaN.

    NATIVE: the target converts this encoding itself; otherwise integer arithmetic moves the fields into an fp16, where
    the exponent bias differs by 8 (OCP) or 7 (FNUZ) and subnormals keep their meaning.
    """
    if NATIVE:
        if FORMAT == OCP:
            return byte.to(tl.float8e4nv, bitcast=True).to(DTYPE)
        else:
            return byte.to(tl.float8e4b8, bitcast=True).to(DTYPE)
    else:
        wide = byte.to(tl.uint16)
        size = (wide & 0x7F) << 7
        if FORMAT == OCP:
            size = tl.where(size == 0x3F80, 0x7E00, size)
            value = (((wide & 0x80) << 8) | size).to(tl.float16, bitcast=True) * 256.0
        else:
            size = tl.where(wide == 0x80, 0x7E00, size)
            value = (((wide & 0x80) << 8) | size).to(tl.float16, bitcast=True) * 128.0
        return value.to(DTYPE)


@triton.jit
def group_scale(word, g: tl.constexpr):
    """fp32 2^(b - 127) of scale byte g in a key's 8-byte word; byte 0 is 2^-127, byte 255 is inf."""
    bits = ((word >> (8 * g)) & 0xFF).to(tl.int32) << 23
    return tl.where(bits == 0, 0x00400000, bits).to(tl.float32, bitcast=True)


@triton.jit
def without_nan(x):
    """x in fp32 with every NaN replaced by 0."""
    x = x.to(tl.float32)
    return tl.where(x == x, x, 0.0)


@triton.jit
def load_key_tile(
    data_ptr,
    slot,
    present,
    stride_block,
    FORMAT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NATIVE: tl.constexpr,
    SCRUB: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The keys of `slot` [N] as 8 tensors [N, 64] of DTYPE; absent keys are 0 and are not read.

    Without SCRUB a NaN or a value that DTYPE cannot hold stays non-finite and shows in the result; with SCRUB, NaN
    becomes 0 (spec 4.3, step 3).
    """
    block = (slot // BLOCK_SIZE).to(tl.int64)
    within = slot % BLOCK_SIZE
    channel = tl.arange(0, GROUP)[None, :]
    wanted = present[:, None]
    keys = ()
    if FORMAT == ROWS:
        row_ptr = data_ptr + (block * stride_block + within * (GROUP * GROUPS))[:, None] + channel
        for g in tl.static_range(GROUPS):
            key = tl.load(row_ptr + g * GROUP, mask=wanted, other=0.0)
            if SCRUB:
                key = without_nan(key)
            keys = keys + (key.to(DTYPE),)
    else:
        page = block * stride_block
        row_ptr = data_ptr + (page + within * TOKEN_BYTES)[:, None] + channel
        scale_ptr = (data_ptr + page + BLOCK_SIZE * TOKEN_BYTES + within * 8).to(tl.pointer_type(tl.int64))
        word = tl.load(scale_ptr, mask=present, other=0)
        for g in tl.static_range(GROUPS - 1):
            byte = tl.load(row_ptr + g * GROUP, mask=wanted, other=0)
            scale = group_scale(word, g)
            if SCRUB:
                key = decode_bytes(byte, FORMAT, NATIVE, tl.float32) * scale[:, None]
                keep = (key == key) & (scale != float("inf"))[:, None]
                keys = keys + (tl.where(keep, key, 0.0).to(DTYPE),)
            else:
                keys = keys + (decode_bytes(byte, FORMAT, NATIVE, DTYPE) * scale.to(DTYPE)[:, None],)
        rope_ptr = (data_ptr + page + within * TOKEN_BYTES + ROPE_BYTES).to(tl.pointer_type(tl.bfloat16))
        rope = tl.load(rope_ptr[:, None] + channel, mask=wanted, other=0.0)
        if SCRUB:
            rope = without_nan(rope)
        keys = keys + (rope.to(DTYPE),)
    return keys


@triton.jit
def attend_segment(
    q,
    top,
    total,
    acc,
    data_ptr,
    indices_ptr,
    first,
    last,
    num_slots,
    stride_block,
    scale_log2,
    FORMAT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NATIVE: tl.constexpr,
    SCRUB: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Online softmax, base 2, over the listed keys [first, last); returns (top, total, acc)."""
    lane = tl.arange(0, BLOCK_K)
    for start in range(first, last, BLOCK_K):
        at = start + lane
        slot = tl.load(indices_ptr + at, mask=at < last, other=-1)
        present = (slot >= 0) & (slot < num_slots)
        keys = load_key_tile(data_ptr, slot, present, stride_block, FORMAT, BLOCK_SIZE, NATIVE, SCRUB, DTYPE)
        scores = tl.dot(keys[0], q[0], input_precision="ieee")
        for g in tl.static_range(1, GROUPS):
            scores = tl.dot(keys[g], q[g], scores, input_precision="ieee")
        scores = tl.where(present[:, None], scores * scale_log2, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(scores - base[None, :])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weight, 0)
        weight = weight.to(DTYPE)
        new_acc = ()
        for g in tl.static_range(GROUPS):
            new_acc = new_acc + (tl.dot(tl.trans(keys[g]), weight, acc[g] * fade[None, :], input_precision="ieee"),)
        acc = new_acc
        top = new_top
    return top, total, acc
