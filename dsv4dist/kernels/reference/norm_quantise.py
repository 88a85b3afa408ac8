"""The norms of qr and kv with qr leaving as fp8, for linears that take it so (attention spec 6.2, 6.4)."""

from __future__ import annotations

import torch

from dsv4dist.errors import ShapeError
from dsv4dist.kernels.fp8 import encode_fp8
from dsv4dist.kernels.paged_cache import Fp8Format
from dsv4dist.kernels.reference.norm import rms_norm

ACT_GROUP = 128
"""Activation channels that share one scale."""
ACT_FLOOR = 1e-10


def qr_kv_norm_quantised(
    qr_kv: torch.Tensor, q_weight: torch.Tensor, kv_weight: torch.Tensor, eps: float, fp8_format: Fp8Format
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split `qr_kv` [T, Lq + D], norm both parts, and quantise the first from its fp32 norm, not from a rounded one.

    Returns qr [T, Lq] in the encoding's dtype, act_scale [T, Lq / 128] fp32 = max(amax, 1e-10) / quant_max, and kv
    [T, D] in qr_kv's dtype. A group with a number that is not finite gets scale NaN and codes 0.
    Raises: ShapeError when Lq is not a multiple of 128.
    """
    q_rank = q_weight.shape[0]
    if q_rank % ACT_GROUP:
        raise ShapeError("q rank to quantise", f"a multiple of {ACT_GROUP}", q_rank)
    qr = rms_norm(qr_kv[:, :q_rank].float(), q_weight, eps).view(-1, q_rank // ACT_GROUP, ACT_GROUP)
    amax = qr.abs().amax(-1)
    limit = torch.tensor(fp8_format.quant_max, device=qr.device)  # a tensor: division by a number is not exact on GPUs
    scale = (amax.clamp_min(ACT_FLOOR) / limit).where(amax.isfinite(), torch.full_like(amax, float("nan")))
    codes = encode_fp8((qr / scale.unsqueeze(-1)).nan_to_num(nan=0.0), fp8_format).flatten(1)
    return codes.view(fp8_format.torch_dtype), scale, rms_norm(qr_kv[:, q_rank:], kv_weight, eps)
