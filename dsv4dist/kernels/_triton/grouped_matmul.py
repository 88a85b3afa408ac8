"""Rows times the matrix of their group: the experts of a mixture (checkpoint spec 6).

Which rows belong to which expert is known on the device only, so the launch has programs for the worst case, and each
finds its expert and rows from the groups' ends; those that find none leave.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4dist.errors import ShapeError
from dsv4dist.kernels._triton.checks import FLOATS, check_integers
from dsv4dist.kernels._triton.compile_spec import CompileSpec, spec
from dsv4dist.kernels._triton.early_launch import early_launch, wait_for_previous

BLOCK_N, BLOCK_K = 64, 128


@triton.jit
def _grouped_matmul_kernel(
    x_ptr, weight_ptr, ends_ptr, out_ptr, num_experts, num_columns, num_channels, stride_x, stride_expert,
    stride_weight, stride_out, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of one expert by BLOCK_N columns."""
    wait_for_previous()
    tile = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    known = expert < num_experts
    end = tl.load(ends_ptr + expert, mask=known, other=0).to(tl.int32)
    start = tl.load(ends_ptr + expert - 1, mask=known & (expert > 0), other=0).to(tl.int32)
    tiles = tl.where(known, (end - start + BLOCK_M - 1) // BLOCK_M, 0)
    before = tl.cumsum(tiles, 0) - tiles
    mine = (tile >= before) & (tile < before + tiles)
    last = tl.sum(tl.where(mine, end, 0), 0)
    first = tl.sum(tl.where(mine, start + (tile - before) * BLOCK_M, 0), 0)
    which = tl.sum(tl.where(mine, expert, 0), 0).to(tl.int64)
    if first < last:
        row = first + tl.arange(0, BLOCK_M)
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        channel = tl.arange(0, BLOCK_K)
        x_row = x_ptr + row.to(tl.int64)[:, None] * stride_x
        weight_row = weight_ptr + which * stride_expert + column.to(tl.int64)[None, :] * stride_weight
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for begin in range(0, num_channels, BLOCK_K):
            at = begin + channel
            x = tl.load(x_row + at[None, :], mask=(row < last)[:, None] & (at < num_channels)[None, :], other=0.0)
            inside = (column < num_columns)[None, :] & (at < num_channels)[:, None]
            weight = tl.load(weight_row + at[:, None], mask=inside, other=0.0)
            total = tl.dot(x, weight, total, input_precision="ieee")
        out = out_ptr + row.to(tl.int64)[:, None] * stride_out + column[None, :]
        tl.store(out, total.to(out_ptr.dtype.element_ty), mask=(row < last)[:, None] & (column < num_columns)[None, :])


def grouped_matmul(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """out[m] = weight[e] @ x[m] for the group e of row m: rows ends[e - 1] to ends[e] - 1 of `x`.

        x       [M, K] float, unit stride in K, rows ordered by group
        weight  [E, N, K], x's dtype, unit stride in K
        ends    [E] int32 or int64, ascending, the last M
    Returns [M, N] in x's dtype, accumulated in fp32.  Capture: launches depend on sizes only.  Raises: ShapeError.
    """
    rows, channels = x.shape
    experts, columns = weight.shape[0], weight.shape[1]
    if x.dtype not in FLOATS or (channels > 1 and x.stride(1) != 1):
        raise ShapeError("rows of experts", "float with unit stride in a row", f"{x.dtype}, strides {x.stride()}")
    if weight.shape[2] != channels or weight.dtype != x.dtype or (channels > 1 and weight.stride(2) != 1):
        raise ShapeError("experts", f"{x.dtype} [E, N, {channels}]", f"{weight.dtype} {list(weight.shape)}")
    check_integers("ends", ends, (experts,))
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    if rows == 0 or columns == 0:
        return out
    block_m = _rows_per_program(rows, experts)
    grid = (min(rows, experts) + rows // block_m, triton.cdiv(columns, BLOCK_N))
    _grouped_matmul_kernel[grid](
        x, weight, ends, out, experts, columns, channels, x.stride(0), weight.stride(0), weight.stride(1),
        out.stride(0), EXPERTS=triton.next_power_of_2(experts), BLOCK_M=block_m, BLOCK_N=BLOCK_N, BLOCK_K=_depth(x),
        num_warps=4, num_stages=2, **early_launch(x.device),
    )  # fmt: skip
    return out


def _rows_per_program(rows: int, experts: int) -> int:
    """Small tiles while an expert has few rows: then its weights are all that counts."""
    return 16 if rows <= 16 * experts else 64


def _depth(x: torch.Tensor) -> int:
    return BLOCK_K // x.element_size() * 2


def compile_specs() -> list[CompileSpec]:
    """Experts of Flash and Pro in bf16, few rows and many."""
    signature = {"x_ptr": "*bf16", "weight_ptr": "*bf16", "ends_ptr": "*i64", "out_ptr": "*bf16"}
    numbers = ("num_experts", "num_columns", "num_channels", "stride_x", "stride_expert", "stride_weight", "stride_out")
    return [
        spec(
            _grouped_matmul_kernel,
            f"grouped_matmul {rows} rows x{experts}",
            {**signature, **dict.fromkeys(numbers, "i32")},
            constexprs={
                "EXPERTS": triton.next_power_of_2(experts),
                "BLOCK_M": rows,
                "BLOCK_N": BLOCK_N,
                "BLOCK_K": BLOCK_K,
            },
            aligned=("num_experts", "num_columns", "num_channels"),
            num_stages=2,
            has_dot=True,
        )
        for rows, experts in ((16, 256), (64, 256), (16, 384))
    ]
