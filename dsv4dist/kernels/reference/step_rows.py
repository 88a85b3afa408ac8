"""What each row of a step is and where it writes, from the step's requests (attention spec 1.4, 1.5, 2.7)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsv4dist.kernels.block_table import ABSENT, BlockTable
from dsv4dist.kernels.step_rows import CompressedRows, CompressedTables, StepRows
from dsv4dist.kernels.visibility import completes_entry, visible_entries


def step_rows(
    token_ids: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    window: BlockTable,
    compressed: Sequence[CompressedTables] = (),
) -> StepRows:
    """The request, position and slots of each of T rows of R requests.

        token_ids        [T]; rows from query_start_loc[R] on are padding
        query_start_loc  [R + 1], the first row of each request; a request may have none
        seq_lens         [R], tokens of each request, those of its rows included
    All int32 or int64. No length is read on the host. Without requests there are no rows.
    """
    ends = query_start_loc[1:].long()
    row = torch.arange(len(token_ids), device=token_ids.device)
    req = torch.searchsorted(ends, row, right=True).clamp_max(max(len(seq_lens) - 1, 0))
    positions = torch.where(row < query_start_loc[-1], (seq_lens.long() - ends)[req] + row, -1)
    return StepRows(
        token_ids=token_ids.long(),
        token_to_req=req,
        positions=positions,
        rotary_positions=positions.clamp_min(0),
        window_slots=window.slots(req, positions),
        compressed=tuple(_compressed(tables, req, positions) for tables in compressed),
    )


def _compressed(tables: CompressedTables, req: torch.Tensor, positions: torch.Tensor) -> CompressedRows:
    completed = tables.entries.slots(req, positions // tables.ratio)
    return CompressedRows(
        entry_slots=torch.where(completes_entry(positions, tables.ratio), completed, ABSENT),
        visible_lens=visible_entries(positions, tables.ratio),
        state_slots=tables.states.slots(req, positions),
    )
