"""From (request, entry) to slot: the only place that does this lookup (attention spec 2.7, 2.8)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

ABSENT = -1
"""The slot of an entry that is not there: writers skip it, readers mask it."""


@dataclass(frozen=True)
class BlockTable:
    """The blocks of R requests in one cache group.

    blocks       [R, W] int32, block numbers; -1 = no block
    first_block  [R] int32, blocks that lie before column 0, so that a sliding window's table stays short
    block_size   stored entries per block (64 of 256 tokens in a CSA cache, 2 in an HCA cache)
    """

    blocks: torch.Tensor
    first_block: torch.Tensor
    block_size: int

    def slots(self, req: torch.Tensor, entry: torch.Tensor) -> torch.Tensor:
        """The slot of each `entry` of request `req` (integer tensors of one shape), int64; -1 where there is none.

        Entries below 0, before column 0, beyond the table or in a missing block are absent.
        """
        width = self.blocks.shape[1]
        req = req.long()
        column = torch.div(entry, self.block_size, rounding_mode="floor").long() - self.first_block[req].long()
        present = (entry >= 0) & (column >= 0) & (column < width)
        if width == 0:
            return torch.full_like(column, ABSENT)
        block = self.blocks[req, column.clamp(0, width - 1)].long()
        slot = block * self.block_size + entry.long() % self.block_size
        return torch.where(present & (block >= 0), slot, ABSENT)
