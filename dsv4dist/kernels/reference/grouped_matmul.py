"""Rows times the matrix of their group: the experts of a mixture (checkpoint spec 6)."""

from __future__ import annotations

import torch


def grouped_matmul(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """out[m] = weight[e] @ x[m] for the group e of row m: rows ends[e - 1] to ends[e] - 1 of `x`.

        x       [M, K], rows ordered by group
        weight  [E, N, K], x's dtype
        ends    [E] integer, ascending, the last M
    Returns [M, N] in x's dtype, accumulated in fp32.
    """
    out = x.new_empty(x.shape[0], weight.shape[1])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            out[start:end] = x[start:end] @ weight[expert].T
        start = end
    return out
