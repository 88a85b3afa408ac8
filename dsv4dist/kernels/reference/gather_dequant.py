"""Reading entries of a paged cache into a contiguous workspace (attention spec 4.7)."""

from __future__ import annotations

import torch

from dsv4dist.kernels.block_table import ABSENT, BlockTable
from dsv4dist.kernels.paged_cache import PagedCache
from dsv4dist.kernels.reference.pages import read_entries


def gather_dequant(
    cache: PagedCache,
    table: BlockTable,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor | None,
    out: torch.Tensor,
    offset: int,
) -> None:
    """Copy the last gather_lens[r] of seq_lens[r] entries of each request to rows offset, offset + 1, ... of out[r].

        table        where each request keeps its entries, one row per row of `out`
        seq_lens     [R] entries of the request; gather_lens [R], None = all of them
        out          [R, M, D] float; a value is the stored code times its scale, rounded once
    An entry without a slot gives zeros. Rows behind a request's entries keep what they held; entries that do not fit
    into M rows are left out.
    """
    count = seq_lens if gather_lens is None else gather_lens
    row = torch.arange(out.shape[1] - offset, device=out.device)
    wanted = row < count.long().unsqueeze(1)
    entry = (seq_lens.long() - count.long()).unsqueeze(1) + row
    req = torch.arange(out.shape[0], device=out.device).unsqueeze(1).expand_as(entry)
    slots = torch.where(wanted, table.slots(req, entry), ABSENT)
    out[:, offset:][wanted] = read_entries(cache, slots[wanted]).to(out.dtype)
