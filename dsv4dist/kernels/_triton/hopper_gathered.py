"""Prefill attention over gathered 16-bit rows on Hopper, in Gluon: 64 heads of a query at a time (spec 4.4).

Rows go from the L2 to shared memory as they are, one tile ahead, and both products read them there. Two warpgroups share
a query: each scores half the keys of a tile and accumulates half the channels. While the values of a tile are still being
accumulated the scores of the next begin, so the matrix units wait only for weights. Programs stay for many queries: the
first rows of the next arrive while one is written out.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsv4dist.kernels._triton.compile_spec import CompileSpec, spec
from dsv4dist.kernels._triton.decode_traits import traits_of
from dsv4dist.kernels._triton.hopper_decode import PANEL16, barrier, load_to_shared
from dsv4dist.kernels._triton.output_factor import output_factor

DIM = gl.constexpr(512)
KEYS = gl.constexpr(64)  # keys of one tile
HEADS = gl.constexpr(64)  # of one program: the M of a warpgroup instruction
WARPS = gl.constexpr(8)

ROW = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))  # 16 bytes a lane, a warp copies half a row
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
VALUES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16]))
BY_HEAD = gl.constexpr(gl.SliceLayout(1, VALUES))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
# [64 heads, 2 warpgroups]: both in the lanes that have the head in a product.
BOTH = gl.constexpr(
    gl.DistributedLinearLayout(
        [[8, 0], [0, 1]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0], [0, 0]], [], [64, 2]
    )
)


@gluon.jit
def list_bounds(indptr_ptr, item, num_items, head_blocks):
    """Where the list of an item begins and ends; behind the last item an empty one."""
    query = gl.minimum(item, num_items - 1) // head_blocks
    first = gl.load(indptr_ptr + query)
    last = gl.load(indptr_ptr + query + 1)
    return first, gl.where(item < num_items, last, first)


@gluon.jit
def listed_rows(indices_ptr, at, last):
    """The rows [64] listed from `at` on, -1 behind `last`."""
    place = at + gl.arange(0, KEYS, gl.SliceLayout(1, ROW))
    return gl.load(indices_ptr + place, mask=place < last, other=-1)


@gluon.jit
def start_tile(rows_ptr, stride_row, num_rows, row, tile_smem, bias_smem):
    """Start copying rows [64] to tile_smem [64, 512]; absent ones become 0, and -inf in bias_smem [64]."""
    present = (row >= 0) & (row < num_rows)
    channel = gl.arange(0, DIM, gl.SliceLayout(0, ROW))
    from_ptr = rows_ptr + (row.to(gl.int64) * stride_row)[:, None] + channel[None, :]
    load_to_shared(tile_smem, from_ptr, mask=present[:, None])
    async_copy.commit_group()
    bias_smem.store(gl.where(present, 0.0, float("-inf")))


@gluon.jit
def start_query(q_ptr, item, num_items, head_blocks, num_heads, stride_q, stride_head, q_smem):
    """Start copying the heads of an item to q_smem [64, 512]; those that are not there become 0."""
    query = (item // head_blocks).to(gl.int64)
    head = item % head_blocks * HEADS + gl.arange(0, HEADS, gl.SliceLayout(1, ROW))
    channel = gl.arange(0, DIM, gl.SliceLayout(0, ROW))
    wanted = (head < num_heads) & (item < num_items)
    from_ptr = q_ptr + query * stride_q + (head.to(gl.int64) * stride_head)[:, None] + channel[None, :]
    load_to_shared(q_smem, from_ptr, mask=wanted[:, None])
    async_copy.commit_group()


@gluon.jit
def finite(top):
    return gl.where(top == float("-inf"), 0.0, top)


@gluon.jit
def both_halves(part, smem):
    """What both warpgroups have of every head [64, 2], where `part` has been stored to smem by both."""
    smem.store(part)
    fence_async_shared()
    barrier()
    return smem.load(BOTH)


@gluon.jit
def start_scores(q_smem, keys):
    """The scores [64 heads, 64 keys] of a tile, as a product under way."""
    zeros = gl.zeros((HEADS, KEYS), gl.float32, SCORES)
    return warpgroup_mma(q_smem, keys.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def wait_for_tile():
    """Wait until everybody's copies have arrived, and everybody has taken what they replaced."""
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()


