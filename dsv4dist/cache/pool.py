"""The caches of one rank as tensors, and the views that each layer gets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
from dsv4dist.cache.layout import index_page_bytes, page_bytes
from dsv4dist.config.model import LayerKind, ModelConfig
from dsv4dist.config.runtime import FP8_DS_MLA
from dsv4dist.kernels.paged_cache import CacheFormat, Fp8Format, PagedCache


@dataclass(frozen=True)
class LayerCaches:
    """The caches of one layer; the compressed ones are None where its kind has none."""

    window: PagedCache
    entries: PagedCache | None = None
    state: PagedCache | None = None
    index_keys: PagedCache | None = None
    index_state: PagedCache | None = None


def cache_tensors(layers: Iterable[LayerCaches]) -> Iterator[torch.Tensor]:
    """The memory of every cache of `layers`."""
    for layer in layers:
        for cache in (layer.window, layer.entries, layer.state, layer.index_keys, layer.index_state):
            if cache is not None:
                yield cache.data


def allocate_caches(
    config: ModelConfig,
    num_blocks: dict[str, int],
    cache_dtype: str,
    fp8_format: Fp8Format,
    device: torch.device,
    poison: bool,
    num_draft_layers: int = 0,
) -> list[LayerCaches]:
    """Allocate the caches of every layer, draft layers last.

    Memory is uninitialised, or with `poison` has all bits set, which is NaN in every format.

    cache_dtype  option of RunConfig: rows of a float dtype, or fp8_ds_mla with fp8 index keys; states are fp32
    fp8_format   encoding of all fp8 caches: this package writes and reads them itself
    """

    def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        data = torch.empty(shape, dtype=dtype, device=device)
        if poison:
            data.view(torch.uint8).fill_(0xFF)
        return data

    def state(kind: LayerKind, dim: int) -> PagedCache:
        shape = (num_blocks[STATE[kind]], STATE_BLOCK_TOKENS[kind], 2 * kind.overlap * dim)
        return PagedCache(allocate(shape, torch.float32), STATE_BLOCK_TOKENS[kind])

    def pages(group: str, block_size: int, width: int, fp8: CacheFormat = CacheFormat.FP8_DS_MLA) -> PagedCache:
        if cache_dtype == FP8_DS_MLA:
            size = page_bytes if fp8 is CacheFormat.FP8_DS_MLA else index_page_bytes
            shape: tuple[int, ...] = (num_blocks[group], size(cache_dtype, block_size, width))
            return PagedCache(allocate(shape, torch.uint8), block_size, fp8, fp8_format)
        return PagedCache(allocate((num_blocks[group], block_size, width), getattr(torch, cache_dtype)), block_size)

    layers = []
    for kind in (*config.layer_kinds, *[LayerKind.SWA] * num_draft_layers):
        window = pages(WINDOW, WINDOW_BLOCK_TOKENS, config.head_dim)
        if kind is LayerKind.SWA:
            layers.append(LayerCaches(window))
            continue
        stored = COMPRESSED_BLOCK_TOKENS // kind.compress_ratio
        entries, entry_state = pages(COMPRESSED, stored, config.head_dim), state(kind, config.head_dim)
        if kind is LayerKind.HCA:
            layers.append(LayerCaches(window, entries, entry_state))
            continue
        index_keys = pages(COMPRESSED, stored, config.index_head_dim, CacheFormat.FP8_INDEX)
        index_state = state(kind, config.index_head_dim)
        layers.append(LayerCaches(window, entries, entry_state, index_keys, index_state))
    return layers
