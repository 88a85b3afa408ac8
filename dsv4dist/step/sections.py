"""Where each part of a step packet lies: one table for the driver that packs and the device that reads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dsv4dist.cache.groups import GROUP_NAMES

COUNTERS = ("magic", "version", "generation", "step_id", "kind", "num_steps", "num_requests", "num_tokens")
HEADER = (*COUNTERS, *(f"{name}.width" for name in GROUP_NAMES))
"""The words before the first section."""


@dataclass(frozen=True)
class PacketShape:
    """The numbers in the header that decide the size of every section."""

    num_requests: int
    num_tokens: int
    widths: tuple[int, ...]  # block table columns of each of GROUP_NAMES

    def sections(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every section, in buffer order. R requests, T tokens:

        query_start_loc [R + 1]  prefix sums of the requests' tokens in this step
        seq_lens        [R]      tokens of each request including this step's
        row_kind        [R]      a RowKind
        num_drafts      [R]      the request's last rows that hold proposed tokens, to be verified
        temperature, top_p [R]   float32 bits; temperature 0 = greedy
        top_k           [R]      0 = no limit
        seed            [R, 2]   low and high half
        token_ids       [T]
        targets         [T]      the token whose log-probability a SCORE row asks for, -1 = none
        GROUP.first_block [R], GROUP.blocks [R, width]   see kernels.block_table
        """
        r, t = self.num_requests, self.num_tokens
        shapes: dict[str, tuple[int, ...]] = {
            "query_start_loc": (r + 1,),
            "seq_lens": (r,),
            "row_kind": (r,),
            "num_drafts": (r,),
            "temperature": (r,),
            "top_p": (r,),
            "top_k": (r,),
            "seed": (r, 2),
            "token_ids": (t,),
            "targets": (t,),
        }
        for name, width in zip(GROUP_NAMES, self.widths, strict=True):
            shapes[f"{name}.first_block"] = (r,)
            shapes[f"{name}.blocks"] = (r, width)
        return shapes

    @property
    def num_words(self) -> int:
        return len(HEADER) + sum(math.prod(shape) for shape in self.sections().values())


def split_sections(buffer: Any, shape: PacketShape) -> dict[str, Any]:
    """Views of every section of a packet, for a numpy array or a torch tensor of it."""
    views, offset = {}, len(HEADER)
    for name, dims in shape.sections().items():
        size = math.prod(dims)
        views[name] = buffer[offset : offset + size].reshape(dims)
        offset += size
    return views
