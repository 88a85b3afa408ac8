"""The first half of the output projection: one matrix per group of heads (attention spec 4.11 and 6.5)."""

from __future__ import annotations

import torch

from dsv4dist.errors import ShapeError, UnsupportedError
from dsv4dist.kernels import fp8
from dsv4dist.kernels.paged_cache import Fp8Format

AMAX_FLOOR = 1e-8  # of the power-of-two quantiser of this operation (spec 8.5)


def exponent_scales(scale: torch.Tensor) -> torch.Tensor:
    """uint8 e8m0 bytes of block scales given as e8m0, bytes or floats; nothing is rounded (spec 6.5).

    Raises: UnsupportedError for floats that are not powers of two from 2^-127 to 2^127, and for other dtypes: such a
    weight takes the bf16 product.
    """
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return fp8.scale_bytes(scale).contiguous()
    if not scale.is_floating_point():
        raise UnsupportedError(f"block scales of {scale.dtype} have no meaning as exponents; use e8m0, uint8 or floats")
    if scale.dtype == torch.float64 and not torch.equal(scale.float().double(), scale):
        raise UnsupportedError("float64 block scales that fp32 cannot hold are not powers of two in its range")
    return fp8.encode_scale_byte(scale)


def quantise_groups_of_128(x: torch.Tensor, fp8_format: Fp8Format = Fp8Format.OCP) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise the last dimension of `x` [T, g, in], float, per 128 channels with power-of-two scales (spec 8.5).

    Returns data [T, g, in] in the encoding's dtype and e8m0 bytes [T, g, in / 128], uint8: 2^ceil(log2(amax / max)),
    255 (NaN) with codes 0 for a group that is not finite.
    """
    groups = x.float().unflatten(-1, (-1, fp8.WEIGHT_BLOCK))
    byte = fp8.scale_byte_of(groups.abs().amax(-1).clamp_min(AMAX_FLOOR), fp8_format.quant_max)
    inverse = fp8.decode_scale_byte(254 - byte.clamp_max(254)).unsqueeze(-1)
    scaled = (groups * inverse).masked_fill((byte == fp8.NAN_SCALE_BYTE).unsqueeze(-1), 0.0)
    return fp8.encode_fp8(scaled, fp8_format).flatten(-2).view(fp8_format.torch_dtype), byte


def grouped_wo_a(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    *,
    fp8_format: Fp8Format = Fp8Format.OCP,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """z[t, group, r] = sum over i of x[t, group, i] * weight[group, r, i], accumulated in fp32 (spec 4.11).

        x        [T, g, in] float; or fp8 with x_scale, e8m0 [T, g, in / 128], as `quantise_groups_of_128` returns them
        weight   [g, Lo, in], float with scale None; or fp8 with scale e8m0 [g, Lo / 128, in / 128] (spec 6.5)
    Returns [T, g * Lo] in out_dtype, by default x's dtype, or bf16 for an fp8 x.
    Raises: ShapeError when fp8 weights are not made of whole 128 x 128 blocks.
    """
    out_dtype = out_dtype or (x.dtype if x.dtype.itemsize > 1 else torch.bfloat16)
    if scale is None:
        return torch.einsum("tgi,gri->tgr", x.float(), weight.float()).flatten(1).to(out_dtype)
    groups, rows, channels = weight.shape
    expected = (groups, rows // fp8.WEIGHT_BLOCK, channels // fp8.WEIGHT_BLOCK)
    if rows % fp8.WEIGHT_BLOCK or channels % fp8.WEIGHT_BLOCK or scale.shape != expected:
        raise ShapeError("scale of wo_a, one per whole 128 x 128 block", list(expected), list(scale.shape))
    x8, x_bytes = (x, x_scale) if x_scale is not None else quantise_groups_of_128(x, fp8_format)
    factor = fp8.decode_scale_byte(exponent_scales(scale)).repeat_interleave(fp8.WEIGHT_BLOCK, 1)
    values = fp8.decode_fp8(x8, fp8_format).unflatten(-1, (-1, fp8.WEIGHT_BLOCK))
    blocks = fp8.decode_fp8(weight, fp8_format).unflatten(-1, (-1, fp8.WEIGHT_BLOCK)) * factor.unsqueeze(-1)
    scaled = values * fp8.decode_scale_byte(x_bytes).unsqueeze(-1)
    return torch.einsum("tgbi,grbi->tgr", scaled, blocks).flatten(1).to(out_dtype)
