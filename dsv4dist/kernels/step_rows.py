"""What the rows of a step are: the types that `step_rows` takes and returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv4dist.kernels.block_table import BlockTable


@dataclass(frozen=True)
class CompressedTables:
    """Where requests keep what one kind of compression stores.

    ratio    tokens per compressed entry
    entries  compressed entries of each request
    states   compressor states of each request, one per token
    """

    ratio: int
    entries: BlockTable
    states: BlockTable


@dataclass(frozen=True)
class CompressedRows:
    """One kind of compression. All [T] int64.

    entry_slots   the slot of the entry that a token completes, -1 where it completes none
    visible_lens  complete entries at the token's position
    state_slots   where the token's compressor state goes
    """

    entry_slots: torch.Tensor
    visible_lens: torch.Tensor
    state_slots: torch.Tensor


@dataclass(frozen=True)
class StepRows:
    """T rows of a step. All [T] int64; rows behind the last request's are padding: they own no slot and see no entry.

    token_ids         the token of each row
    token_to_req      its request; padding belongs to the last one
    positions         its absolute position; -1 = padding
    rotary_positions  the same, but 0 where a row is padding: what indexes rotary tables
    window_slots      where the token's window row goes
    compressed        per kind, in the order of the tables given
    """

    token_ids: torch.Tensor
    token_to_req: torch.Tensor
    positions: torch.Tensor
    rotary_positions: torch.Tensor
    window_slots: torch.Tensor
    compressed: tuple[CompressedRows, ...]
