"""RMS norms (attention spec 1.2 and 4.2)."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Scale rows of `x` [..., n] to unit root mean square, times `weight` [n] fp32 if given; fp32 inside, x's dtype."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight).to(x.dtype)


def qr_kv_norm(
    qr_kv: torch.Tensor, q_weight: torch.Tensor, kv_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Split `qr_kv` [T, Lq + D] and norm both parts with their weights; returns qr [T, Lq], kv [T, D] (4.2)."""
    q_rank = q_weight.shape[0]
    return rms_norm(qr_kv[:, :q_rank], q_weight, eps), rms_norm(qr_kv[:, q_rank:], kv_weight, eps)
