"""Which slots a query attends to, as ragged lists (attention spec 1.4, 3.3 to 3.5)."""

from __future__ import annotations

import torch

from dsv4dist.kernels.block_table import ABSENT, BlockTable


def ragged(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compact dense rows [T, width] of slots (negative = absent) to (indices, indptr), int32, order kept (3.5)."""
    present = slots >= 0
    indptr = torch.zeros(slots.shape[0] + 1, dtype=torch.int32, device=slots.device)
    indptr[1:] = present.sum(dim=1).cumsum(0)
    return slots[present].to(torch.int32), indptr


def window_key_list(
    table: BlockTable, token_to_req: torch.Tensor, positions: torch.Tensor, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots of the last `window` tokens up to and including each token's own, oldest first (3.3)."""
    position = positions.long().unsqueeze(1) + torch.arange(1 - window, 1, device=positions.device)
    return ragged(table.slots(token_to_req.unsqueeze(1).expand_as(position), position))


def entry_key_list(
    table: BlockTable, token_to_req: torch.Tensor, entries: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots of the compressed `entries` [T, width] (negative = absent) of each token's request (3.4, 3.5)."""
    return ragged(table.slots(token_to_req.unsqueeze(1).expand_as(entries), entries))


def visible_key_list(
    table: BlockTable, token_to_req: torch.Tensor, visible_lens: torch.Tensor, max_entries: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots of entries 0 to visible_lens[t] - 1 of each token's request, at most `max_entries` of them (3.4)."""
    longest = min(int(visible_lens.max()), max_entries) if visible_lens.numel() else 0
    entry = torch.arange(longest, device=visible_lens.device)
    return entry_key_list(table, token_to_req, torch.where(entry < visible_lens.unsqueeze(1), entry, ABSENT))
