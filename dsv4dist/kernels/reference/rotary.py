"""Rotation of adjacent channel pairs by position (attention spec 1.3 and 4.10)."""

from __future__ import annotations

import torch


def rotate(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """Rotate the last channels of `x` by their token's position; the other channels pass unchanged.

        x          [T, D] or [T, h, D], any float dtype; the last cos_sin.shape[1] channels are rotary
        positions  [T] integer rows of the table
        cos_sin    [P, rotary width] fp32, cosines then sines of the pairs
    Returns fp32 of the shape of x: callers round once, after what else they do in fp32.
    """
    width = cos_sin.shape[1]
    row = cos_sin[positions.long()].view(x.shape[0], *([1] * (x.dim() - 2)), width)
    cos, sin = row[..., : width // 2], row[..., width // 2 :]
    if inverse:
        sin = -sin
    y = x.float()
    even, odd = y[..., -width::2], y[..., y.shape[-1] - width + 1 :: 2]
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((y[..., :-width], rotated), dim=-1)
