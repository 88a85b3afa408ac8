"""The two kernels of sparse decode attention: partial softmax per split, and the reduction (attention spec 4.3)."""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4dist.kernels._triton.early_launch import wait_for_previous
from dsv4dist.kernels._triton.tiles import GROUP, GROUPS, attend_segment

DIM = tl.constexpr(512)


@triton.jit
def load_query(q_ptr, head, present, stride_head, DTYPE: tl.constexpr):
    """q of `head` [H] as 8 tensors [H, 64] of DTYPE."""
    channel = tl.arange(0, GROUP)[:, None]
    row_ptr = q_ptr + head.to(tl.int64)[None, :] * stride_head + channel
    q = ()
    for g in tl.static_range(GROUPS):
        q = q + (tl.load(row_ptr + g * GROUP, mask=present[None, :], other=0.0).to(DTYPE),)
    return q


@triton.jit
def attend(
    q_ptr,
    head,
    present,
    stride_head,
    main_ptr,
    main_indices_ptr,
    main_first,
    main_last,
    main_slots,
    main_stride,
    extra_ptr,
    extra_indices_ptr,
    extra_first,
    extra_last,
    extra_slots,
    extra_stride,
    scale_log2,
    MAIN: tl.constexpr,
    MAIN_BLOCK: tl.constexpr,
    MAIN_NATIVE: tl.constexpr,
    EXTRA: tl.constexpr,
    EXTRA_BLOCK: tl.constexpr,
    EXTRA_NATIVE: tl.constexpr,
    SCRUB: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Both key ranges under one softmax: base-2 maximum [H], sum [H], weighted values 8 x [H, 64]."""
    q = load_query(q_ptr, head, present, stride_head, DTYPE)
    top = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = ()
    for _ in tl.static_range(GROUPS):
        acc = acc + (tl.zeros((GROUP, BLOCK_H), tl.float32),)
    top, total, acc = attend_segment(
        q, top, total, acc, main_ptr, main_indices_ptr, main_first, main_last, main_slots, main_stride, scale_log2,
        MAIN, MAIN_BLOCK, MAIN_NATIVE, SCRUB, DTYPE, BLOCK_K,
    )  # fmt: skip
    if EXTRA:
        top, total, acc = attend_segment(
            q, top, total, acc, extra_ptr, extra_indices_ptr, extra_first, extra_last, extra_slots, extra_stride,
            scale_log2, EXTRA, EXTRA_BLOCK, EXTRA_NATIVE, SCRUB, DTYPE, BLOCK_K,
        )  # fmt: skip
    return top, total, acc


@triton.jit
def rotate_back(value, cos_sin_ptr, position, ROWS: tl.constexpr):
    """Undo the rotation of [ROWS, 64] by one position: pairs (2i, 2i + 1), fp32 table (spec 1.3, 4.10)."""
    pair = tl.arange(0, 32)
    cos = tl.load(cos_sin_ptr + position * GROUP + pair)[None, :]
    sin = tl.load(cos_sin_ptr + position * GROUP + 32 + pair)[None, :]
    even, odd = tl.split(tl.reshape(value, (ROWS, 32, 2)))
    return tl.reshape(tl.join(even * cos + odd * sin, odd * cos - even * sin), (ROWS, GROUP))


@triton.jit(do_not_specialize=("main_slots", "extra_slots", "num_heads", "num_splits"))
def sparse_decode_partial_kernel(
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
    main_slots,
    extra_slots,
    num_heads,
    num_splits,
    scale_log2,
    MAIN: tl.constexpr,
    MAIN_BLOCK: tl.constexpr,
    MAIN_NATIVE: tl.constexpr,
    EXTRA: tl.constexpr,
    EXTRA_BLOCK: tl.constexpr,
    EXTRA_NATIVE: tl.constexpr,
    DTYPE: tl.constexpr,
    EXACT: tl.constexpr,
    HAS_SINK: tl.constexpr,
    ROTATE: tl.constexpr,
    FINISH: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: one block of heads of one query over one share of its keys.

    The tiles of both lists are numbered through and dealt out evenly, so a row with few keys uses few splits whatever
    num_splits is; a split without keys writes only total = 0. FINISH (num_splits = 1) writes the output itself.
    EXACT is the wider type that a split falls back to, NaN scrubbed, when DTYPE gave a non-finite result.
    """
    wait_for_previous()
    head_blocks = tl.cdiv(num_heads, BLOCK_H)
    shared = tl.program_id(0) // head_blocks  # neighbours share keys, which then come from the cache
    head = tl.program_id(0) % head_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    split = shared % num_splits
    query = (shared // num_splits).to(tl.int64)
    present = head < num_heads
    main_begin = tl.load(main_indptr_ptr + query)
    main_end = tl.load(main_indptr_ptr + query + 1)
    main_tiles = tl.cdiv(main_end - main_begin, BLOCK_K)
    tiles = main_tiles
    extra_begin = 0
    extra_end = 0
    if EXTRA:
        extra_begin = tl.load(extra_indptr_ptr + query)
        extra_end = tl.load(extra_indptr_ptr + query + 1)
        tiles += tl.cdiv(extra_end - extra_begin, BLOCK_K)
    share = tl.cdiv(tiles, num_splits)
    begin = split * share
    end = begin + share
    main_first = main_begin + begin * BLOCK_K
    main_last = tl.minimum(main_begin + end * BLOCK_K, main_end)
    extra_first = extra_begin + tl.maximum(begin - main_tiles, 0) * BLOCK_K
    extra_last = tl.minimum(extra_begin + (end - main_tiles) * BLOCK_K, extra_end)
    at = (query * num_heads + head) * num_splits + split
    if (not FINISH) and (begin >= tiles):
        tl.store(total_ptr + at, 0.0, mask=present)
        return
    query_ptr = q_ptr + query * stride_q
    top, total, acc = attend(
        query_ptr, head, present, stride_head,
        main_ptr, main_indices_ptr, main_first, main_last, main_slots, main_stride,
        extra_ptr, extra_indices_ptr, extra_first, extra_last, extra_slots, extra_stride, scale_log2,
        MAIN, MAIN_BLOCK, MAIN_NATIVE, EXTRA, EXTRA_BLOCK, EXTRA_NATIVE, False, DTYPE, BLOCK_H, BLOCK_K,
    )  # fmt: skip
    size = tl.abs(acc[0])
    for g in tl.static_range(1, GROUPS):
        size += tl.abs(acc[g])
    bad = tl.max(tl.max((size < float("inf")).to(tl.int32) ^ 1, 1), 0)
    if bad != 0:
        top, total, acc = attend(
            query_ptr, head, present, stride_head,
            main_ptr, main_indices_ptr, main_first, main_last, main_slots, main_stride,
            extra_ptr, extra_indices_ptr, extra_first, extra_last, extra_slots, extra_stride, scale_log2,
            MAIN, MAIN_BLOCK, MAIN_NATIVE, EXTRA, EXTRA_BLOCK, EXTRA_NATIVE, True, EXACT, BLOCK_H, BLOCK_K,
        )  # fmt: skip
    channel = tl.arange(0, GROUP)[None, :]
    if FINISH:
        if HAS_SINK:
            sink = tl.load(sink_ptr + head, mask=present, other=float("-inf")) * 1.4426950408889634
            highest = tl.maximum(top, sink)
            base = tl.where(highest == float("-inf"), 0.0, highest)
            fade = tl.exp2(top - base)
            total = total * fade + tl.exp2(sink - base)
        else:
            fade = tl.full((BLOCK_H,), 1.0, tl.float32)
        factor = tl.where(total > 0.0, fade / tl.maximum(total, 1e-30), 0.0)
        row_ptr = out_ptr + query * stride_out + head.to(tl.int64)[:, None] * stride_out_head + channel
        for g in tl.static_range(GROUPS):
            value = tl.trans(acc[g]) * factor[:, None]
            if ROTATE and g == GROUPS - 1:
                value = rotate_back(value, cos_sin_ptr, tl.load(positions_ptr + query), BLOCK_H)
            tl.store(row_ptr + g * GROUP, value.to(out_ptr.dtype.element_ty), mask=present[:, None])
    else:
        tl.store(top_ptr + at, top, mask=present)
        tl.store(total_ptr + at, total, mask=present)
        acc_row_ptr = acc_ptr + at[:, None] * DIM + channel
        for g in tl.static_range(GROUPS):
            tl.store(acc_row_ptr + g * GROUP, tl.trans(acc[g]), mask=present[:, None])


@triton.jit(do_not_specialize=("num_heads", "num_splits"))
def sparse_decode_reduce_kernel(
    top_ptr,
    total_ptr,
    acc_ptr,
    sink_ptr,
    positions_ptr,
    cos_sin_ptr,
    out_ptr,
    stride_out,
    stride_out_head,
    num_heads,
    num_splits,
    SPLITS: tl.constexpr,
    HAS_SINK: tl.constexpr,
    ROTATE: tl.constexpr,
):
    """One program: one head of one query. A split with total = 0 was never written further and is not read."""
    wait_for_previous()
    head = tl.program_id(0) % num_heads
    query = (tl.program_id(0) // num_heads).to(tl.int64)
    split = tl.arange(0, SPLITS)
    at = (query * num_heads + head) * num_splits + split
    total = tl.load(total_ptr + at, mask=split < num_splits, other=0.0)
    used = (total > 0.0) | (total != total)
    top = tl.load(top_ptr + at, mask=used, other=float("-inf"))
    highest = tl.max(top, 0)
    if HAS_SINK:
        sink = tl.load(sink_ptr + head) * 1.4426950408889634
        highest = tl.maximum(highest, sink)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.where(used, tl.exp2(top - base), 0.0)
    whole = tl.sum(weight * total, 0)
    if HAS_SINK:
        whole += tl.exp2(sink - base)
    factor = tl.where(whole > 0.0, 1.0 / tl.maximum(whole, 1e-30), 0.0)
    channel = tl.arange(0, 512)
    values = tl.load(acc_ptr + at[:, None] * DIM + channel[None, :], mask=used[:, None], other=0.0)
    value = tl.sum(values * weight[:, None], 0) * factor
    out_row_ptr = out_ptr + query * stride_out + head.to(tl.int64) * stride_out_head
    if ROTATE:
        position = tl.load(positions_ptr + query)
        pair = tl.arange(0, 256)
        at_table = cos_sin_ptr + position * GROUP + pair - 224
        cos = tl.load(at_table, mask=pair >= 224, other=1.0)
        sin = tl.load(at_table + 32, mask=pair >= 224, other=0.0)
        even, odd = tl.split(tl.reshape(value, (256, 2)))
        value = tl.reshape(tl.join(even * cos + odd * sin, odd * cos - even * sin), (512,))
    tl.store(out_row_ptr + channel, value.to(out_ptr.dtype.element_ty))
