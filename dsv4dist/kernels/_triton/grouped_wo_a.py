"""The first half of the output projection: one matrix per group of heads (attention spec 4.11 and 6.5)."""

from __future__ import annotations

import torch

from dsv4dist.errors import ShapeError
from dsv4dist.kernels._triton.block_matmul import (
    BYTE_SCALE,
    SCALE_BLOCK,
    UNSCALED,
    Operand,
    block_matmul,
    matmul_specs,
)
from dsv4dist.kernels._triton.checks import FLOATS, check_rows
from dsv4dist.kernels._triton.compile_spec import CompileSpec
from dsv4dist.kernels._triton.fp8_linear import quantise_rows, quantiser_specs
from dsv4dist.kernels.fp8 import scale_bytes
from dsv4dist.kernels.paged_cache import Fp8Format
from dsv4dist.kernels.reference.grouped_wo_a import AMAX_FLOOR, exponent_scales

__all__ = ["exponent_scales", "grouped_wo_a", "quantise_groups_of_128"]


def quantise_groups_of_128(x: torch.Tensor, fp8_format: Fp8Format = Fp8Format.OCP) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise the last dimension of `x` [T, g, in], float, per 128 channels with power-of-two scales (spec 8.5).

    in a multiple of 128; the rows [T, g] must lie at one stride, as in a view of attention's output. Returns data
    [T, g, in] in the encoding's dtype and e8m0 bytes [T, g, in / 128] as uint8: 2^ceil(log2(max(amax, 1e-8) / max)),
    255 (NaN) with codes 0 for a group that is not finite.  Raises: ShapeError.
    """
    check_rows("x of wo_a", x, (None, None, None))
    tokens, groups, channels = x.shape
    if channels % SCALE_BLOCK:
        raise ShapeError("channels of wo_a to quantise", f"a multiple of {SCALE_BLOCK}", channels)
    rows = x.flatten(0, 1) if x.stride(0) == groups * x.stride(1) or tokens < 2 else x.reshape(-1, channels)
    data = torch.empty((tokens * groups, channels), dtype=fp8_format.torch_dtype, device=x.device)
    scale = torch.empty((tokens * groups, channels // SCALE_BLOCK), dtype=torch.uint8, device=x.device)
    quantise_rows(rows, data, scale, AMAX_FLOOR, fp8_format)
    return data.view(x.shape), scale.view(tokens, groups, -1)


def grouped_wo_a(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    *,
    fp8_format: Fp8Format = Fp8Format.OCP,
    out_dtype: torch.dtype | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """z[t, group, r] = sum over i of x[t, group, i] * weight[group, r, i], accumulated in fp32 (spec 4.11).

        x        [T, g, in] float, any strides but unit in `in`; or fp8 with x_scale, e8m0 [T, g, in / 128], as
                 `quantise_groups_of_128` returns them
        weight   [g, Lo, in], float of x's dtype with scale None; or fp8 with scale [g, Lo / 128, in / 128]: e8m0, or
                 floats that are powers of two (spec 6.5; convert them once after loading with `exponent_scales`,
                 which reads them back from the device)
    Returns [T, g * Lo] in out_dtype, by default x's dtype, or bf16 for an fp8 x.
    Capture: launches depend on sizes only.  Raises: ShapeError; UnsupportedError for scales that e8m0 cannot hold.
    """
    out_dtype = out_dtype or (x.dtype if x.dtype.itemsize > 1 else torch.bfloat16)
    _check(x, weight, scale, x_scale, fp8_format, out_dtype)
    tokens, groups, rows = x.shape[0], weight.shape[0], weight.shape[1]
    out = torch.empty((tokens, groups * rows), dtype=out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    target = out.view(tokens, groups, rows).transpose(0, 1)
    if scale is None:
        block_matmul(Operand(x.transpose(0, 1)), Operand(weight), target, None, num_splits)
        return out
    data, data_scale = (x, scale_bytes(x_scale)) if x_scale is not None else quantise_groups_of_128(x, fp8_format)
    block_matmul(
        Operand(data.transpose(0, 1), data_scale.transpose(0, 1)),
        Operand(weight, exponent_scales(scale)),
        target,
        fp8_format,
        num_splits,
    )
    return out


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    fp8_format: Fp8Format,
    out_dtype: torch.dtype,
) -> None:
    if weight.dim() != 3 or weight.stride(2) != 1:
        raise ShapeError("weight of wo_a", "[groups, rows, channels], adjacent channels", list(weight.shape))
    groups, rows, channels = weight.shape
    if out_dtype not in FLOATS:
        raise ShapeError("out_dtype", "bfloat16, float16 or float32", out_dtype)
    if scale is None:
        check_rows("x of wo_a", x, (None, groups, channels))
        if weight.dtype != x.dtype:
            raise ShapeError("weight of wo_a", f"x's dtype, {x.dtype}, or fp8 with a scale", weight.dtype)
        return
    blocks = (groups, rows // SCALE_BLOCK, channels // SCALE_BLOCK)
    if rows % SCALE_BLOCK or channels % SCALE_BLOCK or scale.shape != blocks:
        raise ShapeError("scale of wo_a, one per whole 128 x 128 block", list(blocks), list(scale.shape))
    if weight.dtype != fp8_format.torch_dtype:
        raise ShapeError("weight of wo_a with a scale", fp8_format.torch_dtype, weight.dtype)
    if x_scale is None:
        check_rows("x of wo_a", x, (None, groups, channels))
    elif x.dtype != fp8_format.torch_dtype or x.shape[1:] != (groups, channels) or x.stride(2) != 1:
        raise ShapeError("quantised x of wo_a", f"{fp8_format.torch_dtype} [T, {groups}, {channels}]", list(x.shape))
    elif x_scale.shape != (x.shape[0], groups, channels // SCALE_BLOCK):
        raise ShapeError("x_scale", [x.shape[0], groups, channels // SCALE_BLOCK], list(x_scale.shape))


def compile_specs() -> list[CompileSpec]:
    """One of Flash's and Pro's groups (8 heads of 512, 1024 rows), as a rank of TP 8 or 16 has it: fp8 and bf16."""
    return [
        *quantiser_specs("quantise_groups", power=True),
        *matmul_specs("grouped_wo_a fp8", 1, 1024, 4096, BYTE_SCALE, BYTE_SCALE),
        *matmul_specs("grouped_wo_a bf16", 1, 1024, 4096, UNSCALED, UNSCALED),
    ]
