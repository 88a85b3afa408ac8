"""Bytes of one page of each kind of cache (attention spec 2.3 to 2.5). Pure."""

from __future__ import annotations

from dsv4dist.config.runtime import FP8_DS_MLA
from dsv4dist.kernels.paged_cache import INDEX_DIM, INDEX_SCALE_BYTES, TOKEN_BYTES, TOKEN_SCALE_BYTES

FP8_PAGE_MULTIPLE = 576
"""Pages of fp8 caches are padded to a multiple of this, so that every page begins 64-byte aligned."""

_ITEMSIZE = {"float32": 4, "bfloat16": 2}


def page_bytes(cache_dtype: str, entries: int, head_dim: int) -> int:
    """Bytes of a block of `entries` window or compressed entries of `head_dim` channels."""
    if cache_dtype == FP8_DS_MLA:
        return _padded(entries * (TOKEN_BYTES + TOKEN_SCALE_BYTES))
    return entries * head_dim * _ITEMSIZE[cache_dtype]


def index_page_bytes(cache_dtype: str, entries: int, index_head_dim: int) -> int:
    """Bytes of a block of `entries` index keys of `index_head_dim` channels."""
    if cache_dtype == FP8_DS_MLA:
        return _padded(entries * (INDEX_DIM + INDEX_SCALE_BYTES))
    return entries * index_head_dim * _ITEMSIZE[cache_dtype]


def _padded(size: int) -> int:
    return -(-size // FP8_PAGE_MULTIPLE) * FP8_PAGE_MULTIPLE
