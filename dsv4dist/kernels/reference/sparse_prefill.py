"""Attention of each query over its own rows of a gathered workspace (attention spec 4.4)."""

from __future__ import annotations

import torch

from dsv4dist.kernels.paged_cache import PagedCache
from dsv4dist.kernels.reference.sparse_attention import sparse_attention
from dsv4dist.kernels.segments import Segment


def sparse_prefill(
    q: torch.Tensor,
    rows: torch.Tensor,
    indices: torch.Tensor,
    indptr: torch.Tensor,
    sink: torch.Tensor | None,
    scale: float,
    positions: torch.Tensor | None = None,
    cos_sin: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend query i to rows[indices[indptr[i]:indptr[i + 1]]]; rows are keys and values; the sink joins the sum only.

    n queries, h local heads, D channels:
        q          [n, h, D]
        rows       [N, D] of a float dtype, finite where listed: what the gather wrote
        indices    int32 rows; those outside [0, N) are absent; indptr [n + 1] int32, first 0, ascending
        sink       [>= h] fp32, natural-log score units, or None; -inf = none
        positions  [n] with cos_sin [P, rotary width] fp32: the output is rotated back by the query's position
        out        [n, h, D] of q's dtype, written and returned; allocated if None; exact 0 where a query has no row
    This is the decode operation over one cache whose blocks hold one row each.
    """
    cache = PagedCache(rows.unsqueeze(1), 1)
    return sparse_attention(q, Segment(cache, indices, indptr), None, sink, scale, positions, cos_sin, out)
