"""What a kernel needs to know of one paged cache: its memory, its geometry and its encoding (attention spec 2)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch


class Fp8Format(Enum):
    """An 8-bit float encoding: e4m3 with bias 7 (OCP) or bias 8 (FNUZ). A property of each cache, never of a device."""

    OCP = "ocp"
    FNUZ = "fnuz"

    @property
    def quant_max(self) -> float:
        """The largest magnitude a quantiser produces; byte 0x7E in both encodings."""
        return 448.0 if self is Fp8Format.OCP else 224.0

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self is Fp8Format.OCP else torch.float8_e4m3fnuz


NOPE_DIM, ROPE_DIM = 448, 64
"""Channels of an fp8_ds_mla token: fp8 ones without a position, then bf16 rotary ones."""
SCALE_GROUP = 64
"""fp8 channels that share one scale byte."""
TOKEN_BYTES, TOKEN_SCALE_BYTES = NOPE_DIM + 2 * ROPE_DIM, 8
"""Bytes of an fp8_ds_mla token in the data area and in the scale area (7 scales and a zero)."""
INDEX_DIM, INDEX_SCALE_BYTES = 128, 4
"""fp8 channels of an index key, and the bytes of its fp32 scale."""


class CacheFormat(Enum):
    """How one entry is stored inside a block."""

    ROWS = "rows"  # [num_blocks, block_size, width] of a float dtype
    FP8_DS_MLA = "fp8_ds_mla"  # 448 fp8 + 64 bf16 a token, then 8 scale bytes a token (2.3)
    FP8_INDEX = "fp8_index"  # 128 fp8 an entry, then one fp32 scale an entry (2.5)


@dataclass(frozen=True)
class PagedCache:
    """One layer's pages.

    data        ROWS: [num_blocks, block_size, width], float, unit stride in width;
                FP8_*: uint8 [num_blocks, page bytes], unit stride in the page
    block_size  stored entries per block
    The byte distance between blocks is data.stride(0) times the element size, and nothing else: pages may be padded and
    other layers' pages may lie between two of this layer's.
    """

    data: torch.Tensor
    block_size: int
    format: CacheFormat = CacheFormat.ROWS
    fp8_format: Fp8Format | None = None

    def __post_init__(self) -> None:
        assert (self.format is CacheFormat.ROWS) == (self.fp8_format is None), (
            "fp8 caches, and only they, have an encoding"
        )

    @property
    def num_slots(self) -> int:
        return self.data.shape[0] * self.block_size
