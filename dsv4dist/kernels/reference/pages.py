"""Reading and writing entries of a paged cache by slot, in every storage format (attention spec 2.2 to 2.5)."""

from __future__ import annotations

import torch

from dsv4dist.kernels import fp8
from dsv4dist.kernels.paged_cache import (
    INDEX_DIM,
    INDEX_SCALE_BYTES,
    NOPE_DIM,
    SCALE_GROUP,
    TOKEN_BYTES,
    TOKEN_SCALE_BYTES,
    CacheFormat,
    PagedCache,
)

NUM_SCALES = NOPE_DIM // SCALE_GROUP


def read_entries(cache: PagedCache, slots: torch.Tensor) -> torch.Tensor:
    """The entries at `slots` (any shape, integer) as float rows [*slots.shape, width]; absent slots give zeros."""
    present = (slots >= 0) & (slots < cache.num_slots)
    slot = torch.where(present, slots, 0).long()
    block, place = slot // cache.block_size, slot % cache.block_size
    if cache.num_slots == 0:
        rows = torch.zeros(*slots.shape, 1, device=slots.device)
    elif cache.format is CacheFormat.ROWS:
        rows = cache.data[block, place]
    elif cache.format is CacheFormat.FP8_DS_MLA:
        rows = _read_tokens(cache, block, place)
    else:
        rows = _read_index_keys(cache, block, place)
    return torch.where(present.unsqueeze(-1), rows, 0)


def write_entries(cache: PagedCache, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Store `rows` [N, width] at `slots` [N], rounded once to the cache's format; absent slots write nothing."""
    present = (slots >= 0) & (slots < cache.num_slots)
    slot, rows = slots[present].long(), rows[present]
    block, place = slot // cache.block_size, slot % cache.block_size
    if cache.format is CacheFormat.ROWS:
        cache.data[block, place] = rows.to(cache.data.dtype)
    elif cache.format is CacheFormat.FP8_DS_MLA:
        _write_tokens(cache, block, place, rows)
    else:
        _write_index_keys(cache, block, place, rows)


def _read_tokens(cache: PagedCache, block: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    assert cache.fp8_format is not None, "an fp8 cache has an encoding"
    data = _bytes(cache, block, place * TOKEN_BYTES, TOKEN_BYTES)
    scales = _bytes(cache, block, cache.block_size * TOKEN_BYTES + place * TOKEN_SCALE_BYTES, NUM_SCALES)
    nope = fp8.dequantise_groups(data[..., :NOPE_DIM], scales, cache.fp8_format, SCALE_GROUP)
    rope = data[..., NOPE_DIM:].contiguous().view(torch.bfloat16).float()
    return torch.cat((nope, rope), dim=-1)


def _write_tokens(cache: PagedCache, block: torch.Tensor, place: torch.Tensor, rows: torch.Tensor) -> None:
    assert cache.fp8_format is not None, "an fp8 cache has an encoding"
    nope, scales = fp8.quantise_groups(rows[:, :NOPE_DIM], cache.fp8_format, SCALE_GROUP)
    rope = rows[:, NOPE_DIM:].to(torch.bfloat16).view(torch.uint8)
    padding = scales.new_zeros(len(scales), TOKEN_SCALE_BYTES - NUM_SCALES)
    _set_bytes(cache, block, place * TOKEN_BYTES, torch.cat((nope, rope), dim=-1))
    scale_area = cache.block_size * TOKEN_BYTES
    _set_bytes(cache, block, scale_area + place * TOKEN_SCALE_BYTES, torch.cat((scales, padding), dim=-1))


def _read_index_keys(cache: PagedCache, block: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    assert cache.fp8_format is not None, "an fp8 cache has an encoding"
    data = _bytes(cache, block, place * INDEX_DIM, INDEX_DIM)
    scale = _bytes(cache, block, cache.block_size * INDEX_DIM + place * INDEX_SCALE_BYTES, INDEX_SCALE_BYTES)
    return fp8.dequantise_index_rows(data, scale.view(torch.float32).squeeze(-1), cache.fp8_format)


def _write_index_keys(cache: PagedCache, block: torch.Tensor, place: torch.Tensor, rows: torch.Tensor) -> None:
    assert cache.fp8_format is not None, "an fp8 cache has an encoding"
    data, scale = fp8.quantise_index_rows(rows, cache.fp8_format)
    _set_bytes(cache, block, place * INDEX_DIM, data)
    scale_area = cache.block_size * INDEX_DIM
    scale_bytes = scale.unsqueeze(-1).contiguous().view(torch.uint8)
    _set_bytes(cache, block, scale_area + place * INDEX_SCALE_BYTES, scale_bytes)


def _bytes(cache: PagedCache, block: torch.Tensor, start: torch.Tensor, count: int) -> torch.Tensor:
    """`count` bytes from byte `start` of each block's page: uint8 [*block.shape, count]."""
    offset = start.unsqueeze(-1) + torch.arange(count, device=start.device)
    return cache.data[block.unsqueeze(-1), offset]


def _set_bytes(cache: PagedCache, block: torch.Tensor, start: torch.Tensor, values: torch.Tensor) -> None:
    offset = start.unsqueeze(-1) + torch.arange(values.shape[-1], device=start.device)
    cache.data[block.unsqueeze(-1), offset] = values
