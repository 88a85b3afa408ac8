"""Prefill attention over gathered 16-bit rows on Hopper, in Gluon: one program a query and 64 of its heads (spec 4.4).

Rows are copied asynchronously, one tile of 64 ahead, to where both products read them; the products of a tile's values
and of the next tile's scores run one behind the other while the softmax between them waits for neither.
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
from dsv4dist.kernels._triton.early_launch import early_launch, wait_for_previous_gluon
from dsv4dist.kernels._triton.hopper_decode import KEYS, PANEL16, barrier, load_to_shared, rotate_back

HEADS = gl.constexpr(64)  # the M of a warpgroup instruction
DIM = gl.constexpr(512)
WARPS = gl.constexpr(8)
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
VALUES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16]))
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))


@gluon.jit
def listed_rows(indices_ptr, first, last, tile, layout: gl.constexpr):
    """Rows [64] of a tile of the list, -1 behind its end."""
    at = first + tile * KEYS + gl.arange(0, KEYS, layout)
    return gl.load(indices_ptr + at, mask=at < last, other=-1)


@gluon.jit
def copy_rows(rows_ptr, row, num_rows, stride_row, smem):
    """Start copying the rows [64] to smem [64, 512]; absent ones become 0."""
    present = (row >= 0) & (row < num_rows)
    channel = gl.arange(0, DIM, gl.SliceLayout(0, COPY))
    from_ptr = rows_ptr + row.to(gl.int64)[:, None] * stride_row + channel[None, :]
    load_to_shared(smem, from_ptr, mask=present[:, None])
    async_copy.commit_group()


@gluon.jit(do_not_specialize=("num_rows", "num_heads"))
def prefill_gathered_kernel(
    q_ptr, rows_ptr, indices_ptr, indptr_ptr, sink_ptr, positions_ptr, cos_sin_ptr, out_ptr, stride_q, stride_head,
    stride_row, stride_out, stride_out_head, num_rows, num_heads, scale_log2, HAS_SINK: gl.constexpr,
    ROTATE: gl.constexpr,
):  # fmt: skip
    """One program: 64 heads of one query, online softmax in base 2 over the query's list."""
    wait_for_previous_gluon()
    DTYPE: gl.constexpr = rows_ptr.dtype.element_ty
    head_blocks = gl.cdiv(num_heads, HEADS)
    query = (gl.program_id(0) // head_blocks).to(gl.int64)
    first_head = gl.program_id(0) % head_blocks * HEADS
    first = gl.load(indptr_ptr + query)
    last = gl.load(indptr_ptr + query + 1)
    tiles = gl.cdiv(last - first, KEYS)
    by_row: gl.constexpr = gl.SliceLayout(1, COPY)
    by_key: gl.constexpr = gl.SliceLayout(0, SCORES)
    by_head: gl.constexpr = gl.SliceLayout(1, SCORES)
    q_smem = gl.allocate_shared_memory(DTYPE, [HEADS, DIM], PANEL16)
    even_smem = gl.allocate_shared_memory(DTYPE, [KEYS, DIM], PANEL16)
    odd_smem = gl.allocate_shared_memory(DTYPE, [KEYS, DIM], PANEL16)
    weight_smem = gl.allocate_shared_memory(DTYPE, [HEADS, KEYS], PANEL16)
    copy_rows(rows_ptr, listed_rows(indices_ptr, first, last, 0, by_row), num_rows, stride_row, even_smem)
    copy_rows(rows_ptr, listed_rows(indices_ptr, first, last, 1, by_row), num_rows, stride_row, odd_smem)
    coming = listed_rows(indices_ptr, first, last, 2, by_row)
    shown = listed_rows(indices_ptr, first, last, 0, by_key)
    head = first_head + gl.arange(0, HEADS, by_row)
    channel = gl.arange(0, DIM, gl.SliceLayout(0, COPY))
    q_row_ptr = q_ptr + query * stride_q + head.to(gl.int64)[:, None] * stride_head
    q = gl.load(q_row_ptr + channel[None, :], mask=(head < num_heads)[:, None], other=0.0)
    q_smem.store(q.to(DTYPE))
    top = gl.full((HEADS,), float("-inf"), gl.float32, by_head)
    total = gl.zeros((HEADS, KEYS), gl.float32, SCORES)
    nothing = gl.zeros((HEADS, KEYS), gl.float32, SCORES)
    acc = gl.zeros((HEADS, DIM), gl.float32, VALUES)
    async_copy.wait_group(1)
    fence_async_shared()
    barrier()
    scores = warpgroup_mma(q_smem, even_smem.permute((1, 0)), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    for pair in range(0, gl.cdiv(tiles, 2)):
        for half in gl.static_range(2):
            tile = pair * 2 + half
            here = even_smem if half == 0 else odd_smem
            there = odd_smem if half == 0 else even_smem
            seen = (shown >= 0) & (shown < num_rows)
            shown = listed_rows(indices_ptr, first, last, tile + 1, by_key)
            scores = gl.where(seen[None, :], scores * scale_log2, float("-inf"))
            new_top = gl.maximum(top, gl.max(scores, 1))
            base = gl.where(new_top == float("-inf"), 0.0, new_top)
            weight = gl.exp2(scores - base[:, None])
            fade = gl.exp2(top - base)
            total = total * fade[:, None] + weight
            top = new_top
            weight_smem.store(weight.to(DTYPE))
            acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, VALUES))[:, None]
            async_copy.wait_group(0)
            fence_async_shared()
            barrier()
            values = warpgroup_mma(weight_smem, here, acc, is_async=True)
            scores = warpgroup_mma(q_smem, there.permute((1, 0)), nothing, use_acc=False, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[values])
            barrier()  # behind it nobody reads this tile any more
            copy_rows(rows_ptr, coming, num_rows, stride_row, here)
            coming = listed_rows(indices_ptr, first, last, tile + 3, by_row)
            scores = warpgroup_mma_wait(0, deps=[scores])
    async_copy.wait_group(0)
    whole = gl.sum(total, 1)
    fade = gl.full((HEADS,), 1.0, gl.float32, by_head)
    lane = first_head + gl.arange(0, HEADS, by_head)
    if HAS_SINK:
        sink = gl.load(sink_ptr + lane, mask=lane < num_heads, other=float("-inf")) * 1.4426950408889634
        highest = gl.maximum(top, sink)
        base = gl.where(highest == float("-inf"), 0.0, highest)
        fade = gl.exp2(top - base)
        whole = whole * fade + gl.exp2(sink - base)
    factor = gl.where(whole > 0.0, fade / gl.maximum(whole, 1e-30), 0.0)
    acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, VALUES))[:, None]
    if ROTATE:
        acc = rotate_back(acc, cos_sin_ptr, gl.load(positions_ptr + query), HEADS, DIM, VALUES)
    # Through shared memory, where the rows were: whole lines go out.
    barrier()
    even_smem.store(acc.to(DTYPE))
    barrier()
    out = even_smem.load(COPY)
    out_row_ptr = out_ptr + query * stride_out + head.to(gl.int64)[:, None] * stride_out_head
    gl.store(out_row_ptr + channel[None, :], out.to(out_ptr.dtype.element_ty), mask=(head < num_heads)[:, None])


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
    """Enqueue the kernel; arguments as `sparse_prefill` has checked them, rows in 16 bits. Reads no device value."""
    num_queries, num_heads, _ = q.shape
    prefill_gathered_kernel[(triton.cdiv(num_heads, HEADS.value) * num_queries,)](
        q, rows, indices, indptr, *(q if x is None else x for x in (sink, positions, cos_sin)), out, q.stride(0),
        q.stride(1), rows.stride(0), out.stride(0), out.stride(1), rows.shape[0], num_heads, scale_log2,
        HAS_SINK=sink is not None, ROTATE=positions is not None, num_warps=WARPS.value, **early_launch(q.device),
    )  # fmt: skip


def compile_specs() -> list[CompileSpec]:
    """bf16 rows with sink and rotation."""
    signature = {
        **dict.fromkeys(("q_ptr", "rows_ptr", "out_ptr"), "*bf16"),
        **dict.fromkeys(("indices_ptr", "indptr_ptr"), "*i32"),
        **dict.fromkeys(("sink_ptr", "cos_sin_ptr"), "*fp32"),
        "positions_ptr": "*i64",
        **dict.fromkeys(("stride_q", "stride_head", "stride_row", "stride_out", "stride_out_head"), "i32"),
        **dict.fromkeys(("num_rows", "num_heads"), "i32"),
        "scale_log2": "fp32",
    }
    return [
        spec(prefill_gathered_kernel, "sparse_prefill gathered 64 heads hopper", signature,
             constexprs={"HAS_SINK": True, "ROTATE": True}, num_warps=WARPS.value, archs=("sm90",), large=("rows_ptr",),
             has_dot=True)
    ]  # fmt: skip
