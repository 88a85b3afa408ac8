"""One row times a weight, in fp8 or 16 bits: what every projection of a single decode token is.

The weights are all that costs. A program streams whole rows of them through registers, in loads that are all under way
at once, and adds up in fp32; there are no partial results to merge.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4dist.kernels._triton.block_matmul import FORMATS, SCALE_BLOCK, arch_traits, load_operand
from dsv4dist.kernels._triton.compile_spec import CompileSpec, archs_of, spec
from dsv4dist.kernels._triton.early_launch import early_launch, wait_for_previous
from dsv4dist.kernels._triton.quantise import cast
from dsv4dist.kernels.paged_cache import Fp8Format
from dsv4dist.kernels.reference import vector as reference

MAX_CHANNELS = 4096
"""Channels that a program holds at once."""
TILE, LARGE_TILE, MANY_COLUMNS = 16384, 32768, 4096
"""Bytes of weights that a program holds at once: the larger tile where there are so many columns that programs abound."""
EARLY_PROGRAMS = 512
"""Up to so many programs all find a place at once, and gain from asking for weights early; others lose by it."""
_SCALE_BLOCK = tl.constexpr(SCALE_BLOCK)


@triton.jit
def _vector_kernel(
    x_ptr, weight_ptr, scale_ptr, out_ptr, num_columns, num_channels, stride_x_group, stride_group, stride_row,
    stride_scale_group, stride_scale_row, stride_out_group, FORMAT: tl.constexpr, STORED: tl.constexpr,
    COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, ONCE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """COLUMNS outputs of one group, which divide 128 and so share their scales. ONCE: CHANNELS are all channels.

    EARLY: weights are asked for before the kernel ahead of this one is known to have ended.
    """
    if not EARLY:
        wait_for_previous()
    first = tl.program_id(0) * COLUMNS
    group = tl.program_id(1).to(tl.int64)
    column = first + tl.arange(0, COLUMNS)
    column_ok = column < num_columns
    rows = weight_ptr + group * stride_group + column.to(tl.int64)[:, None] * stride_row
    x_row = x_ptr + group * stride_x_group
    total = tl.zeros((COLUMNS,), tl.float32)
    for begin in range(0, 1 if ONCE else num_channels, CHANNELS):
        channel = begin + tl.arange(0, CHANNELS)
        inside = channel < num_channels
        at = rows + channel[None, :]
        mask = column_ok[:, None] & inside[None, :]
        weight = load_operand(at, mask, FORMAT, STORED, tl.float32)
        if EARLY:
            wait_for_previous()  # not before: nothing writes the weight
        x = tl.load(x_row + channel, mask=inside, other=0.0).to(tl.float32)
        if scale_ptr is not None:
            scales = scale_ptr + group * stride_scale_group + (first // _SCALE_BLOCK).to(tl.int64) * stride_scale_row
            x *= tl.load(scales + channel // _SCALE_BLOCK, mask=inside, other=0.0)
        total += tl.sum(weight * x[None, :], 1)
    out = out_ptr + group * stride_out_group + column
    tl.store(out, cast(total, out_ptr.dtype.element_ty), mask=column_ok)


def vector_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    out: torch.Tensor,
    fp8_format: Fp8Format | None = None,
) -> None:
    """out[group] = weight[group] . x[group], accumulated in fp32, with one scale per 128 x 128 weights if they are fp8.

        x       [g, K] float, unit stride in K
        weight  [g, N, K] of the encoding, or 16-bit floats, unit stride in K
        scale   [g, ceil(N / 128), ceil(K / 128)] fp32, unit stride; None for floats
        out     [g, N] any float dtype, unit stride in N, written
    Capture: the launch depends on sizes only.
    """
    groups, columns, channels = weight.shape
    data = weight if fp8_format is None else weight.view(torch.uint8)
    arch = arch_traits(x.device)
    native = None if arch.name == "cpu" else arch.fp8_format  # the interpreter is slow at fp8
    constants = _constants(groups, columns, channels, native, fp8_format)
    scale_strides = (0, 0) if scale is None else (scale.stride(0), scale.stride(1))
    _vector_kernel[(triton.cdiv(columns, constants["COLUMNS"]), groups)](
        x, data, scale, out, columns, channels, x.stride(0), data.stride(0), data.stride(1), *scale_strides,
        out.stride(0), **constants, num_warps=4, **early_launch(x.device),
    )  # fmt: skip


def product_in_fp32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, K] times weight [N, K], floats of one dtype, accumulated and returned in fp32 [T, N] (spec 1.5).

    Capture: launches depend on sizes only.
    """
    if len(x) == 1 and x.dtype.itemsize == 2:
        out = torch.empty((1, len(weight)), dtype=torch.float32, device=x.device)
        vector_product(x, weight.unsqueeze(0), None, out)
        return out
    return reference.product_in_fp32(x, weight)


def _constants(
    groups: int, columns: int, channels: int, native: Fp8Format | None, fp8_format: Fp8Format | None
) -> dict[str, object]:
    depth = min(MAX_CHANNELS, triton.next_power_of_2(channels))
    tile = LARGE_TILE if groups * columns >= MANY_COLUMNS else TILE
    tile = tile if fp8_format else tile // 2
    stored = tl.float8e4nv if fp8_format is Fp8Format.OCP else tl.float8e4b8
    width = max(1, min(16, tile // depth))
    once = channels <= depth
    return {
        "FORMAT": FORMATS[fp8_format],
        "STORED": stored if fp8_format and fp8_format is native else None,
        "COLUMNS": width,
        "CHANNELS": depth,
        "ONCE": once,
        "EARLY": once and groups * triton.cdiv(columns, width) <= EARLY_PROGRAMS,
    }


def compile_specs() -> list[CompileSpec]:
    """Projections of Flash: few and many columns, whole rows at once and in parts; fp8, and its compressors' in bf16."""
    fp8 = [(fp8_format, shape) for fp8_format in Fp8Format for shape in ((1536, 4096), (32768, 1024), (4096, 8192))]
    return [_spec(*one) for one in fp8] + [_spec(None, (columns, 4096)) for columns in (512, 2048)]


def _spec(fp8_format: Fp8Format | None, shape: tuple[int, int]) -> CompileSpec:
    columns, channels = shape
    numbers = ["num_columns", "num_channels", "stride_x_group", "stride_group", "stride_row", "stride_out_group"]
    signature = {"x_ptr": "*bf16", "weight_ptr": "*u8", "scale_ptr": "*fp32", "out_ptr": "*bf16"}
    constants = _constants(1, columns, channels, fp8_format, fp8_format)
    if fp8_format is None:
        signature = {"x_ptr": "*bf16", "weight_ptr": "*bf16", "out_ptr": "*fp32"}
        constants["scale_ptr"] = None
    numbers += ["stride_scale_group", "stride_scale_row"]
    return spec(
        _vector_kernel,
        f"vector {columns}x{channels} {fp8_format.value if fp8_format else 'bf16'}",
        {**signature, **dict.fromkeys(numbers, "i32")},
        constexprs=constants,
        unaligned=("stride_scale_group", "stride_scale_row") if fp8_format else (),
        aligned=("num_columns", "num_channels"),
        archs=archs_of(fp8_format) if fp8_format else (),
    )
