"""Products whose result keeps the accumulator's precision (attention spec 1.5)."""

from __future__ import annotations

import torch


def product_in_fp32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, K] times weight [N, K], floats of one dtype, accumulated and returned in fp32 [T, N]."""
    if x.is_cuda and x.dtype.itemsize == 2:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return x.float() @ weight.float().T
