"""What every launcher here checks, and what it takes of a cache or a block table."""

from __future__ import annotations

import torch

from dsv4dist.errors import ShapeError, UnsupportedError
from dsv4dist.kernels.block_table import BlockTable
from dsv4dist.kernels.paged_cache import (
    INDEX_DIM,
    INDEX_SCALE_BYTES,
    NOPE_DIM,
    ROPE_DIM,
    TOKEN_BYTES,
    TOKEN_SCALE_BYTES,
    CacheFormat,
    Fp8Format,
    PagedCache,
)

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
"""Element types that kernels load and store as numbers."""

CODE_OF = {CacheFormat.ROWS: 0, CacheFormat.FP8_DS_MLA: 1, CacheFormat.FP8_INDEX: 2}
"""How kernels are told a cache's format."""


def is_fnuz(cache: PagedCache) -> bool:
    """Whether an fp8 cache holds FNUZ codes; False for rows."""
    return cache.fp8_format is Fp8Format.FNUZ


def cache_strides(cache: PagedCache) -> tuple[int, int]:
    """Elements from block to block and from entry to entry; the second is 0 in fp8 caches, whose entries are split."""
    return cache.data.stride(0), cache.data.stride(1) if cache.format is CacheFormat.ROWS else 0


def check_cache(name: str, cache: PagedCache, width: int) -> None:
    """Refuse a cache whose entries are not `width` channels or that kernels cannot address.

    Raises: ShapeError, UnsupportedError (an fp8 format for another width).
    """
    data = cache.data
    if cache.format is CacheFormat.ROWS:
        if data.dim() != 3 or data.shape[1:] != (cache.block_size, width) or data.dtype not in FLOATS:
            raise ShapeError(name, f"float [blocks, {cache.block_size}, {width}]", f"{data.dtype} {list(data.shape)}")
        if data.stride(2) != 1:
            raise ShapeError(f"{name} stride inside an entry", 1, data.stride(2))
        return
    tokens = cache.format is CacheFormat.FP8_DS_MLA
    channels = NOPE_DIM + ROPE_DIM if tokens else INDEX_DIM
    if width != channels:
        raise UnsupportedError(f"{name}: {cache.format.value} stores {channels} channels, these entries have {width}")
    content = cache.block_size * (TOKEN_BYTES + TOKEN_SCALE_BYTES if tokens else INDEX_DIM + INDEX_SCALE_BYTES)
    if data.dim() != 2 or data.dtype != torch.uint8 or data.shape[1] < content or data.stride(1) != 1:
        raise ShapeError(name, f"uint8 [blocks, >= {content}], bytes adjacent", f"{data.dtype} {list(data.shape)}")
    align = 2 if tokens else INDEX_SCALE_BYTES  # of the bf16 channels, or of the fp32 scales
    if (data.shape[0] > 1 and data.stride(0) % align) or data.data_ptr() % align:
        raise ShapeError(f"{name} page distance and address", f"multiples of {align} bytes", data.stride(0))


def check_rotary(width: int, positions: torch.Tensor, cos_sin: torch.Tensor, num_tokens: int) -> None:
    """Refuse positions that are not one integer a token and tables that are not fp32 [P, even <= width].

    Raises: ShapeError.
    """
    check_integers("positions", positions, (num_tokens,))
    if cos_sin.dim() != 2 or cos_sin.dtype != torch.float32 or cos_sin.stride(1) != 1 or not cos_sin.shape[0]:
        raise ShapeError("cos_sin", "float32 [positions, rotary width]", f"{cos_sin.dtype} {list(cos_sin.shape)}")
    if cos_sin.shape[1] % 2 or width % 2 or cos_sin.shape[1] > width:
        raise ShapeError("rotary width", f"even, at most the {width} channels", cos_sin.shape[1])


def check_rows(name: str, x: torch.Tensor, shape: tuple[int | None, ...]) -> None:
    """Refuse a tensor that is not float of `shape` (None = any size) with adjacent channels.  Raises: ShapeError."""
    fits = x.dim() == len(shape) and all(want is None or want == got for want, got in zip(shape, x.shape, strict=True))
    if not fits or x.dtype not in FLOATS:
        wanted = [("any" if size is None else size) for size in shape]
        raise ShapeError(name, f"bfloat16, float16 or float32 {wanted}", f"{x.dtype} {list(x.shape)}")
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ShapeError(f"{name} stride in the last dimension", 1, x.stride(-1))


def check_integers(name: str, x: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Refuse a tensor that is not contiguous int32 or int64 of `shape`.  Raises: ShapeError."""
    if tuple(x.shape) != shape or x.dtype not in (torch.int32, torch.int64) or not x.is_contiguous():
        raise ShapeError(name, f"contiguous int32 or int64 {list(shape)}", f"{x.dtype} {list(x.shape)}")


def check_table(name: str, table: BlockTable) -> None:
    """Refuse a block table that is not int32 [R, columns] with int32 [R] first blocks.  Raises: ShapeError."""
    blocks, first = table.blocks, table.first_block
    if blocks.dim() != 2 or blocks.dtype != torch.int32 or (blocks.shape[1] > 1 and blocks.stride(1) != 1):
        raise ShapeError(
            f"{name} blocks", "int32 [requests, columns], columns adjacent", f"{blocks.dtype} {list(blocks.shape)}"
        )
    if first.shape != blocks.shape[:1] or first.dtype != torch.int32 or not first.is_contiguous():
        raise ShapeError(
            f"{name} first_block", f"contiguous int32 [{blocks.shape[0]}]", f"{first.dtype} {list(first.shape)}"
        )


def power_of_2_up_to(size: int) -> int:
    """The largest power of two that is at most `size`, and at least 1: tile sides and warps come in these."""
    return 1 << max(0, size.bit_length() - 1)


def check_dense(name: str, dense: torch.Tensor) -> None:
    """Refuse a tensor that is not integer [rows, width] with adjacent columns.  Raises: ShapeError."""
    if dense.dim() != 2 or dense.dtype not in (torch.int32, torch.int64) or (dense.numel() and dense.stride(1) != 1):
        raise ShapeError(name, "int32 or int64 [rows, width], columns adjacent", f"{dense.dtype} {list(dense.shape)}")
