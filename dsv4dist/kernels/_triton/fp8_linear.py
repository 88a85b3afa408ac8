"""Linear layers over block-scaled fp8 weights: the token quantiser and the product (attention spec 6.2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from dsv4dist.errors import ShapeError
from dsv4dist.kernels._triton import hopper_linear
from dsv4dist.kernels._triton.block_matmul import (
    FP32_SCALE,
    ROW_COUNTS,
    SCALE_BLOCK,
    UNSCALED,
    Operand,
    arch_traits,
    block_matmul,
    matmul_specs,
)
from dsv4dist.kernels._triton.checks import FLOATS, check_rows
from dsv4dist.kernels._triton.compile_spec import CompileSpec, archs_of, spec
from dsv4dist.kernels._triton.early_launch import early_launch, wait_for_previous
from dsv4dist.kernels._triton.quantise import decode_scale, encode_e4m3, magnitude
from dsv4dist.kernels._triton.vector import vector_product
from dsv4dist.kernels.fp8 import decode_scale_byte
from dsv4dist.kernels.paged_cache import Fp8Format
from dsv4dist.kernels.reference.norm_quantise import ACT_FLOOR, ACT_GROUP

GROUPS_PER_PROGRAM = 8
FEW_ROWS, FEW_ROWS_IN_GROUPS = 128, 512
"""Rows up to which a product takes as long as reading its weight; groups have a product each, or one launch for all."""
MANY_COLUMNS = 2048
"""With more columns half as many rows count as few: a library's tiles then fill the device."""
_GROUP = tl.constexpr(ACT_GROUP)
_INFINITY = tl.constexpr(0x7F800000)
_BYTE_DTYPES = (torch.uint8, torch.float8_e8m0fnu)


@triton.jit
def _quantise_tokens_kernel(x_ptr, data_ptr, scale_ptr, num_rows, num_channels, floor, stride_x, stride_data,
                            stride_scale_row, stride_scale_group, QUANT_MAX: tl.constexpr, POWER: tl.constexpr,
                            ROWS: tl.constexpr, GROUPS: tl.constexpr):  # fmt: skip
    """ROWS rows by GROUPS groups. POWER: scales are powers of two, stored as e8m0 bytes; otherwise fp32, amax / max."""
    wait_for_previous()
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None, None]
    group = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS))[None, :, None]
    channel = group * _GROUP + tl.arange(0, _GROUP)[None, None, :]
    inside = (row < num_rows) & (channel < num_channels)
    x = tl.load(x_ptr + row * stride_x + channel, mask=inside, other=0.0).to(tl.float32)
    top = tl.max(magnitude(x), 2)
    finite = top < _INFINITY
    amax = tl.maximum(top.to(tl.float32, bitcast=True), floor)
    if POWER:
        exponent = ((magnitude(amax) + 0x1FFFFF) >> 23) - (7 if QUANT_MAX == 224 else 8)
        exponent = tl.maximum(exponent, 0)
        stored = tl.where(finite, exponent, 255)
        x = x * decode_scale(tl.where(finite, 254 - exponent, 127))[:, :, None]
    else:
        scale = tl.div_rn(amax, tl.full((ROWS, GROUPS), QUANT_MAX, tl.float32))
        stored = tl.where(finite, scale, float("nan"))
        divisor = tl.where(finite, scale, 1.0)[:, :, None]
        x = tl.div_rn(x, tl.broadcast_to(divisor, (ROWS, GROUPS, _GROUP)))
    # The limit is reached by rounding alone: |x| <= amax. A group that is not finite is its scale's business.
    code = encode_e4m3(tl.where(finite[:, :, None], x, 0.0), QUANT_MAX == 224)
    tl.store(data_ptr + row * stride_data + channel, code, mask=inside)
    first = tl.reshape(row, (ROWS, 1))
    which = tl.reshape(group, (1, GROUPS))
    scale_at = scale_ptr + first * stride_scale_row + which.to(tl.int64) * stride_scale_group
    stored_ok = (first < num_rows) & (which * _GROUP < num_channels)
    tl.store(scale_at, stored.to(scale_ptr.dtype.element_ty), mask=stored_ok)


