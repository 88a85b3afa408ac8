"""How many compressed entries a token sees: the one formula, for torch tensors and numpy arrays alike."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

Positions = TypeVar("Positions", torch.Tensor, npt.NDArray[np.int64])


def visible_entries(positions: Positions, compress_ratio: int) -> Positions:
    """(position + 1) // ratio: the complete compressed entries at each absolute position >= 0 (attention spec 1.4)."""
    return (positions + 1) // compress_ratio


def completes_entry(positions: Positions, compress_ratio: int) -> Positions:
    """Whether a token at each absolute position is the last of its window, so that an entry is stored for it (1.5)."""
    last: Positions = (positions + 1) % compress_ratio == 0
    return last
