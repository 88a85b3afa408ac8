"""Step packet on the device -> StepMetadata. Everything here is a function of the packet, the same on every rank."""

from __future__ import annotations

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
from dsv4dist.kernels.block_table import BlockTable
from dsv4dist.kernels.ops import Ops
from dsv4dist.kernels.step_rows import CompressedRows, CompressedTables, StepRows
from dsv4dist.step.metadata import CompressedMetadata, StepMetadata


def build_metadata(config: ModelConfig, ops: Ops, sections: dict[str, torch.Tensor], max_len: int) -> StepMetadata:
    """Derive what layers need from the packet's sections (see workers.packet), int32 tensors on the device.

    max_len  tokens that no sequence of the step exceeds; it fixes the sizes of lists, so that nothing here reads a
             length on the host
    """
    window = _table(sections, WINDOW, WINDOW_BLOCK_TOKENS)
    kinds = [kind for kind in (LayerKind.CSA, LayerKind.HCA) if config.has(kind)]
    tables = [_compressed_tables(kind, sections) for kind in kinds]
    rows: StepRows = ops.step_rows(
        sections["token_ids"], sections["query_start_loc"], sections["seq_lens"], window, tables
    )
    return StepMetadata(
        token_ids=rows.token_ids,
        positions=rows.rotary_positions,
        token_to_req=rows.token_to_req,
        window=window,
        window_slots=rows.window_slots,
        window_key_list=ops.window_key_list(window, rows.token_to_req, rows.positions, config.sliding_window),
        compressed={
            kind: _compressed(kind, ops, rows.token_to_req, one, one_rows, max_len)
            for kind, one, one_rows in zip(kinds, tables, rows.compressed, strict=True)
        },
    )


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


def _compressed_tables(kind: LayerKind, sections: dict[str, torch.Tensor]) -> CompressedTables:
    ratio = kind.compress_ratio
    return CompressedTables(
        ratio=ratio,
        entries=_table(sections, COMPRESSED, COMPRESSED_BLOCK_TOKENS // ratio),
        states=_table(sections, STATE[kind], STATE_BLOCK_TOKENS[kind]),
    )


def _compressed(
    kind: LayerKind, ops: Ops, token_to_req: torch.Tensor, tables: CompressedTables, rows: CompressedRows, max_len: int
) -> CompressedMetadata:
    max_visible, key_list = max_len // tables.ratio, None
    if kind is LayerKind.HCA:
        key_list = ops.visible_key_list(tables.entries, token_to_req, rows.visible_lens, max_visible)
    return CompressedMetadata(
        table=tables.entries,
        entry_slots=rows.entry_slots,
        visible_lens=rows.visible_lens,
        max_visible=max_visible,
        state_table=tables.states,
        state_slots=rows.state_slots,
        key_list=key_list,
    )
