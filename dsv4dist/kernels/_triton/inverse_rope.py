"""Rotating attention output back, in place, in Triton (attention spec 4.10)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4dist.kernels._triton.checks import check_rotary, check_rows
from dsv4dist.kernels._triton.compile_spec import CompileSpec, spec
from dsv4dist.kernels._triton.early_launch import early_launch, wait_for_previous
from dsv4dist.kernels._triton.quantise import cast, rotate_rows, split_rows


@triton.jit
def _inverse_rope_kernel(
    x_ptr, positions_ptr, cos_sin_ptr, stride_token, stride_head, stride_table, num_rows, num_heads, num_positions,
    NOPE: tl.constexpr, ROTARY: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ONE_TOKEN: tl.constexpr,
):  # fmt: skip
    """One program: the rotary channels of ROWS (token, head) rows; the others are not touched."""
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK)
    present = row < num_rows
    token, head = split_rows(tl.program_id(0).to(tl.int64) * ROWS, num_heads, ROWS, ONE_TOKEN)
    position = tl.load(positions_ptr + token, mask=token * num_heads < num_rows, other=0)
    row_ptr = x_ptr + token * stride_token + head * stride_head + NOPE
    tile_ptr = row_ptr[:, None] + channel[None, :]
    mask = present[:, None] & (channel < ROTARY)[None, :]
    x = tl.load(tile_ptr, mask=mask, other=0.0).to(tl.float32)
    x = rotate_rows(x, cos_sin_ptr, position, stride_table, num_positions, ROTARY, ROTARY, True)
    tl.store(tile_ptr, cast(x, x_ptr.dtype.element_ty), mask=mask)


def inverse_rope(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Undo the rotation of the last channels of every row by its token's position, in place (spec 4.10); fp32 inside.

        x          [T, h, D] float, channels adjacent; the channels before the rotary ones keep their bits
        positions  [T] int32 or int64; cos_sin [P, rotary width] fp32
    Capture: the launch depends on sizes only.  Raises: ShapeError.
    """
    check_rows("x", x, (None, None, None))
    num_tokens, num_heads, width = x.shape
    check_rotary(width, positions, cos_sin, num_tokens)
    if num_tokens * num_heads == 0:
        return
    rotary = cos_sin.shape[1]
    rows = _rows_per_program(num_tokens * num_heads)
    _inverse_rope_kernel[(triton.cdiv(num_tokens * num_heads, rows),)](
        x, positions, cos_sin, x.stride(0), x.stride(1), cos_sin.stride(0), num_tokens * num_heads, num_heads,
        cos_sin.shape[0], NOPE=width - rotary, ROTARY=rotary, BLOCK=triton.next_power_of_2(rotary), ROWS=rows, ONE_TOKEN=num_heads % rows == 0,
        num_warps=1 if rows == 4 else 4, enable_fp_fusion=False, **early_launch(x.device),
    )  # fmt: skip


def _rows_per_program(num_rows: int) -> int:
    """Few rows: a warp for four of them, over many units; many rows: 32, so that loads are in flight."""
    return 4 if num_rows < 4096 else 32


def compile_specs() -> list[CompileSpec]:
    """Head dimension 512 with 64 rotary channels, few rows and many."""
    signature = {
        "x_ptr": "*bf16", "positions_ptr": "*i64", "cos_sin_ptr": "*fp32", "stride_token": "i32", "stride_head": "i32",
        "stride_table": "i32", "num_rows": "i32", "num_heads": "i32", "num_positions": "i32",
    }  # fmt: skip
    return [
        spec(_inverse_rope_kernel, f"inverse_rope x{rows}", signature, num_warps=1 if rows == 4 else 4,
             constexprs={"NOPE": 448, "ROTARY": 64, "BLOCK": 64, "ROWS": rows, "ONE_TOKEN": True}, options={"enable_fp_fusion": False},
             narrow_because="4 rows of 64 channels are 8 bytes a lane" if rows == 4 else "")
        for rows in (4, 32)
    ]  # fmt: skip
