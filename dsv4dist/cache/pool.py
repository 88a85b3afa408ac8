"""The caches of one rank as tensors, and the views that each layer gets."""

from __future__ import annotations

from dataclasses import dataclass

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
from dsv4dist.kernels.paged_cache import PagedCache


@dataclass(frozen=True)
class LayerCaches:
    """The caches of one layer; the compressed ones are None where its kind has none."""

    window: PagedCache
    entries: PagedCache | None = None
    state: PagedCache | None = None
    index_keys: PagedCache | None = None
    index_state: PagedCache | None = None


def allocate_caches(
    config: ModelConfig, num_blocks: dict[str, int], dtype: torch.dtype, device: torch.device, poison: bool
) -> list[LayerCaches]:
    """Allocate the caches of every layer: rows of `dtype`, states of fp32, uninitialised (or NaN with `poison`)."""

    def pages(group: str, block_size: int, width: int, page_dtype: torch.dtype) -> PagedCache:
        data = torch.empty(num_blocks[group], block_size, width, dtype=page_dtype, device=device)
        if poison:
            data.fill_(float("nan"))
        return PagedCache(data, block_size)

    layers = []
    for kind in config.layer_kinds:
        window = pages(WINDOW, WINDOW_BLOCK_TOKENS, config.head_dim, dtype)
        if kind is LayerKind.SWA:
            layers.append(LayerCaches(window))
            continue
        stored = COMPRESSED_BLOCK_TOKENS // kind.compress_ratio
        state_block, state_width = STATE_BLOCK_TOKENS[kind], 2 * kind.overlap
        entries = pages(COMPRESSED, stored, config.head_dim, dtype)
        state = pages(STATE[kind], state_block, state_width * config.head_dim, torch.float32)
        if kind is LayerKind.HCA:
            layers.append(LayerCaches(window, entries, state))
            continue
        index_keys = pages(COMPRESSED, stored, config.index_head_dim, dtype)
        index_state = pages(STATE[kind], state_block, state_width * config.index_head_dim, torch.float32)
        layers.append(LayerCaches(window, entries, state, index_keys, index_state))
    return layers
