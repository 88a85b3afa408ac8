"""The metadata that layers read during a step. Plain data; `builder` fills it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv4dist.config.model import LayerKind
from dsv4dist.kernels.block_table import BlockTable


@dataclass(frozen=True)
class CompressedMetadata:
    """What the layers of one compressed kind share. T tokens in the step.

    table         compressed entries of each request
    entry_slots   [T] int64, the slot of the entry that a token completes, -1 where it completes none
    visible_lens  [T] int64, complete entries at the token's position
    max_visible   an upper bound of visible_lens, known without reading it
    state_table   compressor states of each request
    state_slots   [T] int64
    key_list      (indices, indptr) of all visible entries (HCA); None where the indexer selects (CSA)
    """

    table: BlockTable
    entry_slots: torch.Tensor
    visible_lens: torch.Tensor
    max_visible: int
    state_table: BlockTable
    state_slots: torch.Tensor
    key_list: tuple[torch.Tensor, torch.Tensor] | None


@dataclass(frozen=True)
class StepMetadata:
    """One step: T tokens of R requests, each request's tokens together and in order; rows behind them are padding.

    token_ids, positions, token_to_req  [T] int64; positions index rotary tables, so padding has 0
    window                              window rows of each request
    window_slots                        [T] int64, where each token's window row goes
    window_key_list                     (indices, indptr) of each token's window
    compressed                          per compressed kind that the model has
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    token_to_req: torch.Tensor
    window: BlockTable
    window_slots: torch.Tensor
    window_key_list: tuple[torch.Tensor, torch.Tensor]
    compressed: dict[LayerKind, CompressedMetadata]