@gluon.jit
def half_maxima(scores):
    """The maximum of every head over the keys of each warpgroup [64, 2]."""
    return gl.max(gl.reshape(scores, (HEADS, 2, 32)), 2)


@gluon.jit
def sum_in_lanes(weight):
    """[64, 64] -> [64, 2, 4]: one warpgroup's and one lane's share of the sum over keys each; nothing moves."""
    return gl.sum(gl.sum(gl.reshape(weight, (HEADS, 2, 4, 4, 2)), 4), 2)


@gluon.jit
def catch_up(scores, top, total, top_smem):
    """The maximum with a tile in it, the total relative to it, and by how much what came before fades."""
    new_top = gl.convert_layout(gl.max(both_halves(half_maxima(scores), top_smem), 1), BY_HEAD)
    new_top = gl.maximum(top, new_top)
    fade = gl.exp2(finite(top) - finite(new_top))
    return new_top, total * fade_like(fade, total), fade


@gluon.jit
def weights_of(scores, top):
    return gl.exp2(scores - gl.convert_layout(finite(top), gl.SliceLayout(1, SCORES))[:, None])


@gluon.jit
def start_values(weight, keys, values, weight_smem):
    """The weighted rows added to `values`, as a product under way."""
    weight_smem.store(weight.to(keys.dtype))
    fence_async_shared()
    barrier()
    return warpgroup_mma(weight_smem, keys, values, is_async=True)


