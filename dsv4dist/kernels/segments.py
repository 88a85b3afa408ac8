"""The keys of one attention call: a cache and, per query, a ragged list of its slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv4dist.kernels.paged_cache import PagedCache


@dataclass(frozen=True)
class Segment:
    """Query i attends to the slots indices[indptr[i]:indptr[i + 1]] of `cache`.

    indices  [>= indptr[Q]] int32 slots; those outside [0, cache.num_slots) count as absent
    indptr   [Q + 1] int32, first 0, ascending
    """

    cache: PagedCache
    indices: torch.Tensor
    indptr: torch.Tensor
