"""Parameters by name: the part of a dictionary under a prefix."""

from __future__ import annotations

import torch


def below(weights: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The weights whose names begin with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): one for name, one in weights.items() if name.startswith(prefix)}