def quantise_tokens(x: torch.Tensor, fp8_format: Fp8Format = Fp8Format.OCP) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row of `x` [M, K], float, in groups of 128 channels with ordinary fp32 scales (spec 6.2).

    Returns data [M, K] in the encoding's dtype and fp32 scales [M, ceil(K / 128)] = max(amax, 1e-10) / quant_max, whose
    memory is column-major. A group with a number that is not finite gets scale NaN and codes 0.  Raises: ShapeError.
    """
    check_rows("x", x, (None, None))
    rows, channels = x.shape
    data = torch.empty((rows, channels), dtype=fp8_format.torch_dtype, device=x.device)
    scale = torch.empty((triton.cdiv(channels, ACT_GROUP), rows), dtype=torch.float32, device=x.device).T
    quantise_rows(x, data, scale, ACT_FLOOR, fp8_format)
    return data, scale


def quantise_rows(
    x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, floor: float, fp8_format: Fp8Format
) -> None:
    """Write `data` [M, K] fp8 and `scale` [M, ceil(K / 128)], fp32, or e8m0 as uint8, of `x` [M, K]."""
    rows, channels = x.shape
    if rows == 0 or channels == 0:
        return
    per_program = _rows_per_program(rows)
    grid = (triton.cdiv(rows, per_program), triton.cdiv(channels, ACT_GROUP * GROUPS_PER_PROGRAM))
    _quantise_tokens_kernel[grid](
        x, data.view(torch.uint8), scale, rows, channels, floor, x.stride(0), data.stride(0), *scale.stride(),
        QUANT_MAX=int(fp8_format.quant_max), POWER=scale.dtype == torch.uint8, ROWS=per_program,
        GROUPS=GROUPS_PER_PROGRAM, num_warps=_warps(per_program), **early_launch(x.device),
    )  # fmt: skip


def _rows_per_program(rows: int) -> int:
    """Few rows are spread over many units."""
    return 1 if rows < 512 else 4


def _warps(rows_per_program: int) -> int:
    """At least 8 channels a thread, also where a warp has 64: one load of 16 bytes."""
    return min(4, 2 * rows_per_program)


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    x_scale: torch.Tensor | None = None,
    *,
    fp8_format: Fp8Format = Fp8Format.OCP,
    out_dtype: torch.dtype = torch.bfloat16,
    num_splits: int | None = None,
) -> torch.Tensor:
    """y = x . weight^T with x quantised per token and 128 channels, both scales applied per block of 128 channels.

        x             [M, K] float, any row stride; or the encoding's dtype, quantised, with x_scale fp32 [M, ceil(K/128)]
        weight        [N, K] of the encoding, unit stride in K; on GPUs whose matrix unit knows only the other encoding
                      it is decoded at every use: convert it once after loading (`fp8.ocp_to_fnuz`)
        weight_scale  [ceil(N / 128), ceil(K / 128)] fp32 or e8m0; it multiplies
        num_splits    shares of K that different programs sum; planned from sizes if None
    Returns [M, N] in out_dtype, accumulated in fp32 (spec 6.2). The weight may be a view of a larger one that begins at
    a block border.  Capture: launches depend on sizes only.  Raises: ShapeError.
    """
    _check(x, weight, weight_scale, x_scale, fp8_format, out_dtype)
    rows, columns = x.shape[0], weight.shape[0]
    if x_scale is None and rows > _few_rows(weight) and _library_has(weight, out_dtype):
        return _library_product(x, weight, weight_scale, fp8_format, out_dtype)
    out = torch.empty((rows, columns), dtype=out_dtype, device=x.device)
    if rows == 0 or columns == 0:
        return out
    data, scale = (x, x_scale) if x_scale is not None else quantise_tokens(x, fp8_format)
    if weight_scale.dtype == torch.float8_e8m0fnu:
        weight_scale = weight_scale.view(torch.uint8)
    block_matmul(
        Operand(data.unsqueeze(0), scale.unsqueeze(0)),
        Operand(weight.unsqueeze(0), weight_scale.unsqueeze(0)),
        out.unsqueeze(0),
        fp8_format,
        num_splits,
    )
    return out


def _few_rows(weight: torch.Tensor) -> int:
    return FEW_ROWS if weight.shape[0] <= MANY_COLUMNS else FEW_ROWS // 2


def _library_has(weight: torch.Tensor, out_dtype: torch.dtype) -> bool:
    """Whether torch has the block-scaled product for this weight: on Hopper, for whole blocks in fours of K."""
    if weight.device.type != "cuda" or torch.version.hip is not None or not hasattr(F, "scaled_mm"):
        return False
    whole = weight.shape[0] % SCALE_BLOCK == 0 and weight.shape[1] % (4 * SCALE_BLOCK) == 0
    return whole and out_dtype == torch.bfloat16 and torch.cuda.get_device_capability(weight.device) == (9, 0)


def _library_product(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, fp8_format: Fp8Format, out_dtype: torch.dtype
) -> torch.Tensor:
    """The same product by torch, whose kernel takes multiples of 4 rows: what the spare rows hold goes nowhere."""
    rows, channels = x.shape
    padded = -(-rows // 4) * 4
    data = torch.empty((padded, channels), dtype=fp8_format.torch_dtype, device=x.device)
    scale = torch.empty((channels // ACT_GROUP, padded), dtype=torch.float32, device=x.device).T
    quantise_rows(x, data[:rows], scale[:rows], ACT_FLOOR, fp8_format)
    by_block = weight_scale if weight_scale.dtype == torch.float32 else decode_scale_byte(weight_scale)
    kind = F.ScalingType
    out = F.scaled_mm(
        data, weight.T, scale, kind.BlockWise1x128, by_block.T, kind.BlockWise128x128, output_dtype=out_dtype
    )
    return out[:rows]


def fp8_weight_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    fp8_format: Fp8Format = Fp8Format.OCP,
    *,
    num_splits: int | None = None,
) -> torch.Tensor:
    """y[t, group] = weight[group] . x[t, group] over fp8 weights, with x as it is; accumulated in fp32.

        x             [T, g, K] float, any strides but unit in K
        weight        [g, N, K] of the encoding, unit stride in K; weight_scale [g, ceil(N / 128), ceil(K / 128)] fp32 or
                      e8m0; it multiplies
    Returns [T, g, N] in x's dtype. Few rows (see FEW_ROWS, MANY_COLUMNS) are multiplied in x's type: nothing is gained by
    rounding x to fp8 (spec 6.2) while reading the weight is what takes the time. More rows of a 16-bit x are quantised,
    as by `fp8_linear`.
    Capture: launches depend on sizes only.  Raises: ShapeError.
    """
    check_rows("x", x, (None, weight.shape[0], weight.shape[2]))
    for group in range(min(1, weight.shape[0])):
        _check(x[:, group], weight[group], weight_scale[group], None, fp8_format, x.dtype)
    if len(weight_scale) != len(weight):
        raise ShapeError("weight_scale", f"{len(weight)} groups", len(weight_scale))
    quantised = {"fp8_format": fp8_format, "out_dtype": x.dtype}
    if len(weight) == 1 and x.shape[0] > _few_rows(weight[0]) and x.dtype.itemsize == 2:
        return fp8_linear(x[:, 0], weight[0], weight_scale[0], **quantised).unsqueeze(1)
    out = torch.empty((x.shape[0], *weight.shape[:2]), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    if x.shape[0] > FEW_ROWS_IN_GROUPS and x.dtype.itemsize == 2:
        for group in range(len(weight)):
            out[:, group] = fp8_linear(x[:, group], weight[group], weight_scale[group], **quantised)
        return out
    if len(x) == 1 and weight_scale.dtype == torch.float32:
        vector_product(x[0], weight, weight_scale, out[0], fp8_format)
        return out
    arch = arch_traits(x.device)
    if arch.name == "sm90" and fp8_format is Fp8Format.OCP and hopper_linear.takes(x, weight, weight_scale):
        hopper_linear.hopper_linear(x, weight, weight_scale, out, arch.compute_units, num_splits)
        return out
    if weight_scale.dtype == torch.float8_e8m0fnu:
        weight_scale = weight_scale.view(torch.uint8)
    block_matmul(Operand(x.transpose(0, 1)), Operand(weight, weight_scale), out.transpose(0, 1), fp8_format, num_splits)
    return out


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    x_scale: torch.Tensor | None,
    fp8_format: Fp8Format,
    out_dtype: torch.dtype,
) -> None:
    if weight.dim() != 2 or weight.dtype != fp8_format.torch_dtype or weight.stride(1) != 1:
        found = f"{weight.dtype} {list(weight.shape)}"
        raise ShapeError(
            "weight of an fp8 linear", f"{fp8_format.torch_dtype} in two dimensions, adjacent channels", found
        )
    columns, channels = weight.shape
    blocks = [triton.cdiv(columns, SCALE_BLOCK), triton.cdiv(channels, SCALE_BLOCK)]
    if list(weight_scale.shape) != blocks or weight_scale.dtype not in (torch.float32, *_BYTE_DTYPES):
        raise ShapeError("weight_scale", f"fp32 or e8m0 {blocks}", f"{weight_scale.dtype} {list(weight_scale.shape)}")
    if x_scale is None:
        check_rows("x", x, (None, channels))
    elif x.dtype != fp8_format.torch_dtype or x.shape[1:] != (channels,) or x.stride(1) != 1:
        raise ShapeError("quantised x", f"{fp8_format.torch_dtype} [rows, {channels}]", f"{x.dtype} {list(x.shape)}")
    elif x_scale.dtype != torch.float32 or list(x_scale.shape) != [x.shape[0], blocks[1]]:
        raise ShapeError("x_scale", f"fp32 {[x.shape[0], blocks[1]]}", f"{x_scale.dtype} {list(x_scale.shape)}")
    if out_dtype not in FLOATS:
        raise ShapeError("out_dtype", "bfloat16, float16 or float32", out_dtype)


def compile_specs() -> list[CompileSpec]:
    """The token quantiser, and Flash's wo_b; other projections compile to the same."""
    return [
        *quantiser_specs("quantise_tokens", power=False),
        *matmul_specs("fp8_linear", 1, 4096, 8192, FP32_SCALE, FP32_SCALE),
        *matmul_specs("fp8_linear decoding", 1, 4096, 8192, FP32_SCALE, FP32_SCALE, decoded=True),
        *matmul_specs(
            "fp8_weight_linear", 1, 4096, 8192, UNSCALED, FP32_SCALE, row_counts=(2, FEW_ROWS // 2, FEW_ROWS)
        ),
    ]


def quantiser_specs(name: str, power: bool) -> list[CompileSpec]:
    """`quantise_rows` of bf16 in both encodings, with `ROW_COUNTS` rows; power: scales are e8m0 bytes, else fp32."""
    specs = []
    for fp8_format in Fp8Format:
        for rows in sorted({_rows_per_program(count) for count in ROW_COUNTS}):
            one = "stride_scale_group" if power else "stride_scale_row"
            signature = {
                "x_ptr": "*bf16", "data_ptr": "*u8", "scale_ptr": "*u8" if power else "*fp32", "num_rows": "i32",
                "num_channels": "i32", "floor": "fp32", "stride_x": "i32", "stride_data": "i32",
                "stride_scale_row": "i32", "stride_scale_group": "i32",
            }  # fmt: skip
            del signature[one]
            values = {one: 1, "QUANT_MAX": int(fp8_format.quant_max), "POWER": power, "ROWS": rows,
                      "GROUPS": GROUPS_PER_PROGRAM}  # fmt: skip
            specs.append(spec(
                _quantise_tokens_kernel, f"{name} {fp8_format.value} x{rows}", signature, constexprs=values,
                unaligned=("stride_scale_group",), aligned=("num_channels",),
                num_warps=_warps(rows), archs=archs_of(fp8_format),
            ))  # fmt: skip
    return specs
