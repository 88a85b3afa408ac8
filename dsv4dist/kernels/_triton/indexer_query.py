"""Rotation and quantisation of index queries in Triton (attention spec 1.6, 4.6)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4dist.kernels._triton.checks import check_rotary, check_rows, power_of_2_up_to
from dsv4dist.kernels._triton.compile_spec import CompileSpec, archs_of, spec
from dsv4dist.kernels._triton.early_launch import early_launch, wait_for_previous
from dsv4dist.kernels._triton.quantise import (
    cast,
    decode_scale,
    encode_scaled,
    magnitude,
    rotate_rows,
    scale_exponent,
    split_rows,
    to_bf16,
)
from dsv4dist.kernels.paged_cache import Fp8Format


@triton.jit
def _indexer_query_kernel(
    q_ptr, weights_ptr, positions_ptr, cos_sin_ptr, out_ptr, out_weights_ptr, stride_q_token, stride_q_head,
    stride_weights, stride_table, num_rows, num_heads, num_positions, dim_factor, head_factor,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROTARY: tl.constexpr, FP8: tl.constexpr, FNUZ: tl.constexpr,
    ROWS: tl.constexpr, ONE_TOKEN: tl.constexpr,
):  # fmt: skip
    """One program: ROWS (token, head) rows and their weights."""
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK)
    present = row < num_rows
    token, head = split_rows(tl.program_id(0).to(tl.int64) * ROWS, num_heads, ROWS, ONE_TOKEN)
    mask = present[:, None] & (channel < WIDTH)[None, :]
    position = tl.load(positions_ptr + token, mask=token * num_heads < num_rows, other=0)
    weight = tl.load(weights_ptr + token * stride_weights + head, mask=present, other=0.0).to(tl.float32)
    q_row_ptr = q_ptr + token * stride_q_token + head * stride_q_head
    q = tl.load(q_row_ptr[:, None] + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    q = rotate_rows(q, cos_sin_ptr, position, stride_table, num_positions, ROTARY, WIDTH, False)
    out_tile_ptr = out_ptr + row[:, None] * WIDTH + channel[None, :]
    if FP8:
        q = to_bf16(q).to(tl.float32)
        exponent = scale_exponent(tl.max(magnitude(q), 1), FNUZ)
        weight *= decode_scale(exponent)
        tl.store(out_tile_ptr, encode_scaled(q, exponent[:, None], FNUZ), mask=mask)
    else:
        tl.store(out_tile_ptr, cast(q, out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_weights_ptr + row, weight * dim_factor * head_factor, mask=present)


def indexer_query(
    q: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    fp8_format: Fp8Format | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the index queries, quantise them where the keys are fp8, and scale their head weights (spec 4.6).

        q           [T, Hi, Di] float; weights [T, Hi] float; both with adjacent last dimensions
        positions   [T] int32 or int64; cos_sin [P, rotary width] fp32
        fp8_format  the keys' encoding: one power-of-two scale per token and head joins the weights; None = no fp8
    Returns contiguous q [T, Hi, Di], rotated, in its dtype or the encoding's, and fp32 weights [T, Hi],
    ((w * q scale) * Di^-0.5) * Hi^-0.5.  A row that is not finite gets scale NaN and codes 0.
    Capture: the launch depends on sizes only.  Raises: ShapeError.
    """
    check_rows("q", q, (None, None, None))
    num_tokens, num_heads, width = q.shape
    check_rows("weights", weights, (num_tokens, num_heads))
    check_rotary(width, positions, cos_sin, num_tokens)
    out = torch.empty(q.shape, dtype=torch.uint8 if fp8_format else q.dtype, device=q.device)
    out_weights = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=q.device)
    count = num_tokens * num_heads
    if count:
        rows = _rows_per_program(count)
        block = triton.next_power_of_2(width)
        _indexer_query_kernel[(triton.cdiv(count, rows),)](
            q, weights, positions, cos_sin, out, out_weights, q.stride(0), q.stride(1), weights.stride(0),
            cos_sin.stride(0), count, num_heads, cos_sin.shape[0], width**-0.5, num_heads**-0.5, WIDTH=width,
            BLOCK=block, ROTARY=cos_sin.shape[1], FP8=fp8_format is not None, FNUZ=fp8_format is Fp8Format.FNUZ,
            ROWS=rows, ONE_TOKEN=num_heads % rows == 0, num_warps=_warps(rows * block), enable_fp_fusion=False,
            **early_launch(q.device),
        )  # fmt: skip
    return out.view(fp8_format.torch_dtype) if fp8_format else out, out_weights


def _rows_per_program(num_rows: int) -> int:
    """Few rows: spread over many units; many rows: enough that several loads are in flight."""
    return 4 if num_rows < 4096 else 16


def _warps(elements: int) -> int:
    return min(8, power_of_2_up_to(elements // 512))


def compile_specs() -> list[CompileSpec]:
    """64 index heads of 128 channels, without fp8 and in both encodings, few tokens and many."""
    specs = []
    for kind, fp8, fnuz in (("bf16", False, False), ("ocp", True, False), ("fnuz", True, True)):
        for rows in (4, 16):
            signature = {
                "q_ptr": "*bf16", "weights_ptr": "*bf16", "positions_ptr": "*i64", "cos_sin_ptr": "*fp32",
                "out_ptr": "*u8" if fp8 else "*bf16", "out_weights_ptr": "*fp32", "stride_q_token": "i32",
                "stride_q_head": "i32", "stride_weights": "i32", "stride_table": "i32", "num_rows": "i32",
                "num_heads": "i32", "num_positions": "i32", "dim_factor": "fp32", "head_factor": "fp32",
            }  # fmt: skip
            values = {
                "WIDTH": 128,
                "BLOCK": 128,
                "ROTARY": 64,
                "FP8": fp8,
                "FNUZ": fnuz,
                "ROWS": rows,
                "ONE_TOKEN": True,
            }
            specs.append(spec(_indexer_query_kernel, f"indexer_query {kind} x{rows}", signature, constexprs=values,
                              num_warps=_warps(rows * 128), options={"enable_fp_fusion": False},
                              archs=archs_of(Fp8Format(kind)) if fp8 else ()))  # fmt: skip
    return specs
