"""Sparse prefill attention over gathered 16-bit rows in Triton (attention spec 4.4).

For GPUs where decoding fp8 for every query that lists a key costs more than reading twice the bytes: keys are decoded
once by `gather_dequant`, and a tile of rows goes from memory into both products as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dsv4dist.errors import ShapeError
from dsv4dist.kernels._triton.block_matmul import arch_traits
from dsv4dist.kernels._triton.checks import check_rotary, check_rows
from dsv4dist.kernels._triton.compile_spec import CompileSpec, spec

HEAD_DIM = 512
ROTARY_DIM = 64
LOG2_E = 1.4426950408889634
FEW_HEADS = 16
"""Of more heads Hopper runs the kernel with 64 of them a program."""
_DIM = tl.constexpr(HEAD_DIM)
_PAIRS = tl.constexpr(HEAD_DIM // 2)
_ROTARY_PAIRS = tl.constexpr(ROTARY_DIM // 2)


@dataclass(frozen=True)
class _Tile:
    """A program has `heads` heads of a query and takes `keys` keys a step."""

    heads: int
    keys: int
    warps: int
    stages: int


@triton.jit(do_not_specialize=("num_rows", "num_heads"))
def sparse_prefill_kernel(
    q_ptr, rows_ptr, indices_ptr, indptr_ptr, sink_ptr, positions_ptr, cos_sin_ptr, out_ptr, stride_q, stride_head,
    stride_row, stride_out, stride_out_head, num_rows, num_heads, scale_log2, HAS_SINK: tl.constexpr,
    ROTATE: tl.constexpr, DTYPE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_H heads of one query, online softmax in base 2 over the query's list."""
    head_blocks = tl.cdiv(num_heads, BLOCK_H)
    query = (tl.program_id(0) // head_blocks).to(tl.int64)  # neighbours share keys, which then come from the cache
    head = tl.program_id(0) % head_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    there = head < num_heads
    channel = tl.arange(0, _DIM)[None, :]
    first = tl.load(indptr_ptr + query)
    last = tl.load(indptr_ptr + query + 1)
    q_row_ptr = q_ptr + query * stride_q + head.to(tl.int64)[:, None] * stride_head
    q = tl.load(q_row_ptr + channel, mask=there[:, None], other=0.0).to(DTYPE)
    top = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, _DIM), tl.float32)
    lane = tl.arange(0, BLOCK_K)
    row = tl.load(indices_ptr + first + lane, mask=first + lane < last, other=-1)
    for start in range(first, last, BLOCK_K):
        present = (row >= 0) & (row < num_rows)
        key_ptr = rows_ptr + row.to(tl.int64)[:, None] * stride_row + channel
        key = tl.load(key_ptr, mask=present[:, None], other=0.0).to(DTYPE)
        following = start + BLOCK_K + lane
        row = tl.load(indices_ptr + following, mask=following < last, other=-1)
        scores = tl.dot(q, tl.trans(key), input_precision="ieee") * scale_log2
        scores = tl.where(present[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(scores - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weight, 1)
        acc = tl.dot(weight.to(DTYPE), key, acc * fade[:, None], input_precision="ieee")
        top = new_top
    fade = tl.full((BLOCK_H,), 1.0, tl.float32)
    if HAS_SINK:
        sink = tl.load(sink_ptr + head, mask=there, other=float("-inf")) * 1.4426950408889634
        highest = tl.maximum(top, sink)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        fade = tl.exp2(top - base)
        total = total * fade + tl.exp2(sink - base)
    value = acc * tl.where(total > 0.0, fade / tl.maximum(total, 1e-30), 0.0)[:, None]
    if ROTATE:
        pair = tl.arange(0, _PAIRS) - (_PAIRS - _ROTARY_PAIRS)
        table_ptr = cos_sin_ptr + tl.load(positions_ptr + query).to(tl.int64) * (2 * _ROTARY_PAIRS) + pair
        cos = tl.load(table_ptr, mask=pair >= 0, other=1.0)[None, :]
        sin = tl.load(table_ptr + _ROTARY_PAIRS, mask=pair >= 0, other=0.0)[None, :]
        even, odd = tl.split(tl.reshape(value, (BLOCK_H, _PAIRS, 2)))
        value = tl.reshape(tl.join(even * cos + odd * sin, odd * cos - even * sin), (BLOCK_H, _DIM))
    out_row_ptr = out_ptr + query * stride_out + head.to(tl.int64)[:, None] * stride_out_head
    tl.store(out_row_ptr + channel, value.to(out_ptr.dtype.element_ty), mask=there[:, None])


def sparse_prefill(
    q: torch.Tensor,
    rows: torch.Tensor,
    indices: torch.Tensor,
    indptr: torch.Tensor,
    sink: torch.Tensor | None,
    scale: float,
    positions: torch.Tensor | None = None,
    cos_sin: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend query i to rows[indices[indptr[i]:indptr[i + 1]]]; rows are keys and values (spec 4.4).

    n queries, h local heads, D = 512:
        q          [n, h, D] bf16, fp16 or fp32, unit stride in D
        rows       [N, D] bf16, fp16 or fp32, unit stride in D, finite where listed; multiplied in their own type
        indices    int32 rows, those outside [0, N) are absent; indptr [n + 1] int32, first 0, ascending
        sink       [>= h] fp32, natural-log score, or None; it joins the denominator only
        positions  [n] int32 or int64 with cos_sin [P, 64] fp32: the result is rotated back by the query's position
        out        [n, h, D], written and returned; allocated like q if None; exact 0 where a query has no row
    Capture: the launch depends on sizes only.  Raises: ShapeError.
    """
    check_rows("q", q, (None, None, HEAD_DIM))
    check_rows("rows", rows, (None, HEAD_DIM))
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    num_queries, num_heads, _ = q.shape
    check_rows("out", out, (num_queries, num_heads, HEAD_DIM))
    for name, one, length in (("indices", indices, indices.numel()), ("indptr", indptr, num_queries + 1)):
        if one.dtype != torch.int32 or one.shape != (length,) or not one.is_contiguous():
            raise ShapeError(name, f"contiguous int32 [{length}]", f"{one.dtype} {list(one.shape)}")
    if sink is not None and (sink.dtype != torch.float32 or sink.dim() != 1 or sink.numel() < num_heads):
        raise ShapeError("sink", f"float32 [>= {num_heads}]", f"{sink.dtype} {list(sink.shape)}")
    if (positions is None) != (cos_sin is None):
        raise ShapeError("positions and cos_sin", "both or neither", "one of them")
    if positions is not None and cos_sin is not None:
        check_rotary(HEAD_DIM, positions, cos_sin, num_queries)
        if cos_sin.shape[1] != ROTARY_DIM or not cos_sin.is_contiguous():
            raise ShapeError("cos_sin", f"contiguous [P, {ROTARY_DIM}]", list(cos_sin.shape))
    if num_queries == 0 or num_heads == 0:
        return out
    dtype = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[rows.dtype]
    arch = arch_traits(q.device).name
    if arch == "sm90" and num_heads > FEW_HEADS:
        from dsv4dist.kernels._triton import hopper_gathered

        if hopper_gathered.takes(q, rows):
            hopper_gathered.launch_gathered(q, rows, indices, indptr, sink, scale * LOG2_E, positions, cos_sin, out)
            return out
    if arch == "cpu":
        dtype = tl.float32  # the interpreter's bf16 product is wrong
    tile = _OTHER if dtype == tl.float32 else _TILES.get(arch, _OTHER)
    sparse_prefill_kernel[(triton.cdiv(num_heads, tile.heads) * num_queries,)](
        q, rows, indices, indptr, *(q if x is None else x for x in (sink, positions, cos_sin)), out, q.stride(0),
        q.stride(1), rows.stride(0), out.stride(0), out.stride(1), rows.shape[0], num_heads, scale * LOG2_E,
        HAS_SINK=sink is not None, ROTATE=positions is not None, DTYPE=dtype, BLOCK_H=tile.heads, BLOCK_K=tile.keys,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


_TILES = {"gfx942": _Tile(16, 32, 4, 2), "gfx950": _Tile(16, 32, 4, 1), "sm90": _Tile(16, 32, 4, 3)}
_OTHER = _Tile(16, 16, 4, 1)


def compile_specs() -> list[CompileSpec]:
    """bf16 rows with sink and rotation, the shapes of every architecture."""
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
        spec(
            sparse_prefill_kernel, f"sparse_prefill {tile.heads} heads {tile.keys} keys", signature,
            constexprs={"HAS_SINK": True, "ROTATE": True, "DTYPE": tl.bfloat16, "BLOCK_H": tile.heads,
                        "BLOCK_K": tile.keys},
            num_warps=tile.warps, num_stages=tile.stages, archs=(arch,), large=("rows_ptr",), has_dot=True,
        )
        for arch, tile in (*_TILES.items(), ("gfx1250", _OTHER), ("other", _OTHER))
    ]  # fmt: skip
