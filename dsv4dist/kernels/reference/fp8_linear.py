"""Linear layers whose weight is fp8 with one scale per 128 x 128 block (attention spec 6.2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dsv4dist.kernels import fp8
from dsv4dist.kernels.paged_cache import Fp8Format
from dsv4dist.kernels.reference.norm_quantise import ACT_FLOOR, ACT_GROUP


def quantise_tokens(x: torch.Tensor, fp8_format: Fp8Format = Fp8Format.OCP) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row of `x` [M, K], float, in groups of 128 channels with ordinary fp32 scales (spec 6.2).

    Returns data [M, K] in the encoding's dtype and fp32 scales [M, ceil(K / 128)] = max(amax, 1e-10) / quant_max. A
    group with a number that is not finite gets scale NaN and codes 0.
    """
    rows, channels = x.shape
    groups = -(-channels // ACT_GROUP)
    padded = F.pad(x.float(), (0, groups * ACT_GROUP - channels)).view(rows, groups, ACT_GROUP)
    amax = padded.abs().amax(-1)
    limit = torch.tensor(fp8_format.quant_max, device=x.device)  # a tensor: division by a number is not exact on GPUs
    scale = (amax.clamp_min(ACT_FLOOR) / limit).where(amax.isfinite(), torch.full_like(amax, float("nan")))
    ratio = (padded / scale.unsqueeze(-1)).nan_to_num(nan=0.0)
    data = fp8.encode_fp8(ratio, fp8_format).flatten(1)[:, :channels]
    return data.contiguous().view(fp8_format.torch_dtype), scale


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    x_scale: torch.Tensor | None = None,
    *,
    fp8_format: Fp8Format = Fp8Format.OCP,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """y = x . weight^T with x quantised per token and 128 channels, both scales applied per block of 128 channels.

        x             [M, K] float; or the encoding's dtype, already quantised, with x_scale fp32 [M, ceil(K / 128)]
        weight        [N, K] of the encoding; weight_scale [ceil(N / 128), ceil(K / 128)] fp32 or e8m0; it multiplies
    Returns [M, N] in out_dtype, accumulated in fp32.
    """
    x8, scale = (x, x_scale) if x_scale is not None else quantise_tokens(x, fp8_format)
    factor = weight_scale if weight_scale.dtype == torch.float32 else fp8.decode_scale_byte(weight_scale)
    values, columns = fp8.decode_fp8(x8, fp8_format), fp8.decode_fp8(weight, fp8_format)
    total = torch.zeros(x.shape[0], weight.shape[0], device=x.device)
    for block in range(scale.shape[1]):
        part = slice(block * fp8.WEIGHT_BLOCK, (block + 1) * fp8.WEIGHT_BLOCK)
        column_scale = factor[:, block].repeat_interleave(fp8.WEIGHT_BLOCK)[: weight.shape[0]]
        total += (values[:, part] @ columns[:, part].T) * (scale[:, block : block + 1] * column_scale)
    return total.to(out_dtype)


def fp8_weight_linear(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, fp8_format: Fp8Format = Fp8Format.OCP
) -> torch.Tensor:
    """y[t, group] = weight[group] . x[t, group] over fp8 weights, with x as it is; accumulated in fp32.

        x             [T, g, K] float
        weight        [g, N, K] of the encoding; weight_scale [g, ceil(N / 128), ceil(K / 128)] fp32 or e8m0
    Returns [T, g, N] in x's dtype.
    """
    factor = weight_scale if weight_scale.dtype == torch.float32 else fp8.decode_scale_byte(weight_scale)
    for dim in (1, 2):
        factor = factor.repeat_interleave(fp8.WEIGHT_BLOCK, dim).narrow(dim, 0, weight.shape[dim])
    values = fp8.decode_fp8(weight, fp8_format) * factor
    return torch.einsum("tgk,gnk->tgn", x.float(), values).to(x.dtype)