@gluon.jit(do_not_specialize=("num_rows", "num_queries", "num_heads"))
def prefill_gathered_kernel(
    q_ptr, rows_ptr, indices_ptr, indptr_ptr, sink_ptr, positions_ptr, cos_sin_ptr, out_ptr, stride_q, stride_head,
    stride_row, stride_out, stride_out_head, num_rows, num_queries, num_heads, scale_log2,
    HAS_SINK: gl.constexpr, ROTATE: gl.constexpr,
):  # fmt: skip
    """A program takes items pid, pid + programs, ...; an item is 64 heads of one query."""
    DTYPE: gl.constexpr = rows_ptr.dtype.element_ty
    head_blocks = gl.cdiv(num_heads, HEADS)
    num_items = num_queries * head_blocks
    programs = gl.num_programs(0)
    q_smem = gl.allocate_shared_memory(DTYPE, [HEADS, DIM], PANEL16)
    tile_smem = gl.allocate_shared_memory(DTYPE, [2, KEYS, DIM], PANEL16)
    weight_smem = gl.allocate_shared_memory(DTYPE, [HEADS, KEYS], PANEL16)
    bias_smem = gl.allocate_shared_memory(gl.float32, [KEYS], LINE)
    top_smem = gl.allocate_shared_memory(gl.float32, [HEADS, 2], FLAT)
    total_smem = gl.allocate_shared_memory(gl.float32, [HEADS, 2], FLAT)
    by_key: gl.constexpr = gl.SliceLayout(0, SCORES)

    start_query(q_ptr, gl.program_id(0), num_items, head_blocks, num_heads, stride_q, stride_head, q_smem)
    ahead = first_ahead(indices_ptr, indptr_ptr, gl.program_id(0), programs, num_items, head_blocks)
    start_tile(rows_ptr, stride_row, num_rows, ahead[4], tile_smem.index(0), bias_smem)
    ahead = next_ahead(ahead, indices_ptr, indptr_ptr, programs, num_items, head_blocks)
    stage = 0
    for item in range(gl.program_id(0), num_items, programs):
        first, last = list_bounds(indptr_ptr, item, num_items, head_blocks)
        tiles = gl.maximum(gl.cdiv(last - first, KEYS), 1)
        total = sum_in_lanes(gl.zeros((HEADS, KEYS), gl.float32, SCORES))
        values = gl.zeros((HEADS, DIM), gl.float32, VALUES)
        wait_for_tile()
        bias = bias_smem.load(by_key)
        scores = start_scores(q_smem, tile_smem.index(stage))
        barrier()
        start_tile(rows_ptr, stride_row, num_rows, ahead[4], tile_smem.index(stage ^ 1), bias_smem)
        ahead = next_ahead(ahead, indices_ptr, indptr_ptr, programs, num_items, head_blocks)
        scores = warpgroup_mma_wait(0, deps=[scores]) * scale_log2 + bias[None, :]
        top = gl.full((HEADS,), float("-inf"), gl.float32, BY_HEAD)
        top, total, fade = catch_up(scores, top, total, top_smem)
        for _ in range(1, tiles):
            weight = weights_of(scores, top)
            products = start_values(weight, tile_smem.index(stage), values, weight_smem)
            total += sum_in_lanes(weight)
            stage ^= 1
            wait_for_tile()
            bias = bias_smem.load(by_key)
            next_scores = start_scores(q_smem, tile_smem.index(stage))
            values = warpgroup_mma_wait(1, deps=[products])
            barrier()  # all have finished with the tile before
            start_tile(rows_ptr, stride_row, num_rows, ahead[4], tile_smem.index(stage ^ 1), bias_smem)
            ahead = next_ahead(ahead, indices_ptr, indptr_ptr, programs, num_items, head_blocks)
            scores = warpgroup_mma_wait(0, deps=[next_scores]) * scale_log2 + bias[None, :]
            top, total, fade = catch_up(scores, top, total, top_smem)
            values = values * fade[:, None]
        weight = weights_of(scores, top)
        products = start_values(weight, tile_smem.index(stage), values, weight_smem)
        total += sum_in_lanes(weight)
        start_query(q_ptr, item + programs, num_items, head_blocks, num_heads, stride_q, stride_head, q_smem)
        whole = gl.convert_layout(gl.sum(both_halves(gl.sum(total, 2), total_smem), 1), BY_HEAD)
        first_head = item % head_blocks * HEADS
        lane = gl.arange(0, HEADS, BY_HEAD)
        factor = output_factor(top, whole, sink_ptr + first_head, lane, num_heads - first_head, HAS_SINK)
        query = (item // head_blocks).to(gl.int64)
        values = warpgroup_mma_wait(0, deps=[products]) * factor[:, None]
        if ROTATE:
            values = rotate_back_rows(values, cos_sin_ptr, gl.load(positions_ptr + query).to(gl.int64))
        # The tile that was read last is free until the next but one is copied.
        spare = tile_smem.index(stage)
        barrier()
        spare.store(values.to(DTYPE))
        barrier()
        head = first_head + gl.arange(0, HEADS, gl.SliceLayout(1, ROW))
        channel = gl.arange(0, DIM, gl.SliceLayout(0, ROW))
        to_ptr = out_ptr + query * stride_out + (head.to(gl.int64) * stride_out_head)[:, None] + channel[None, :]
        gl.store(to_ptr, spare.load(ROW).to(out_ptr.dtype.element_ty), mask=(head < num_heads)[:, None])
        stage ^= 1
    async_copy.wait_group(0)


@gluon.jit
def first_ahead(indices_ptr, indptr_ptr, item, programs, num_items, head_blocks):
    """The first tile to copy: its item, place, the list's end, rows [64], and bounds of the list of the item behind."""
    at, last = list_bounds(indptr_ptr, item, num_items, head_blocks)
    next_at, next_last = list_bounds(indptr_ptr, item + programs, num_items, head_blocks)
    return item, at, last, next_at, listed_rows(indices_ptr, at, last), next_last


@gluon.jit
def next_ahead(ahead, indices_ptr, indptr_ptr, programs, num_items, head_blocks):
    """The tile to copy after `ahead`."""
    item, at, last, next_at, row, next_last = ahead
    ended = at + KEYS >= last
    item = gl.where(ended, item + programs, item)
    at = gl.where(ended, next_at, at + KEYS)
    last = gl.where(ended, next_last, last)
    row = listed_rows(indices_ptr, at, last)
    next_at, next_last = list_bounds(indptr_ptr, item + programs, num_items, head_blocks)
    return item, at, last, next_at, row, next_last


@gluon.jit
def fade_like(fade, total):
    """`fade` [64] along the heads of `total` [64, 2, 4]."""
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, total.type.layout))
    return gl.convert_layout(fade, layout)[:, None][:, :, None]


