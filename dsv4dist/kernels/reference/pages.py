"""Reading and writing entries of a paged cache by slot."""

from __future__ import annotations

import torch

from dsv4dist.errors import UnsupportedError
from dsv4dist.kernels.paged_cache import CacheFormat, PagedCache


def read_entries(cache: PagedCache, slots: torch.Tensor) -> torch.Tensor:
    """The entries at `slots` (any shape, integer) as float rows [*slots.shape, width]; absent slots give zeros."""
    _require_rows(cache)
    present = (slots >= 0) & (slots < cache.num_slots)
    slot = torch.where(present, slots, 0).long()
    rows = cache.data[slot // cache.block_size, slot % cache.block_size]
    return torch.where(present.unsqueeze(-1), rows, 0)


def write_entries(cache: PagedCache, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Store `rows` [N, width] at `slots` [N], rounded once to the cache's dtype; absent slots write nothing."""
    _require_rows(cache)
    present = (slots >= 0) & (slots < cache.num_slots)
    slot = slots[present].long()
    cache.data[slot // cache.block_size, slot % cache.block_size] = rows[present].to(cache.data.dtype)


def _require_rows(cache: PagedCache) -> None:
    if cache.format is not CacheFormat.ROWS:
        raise UnsupportedError(
            f"the reference kernels read {CacheFormat.ROWS.value} caches; this one is {cache.format.value}"
        )
