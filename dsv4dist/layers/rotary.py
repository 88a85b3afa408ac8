"""Tables of cosines and sines (attention spec 1.3)."""

from __future__ import annotations

import math

import torch

from dsv4dist.config.model import RotaryConfig


def rotary_frequencies(rotary: RotaryConfig, width: int) -> torch.Tensor:
    """The angle per position of each of the width / 2 channel pairs, fp64 [width / 2]; YaRN where a factor is set."""
    power = rotary.theta ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    plain = 1.0 / power
    if rotary.factor is None:
        return plain

    def correction(rotations: float) -> float:
        turns = rotary.original_max_position / (2 * math.pi * rotations)
        return width * math.log(turns) / (2 * math.log(rotary.theta))

    low = min(max(math.floor(correction(rotary.beta_fast)), 0), width - 1)
    high: float = min(max(math.ceil(correction(rotary.beta_slow)), 0), width - 1)
    if high == low:
        high += 0.001
    ramp = ((torch.arange(width // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return plain / rotary.factor * ramp + plain * (1 - ramp)


def rotary_table(rotary: RotaryConfig, width: int, num_positions: int, device: torch.device) -> torch.Tensor:
    """fp32 [num_positions, width]: row p holds cos(p * f) of all pairs, then sin(p * f)."""
    frequencies = rotary_frequencies(rotary, width).to(torch.float32)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)
