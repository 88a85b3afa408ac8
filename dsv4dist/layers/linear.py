"""Products with weight matrices: in the run's dtype, over block-scaled fp8 weights, and with an fp32 result."""

from __future__ import annotations

import torch


def product_in_fp32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, K] times weight [N, K], both in the run's dtype: accumulated and returned in fp32 (attention spec 1.5)."""
    if x.is_cuda and x.dtype.itemsize == 2:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return x.float() @ weight.float().T
