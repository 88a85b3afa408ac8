"""Each prefill token's rows of the gathered workspace, and compaction of dense rows (attention spec 3.5, 4.4)."""

from __future__ import annotations

import torch

from dsv4dist.errors import ShapeError
from dsv4dist.kernels.block_table import ABSENT
from dsv4dist.kernels.reference.key_lists import ragged

WIDTH_MULTIPLE = 128
"""Combined rows are padded to a multiple of this."""


def combine_indices(
    selected: torch.Tensor | None,
    token_to_req: torch.Tensor,
    positions: torch.Tensor,
    visible_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    top_k: int,
    window: int,
    num_entries: int,
    rows_per_request: int,
    left_visible: torch.Tensor | None = None,
    right_visible: torch.Tensor | None = None,
    max_image: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Name workspace rows per token: its selected entries, then its window (4.4).

        selected       [n, >= top_k] entries, the valid ones first; None = entries 0, 1, 2, ...
        token_to_req, positions, visible_lens  [n]: request of the chunk, absolute position, complete entries there
        seq_lens, gather_lens  [requests]: tokens of the request, and how many of the last are gathered
        top_k          entries taken at most, 0 = window only
        num_entries, rows_per_request  workspace rows for entries, and for all of a request (entries, then tokens)
        left_visible, right_visible, max_image  [n] tokens of the same image that are visible (3.9), given together
    Returns int32 indices [n, round_up(top_k + window + max_image, 128)], -1 filled, and int32 lens [n]: entries plus
    window tokens, which may exceed what is written.  Raises: ShapeError when only one of left and right is given.
    """
    if (left_visible is None) != (right_visible is None):
        raise ShapeError("left_visible and right_visible", "both or neither", "one of them")
    req, position = token_to_req.long(), positions.long()
    zero = torch.zeros_like(position)
    left = zero if left_visible is None else left_visible.long()
    right = zero if right_visible is None else right_visible.long()
    seq = seq_lens.long()[req]
    gather_start = seq - gather_lens.long()[req]
    beyond_window = (left - (window - 1)).clamp_min(0)
    start = torch.maximum((position - (window - 1) - beyond_window).clamp_min(0), gather_start)
    window_lens = (torch.minimum(position + right + 1, seq) - start).clamp_min(0)
    selected_lens = visible_lens.long().clamp(0, top_k)

    width = -(-(top_k + window + max_image) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    column = torch.arange(width, device=position.device)
    entry = column.expand(len(position), -1).clone()
    if selected is not None:
        entry[:, :top_k] = selected[:, :top_k]
    base = (req * rows_per_request).unsqueeze(1)
    entry_row = torch.where((entry >= 0) & (entry < num_entries), base + entry, ABSENT)
    behind = column - selected_lens.unsqueeze(1)
    window_row = base + num_entries + (start - gather_start).unsqueeze(1) + behind
    in_window = behind < window_lens.clamp_max(window + max_image).unsqueeze(1)
    indices = torch.where(behind < 0, entry_row, torch.where(in_window, window_row, ABSENT))
    return indices.to(torch.int32), (selected_lens + window_lens).to(torch.int32)


def compact_rows(dense: torch.Tensor, lens: torch.Tensor, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The values v, 0 <= v < limit, of the first lens[t] columns of each row of `dense` [T, width], in order (3.5).

    Returns (indices, indptr), int32.
    """
    column = torch.arange(dense.shape[1], device=dense.device)
    keep = (column < lens.unsqueeze(1)) & (dense < limit)
    return ragged(dense.masked_fill(~keep, ABSENT))