@gluon.jit
def rotate_back_rows(values, cos_sin_ptr, position):
    """Undo the rotation of the last 64 of [64, 512] by one position: pairs (2i, 2i + 1) (spec 1.3, 4.10)."""
    # Quarters of what a warpgroup has, the rotary channels in the last of the second one; nothing moves.
    quarters = gl.permute(gl.reshape(values, (HEADS, 2, 2, 2, 64)), (0, 1, 4, 3, 2))
    low, high = gl.split(quarters)  # channels 0 and 64, 128 and 192
    third, last = gl.split(high)
    even, odd = gl.split(gl.reshape(last, (HEADS, 2, 32, 2)))
    table: gl.constexpr = gl.SliceLayout(0, even.type.layout)
    group = gl.arange(0, 2, gl.SliceLayout(1, table))[:, None]
    pair = gl.arange(0, 32, gl.SliceLayout(0, table))[None, :]
    at = cos_sin_ptr + position * 64 + pair + group * 0
    cos = gl.load(at, mask=group + pair * 0 > 0, other=1.0)[None, :, :]
    sin = gl.load(at + 32, mask=group + pair * 0 > 0, other=0.0)[None, :, :]
    last = gl.reshape(gl.join(even * cos + odd * sin, odd * cos - even * sin), (HEADS, 2, 64))
    last = gl.convert_layout(last, third.type.layout)
    quarters = gl.join(low, gl.join(third, last))
    values = gl.reshape(gl.permute(quarters, (0, 1, 4, 3, 2)), (HEADS, DIM))
    return gl.convert_layout(values, VALUES)


def takes(q: torch.Tensor, rows: torch.Tensor) -> bool:
    """Whether `launch_gathered` knows these types and can copy rows of q and of the workspace 16 bytes at a time."""
    strides = (q.stride(0), q.stride(1), rows.stride(0))
    aligned = all(one % 8 == 0 for one in strides) and q.data_ptr() % 16 == 0 and rows.data_ptr() % 16 == 0
    return q.dtype == rows.dtype and rows.dtype in (torch.bfloat16, torch.float16) and aligned


def launch_gathered(
    q: torch.Tensor,
    rows: torch.Tensor,
    indices: torch.Tensor,
    indptr: torch.Tensor,
    sink: torch.Tensor | None,
    scale_log2: float,
    positions: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Enqueue the kernel; arguments as `sparse_prefill` has checked them and `takes` has them, and at least one query.

    A program takes the shared memory of a multiprocessor, so one starts on each and stays. Reads no device value.
    """
    num_queries, num_heads, _ = q.shape
    items = triton.cdiv(num_heads, HEADS.value) * num_queries
    prefill_gathered_kernel[(min(items, traits_of(q.device).num_units),)](
        q, rows, indices, indptr, *(q if x is None else x for x in (sink, positions, cos_sin)), out, q.stride(0),
        q.stride(1), rows.stride(0), out.stride(0), out.stride(1), rows.shape[0], num_queries, num_heads, scale_log2,
        HAS_SINK=sink is not None, ROTATE=positions is not None, num_warps=WARPS.value,
    )  # fmt: skip


def compile_specs() -> list[CompileSpec]:
    """bf16 with sink and rotation."""
    signature = {
        **dict.fromkeys(("q_ptr", "rows_ptr", "out_ptr"), "*bf16"),
        **dict.fromkeys(("indices_ptr", "indptr_ptr"), "*i32"),
        **dict.fromkeys(("sink_ptr", "cos_sin_ptr"), "*fp32"),
        "positions_ptr": "*i64",
        **dict.fromkeys(("stride_q", "stride_head", "stride_row", "stride_out", "stride_out_head"), "i32"),
        **dict.fromkeys(("num_rows", "num_queries", "num_heads"), "i32"),
        "scale_log2": "fp32",
    }
    values = {"HAS_SINK": True, "ROTATE": True}
    return [spec(prefill_gathered_kernel, "sparse_prefill gathered 64 heads hopper", signature, constexprs=values,
                 large=("rows_ptr",), has_dot=True, archs=("sm90",), num_warps=WARPS.value,
                 spills_because="Triton 3.9 keeps every tile's descriptors; 3.6, with which it was timed, does not")]  # fmt: skip
