"""Step packet on the device -> StepMetadata. Everything here is a function of the packet, the same on every rank."""

from __future__ import annotations

from dataclasses import replace

import torch

from dsv4dist.cache.groups import (
    COMPRESSED,
    COMPRESSED_BLOCK_TOKENS,
    STATE,
    STATE_BLOCK_TOKENS,
    WINDOW,
    WINDOW_BLOCK_TOKENS,
)
from dsv4dist.config.model import LayerKind, ModelConfig
from dsv4dist.kernels.block_table import ABSENT, BlockTable
from dsv4dist.kernels.ops import Ops
from dsv4dist.step.metadata import CompressedMetadata, StepMetadata
from dsv4dist.step.visibility import completes_entry, visible_entries


def build_metadata(config: ModelConfig, ops: Ops, sections: dict[str, torch.Tensor], max_len: int) -> StepMetadata:
    """Derive what layers need from the packet's sections (see workers.packet), int32 tensors on the device.

    max_len  tokens that no sequence of the step exceeds; it fixes the sizes of lists, so that nothing here reads a length
             on the host
    """
    starts, seq_lens = sections["query_start_loc"].long(), sections["seq_lens"].long()
    num_tokens = sections["token_ids"].shape[0]
    token = torch.arange(num_tokens, device=starts.device)
    # Rows behind the last request's are padding: at position -1 they own no slot, see no entry and complete none.
    token_to_req = torch.searchsorted(starts[1:], token, right=True).clamp_max(max(len(seq_lens) - 1, 0))
    first_position = seq_lens - (starts[1:] - starts[:-1]) - starts[:-1]
    positions = torch.where(token < starts[-1], first_position[token_to_req] + token, -1)
    window = _table(sections, WINDOW, WINDOW_BLOCK_TOKENS)
    metadata = window_metadata(config, ops, window, token_to_req, positions, sections["token_ids"].long())
    compressed = {
        kind: _compressed(kind, ops, sections, token_to_req, positions, max_len)
        for kind in (LayerKind.CSA, LayerKind.HCA)
        if config.has(kind)
    }
    return replace(metadata, compressed=compressed)


def window_metadata(
    config: ModelConfig,
    ops: Ops,
    window: BlockTable,
    token_to_req: torch.Tensor,
    positions: torch.Tensor,
    token_ids: torch.Tensor,
) -> StepMetadata:
    """The metadata of layers that see their window only, for any tokens of the step's requests, all [T] int64.

    A row at position -1 is padding.
    """
    return StepMetadata(
        token_ids=token_ids,
        positions=positions.clamp_min(0),
        token_to_req=token_to_req,
        window=window,
        window_slots=window.slots(token_to_req, positions),
        window_key_list=ops.window_key_list(window, token_to_req, positions, config.sliding_window),
        compressed={},
    )


def _table(sections: dict[str, torch.Tensor], group: str, block_size: int) -> BlockTable:
    return BlockTable(sections[f"{group}.blocks"], sections[f"{group}.first_block"], block_size)


def _compressed(
    kind: LayerKind,
    ops: Ops,
    sections: dict[str, torch.Tensor],
    token_to_req: torch.Tensor,
    positions: torch.Tensor,
    max_len: int,
) -> CompressedMetadata:
    ratio = kind.compress_ratio
    table = _table(sections, COMPRESSED, COMPRESSED_BLOCK_TOKENS // ratio)
    state_table = _table(sections, STATE[kind], STATE_BLOCK_TOKENS[kind])
    visible_lens, max_visible = visible_entries(positions, ratio), max_len // ratio
    completed = table.slots(token_to_req, positions // ratio)
    key_list = None
    if kind is LayerKind.HCA:
        key_list = ops.visible_key_list(table, token_to_req, visible_lens, max_visible)
    return CompressedMetadata(
        table=table,
        entry_slots=torch.where(completes_entry(positions, ratio), completed, ABSENT),
        visible_lens=visible_lens,
        max_visible=max_visible,
        state_table=state_table,
        state_slots=state_table.slots(token_to_req, positions),
        key_list=key_list,
    )
