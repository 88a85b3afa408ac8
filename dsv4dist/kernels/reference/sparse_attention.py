"""Attention of each query over its own slots of two caches, with one softmax (attention spec 1.2 and 4.3)."""

from __future__ import annotations

import torch

from dsv4dist.kernels.block_table import ABSENT
from dsv4dist.kernels.reference.pages import read_entries
from dsv4dist.kernels.reference.rotary import rotate
from dsv4dist.kernels.segments import Segment

GATHER_ELEMENTS = 1 << 24
"""Bound on gathered key elements held at once."""


def sparse_attention(
    q: torch.Tensor,
    main: Segment,
    extra: Segment | None,
    sink: torch.Tensor | None,
    scale: float,
    positions: torch.Tensor | None = None,
    cos_sin: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend every query to its own slots of both segments; keys are values; the sink joins the denominator only.

    Q queries, h local heads, D channels:
        q          [Q, h, D]
        main       the window cache's keys; extra the compressed cache's, or None
        sink       [>= h] fp32, natural-log score units, or None; -inf = none
        positions  [Q] with cos_sin [P, rotary width] fp32: the output is rotated back by the query's position
        out        [Q, h, D] of q's dtype, written and returned; allocated if None; exact 0 where a query has no key
    NaN in a stored channel counts as 0; absent slots are never read.
    """
    num_queries, num_heads, dim = q.shape
    out = torch.empty_like(q) if out is None else out
    segments = [main] if extra is None else [main, extra]
    slots = [_dense_slots(segment) for segment in segments]
    width = sum(one.shape[1] for one in slots)
    step = max(1, GATHER_ELEMENTS // max(1, width * dim))
    for start in range(0, num_queries, step):
        rows = slice(start, min(start + step, num_queries))
        keys = torch.cat(
            [read_entries(s.cache, one[rows]).float() for s, one in zip(segments, slots, strict=True)], dim=1
        )
        present = torch.cat(
            [(one[rows] >= 0) & (one[rows] < s.cache.num_slots) for s, one in zip(segments, slots, strict=True)], dim=1
        )
        keys = keys.nan_to_num(nan=0.0, posinf=float("inf"), neginf=float("-inf"))
        result = _attend(q[rows].float(), keys, present, None if sink is None else sink[:num_heads].float(), scale)
        if positions is not None and cos_sin is not None:
            result = rotate(result, positions[rows], cos_sin, inverse=True)
        out[rows] = result.to(q.dtype)
    return out


def _dense_slots(segment: Segment) -> torch.Tensor:
    """The ragged list as [Q, longest] int64, -1 behind each row's end."""
    start, end = segment.indptr[:-1].long(), segment.indptr[1:].long()
    longest = int((end - start).max()) if start.numel() else 0
    column = start.unsqueeze(1) + torch.arange(longest, device=start.device)
    inside = column < end.unsqueeze(1)
    if longest == 0:
        return column
    return torch.where(inside, segment.indices[torch.where(inside, column, 0)].long(), ABSENT)


def _attend(
    q: torch.Tensor, keys: torch.Tensor, present: torch.Tensor, sink: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """One softmax over keys [n, K, D] where present [n, K], for q [n, h, D] in fp32."""
    scores = torch.matmul(q, keys.transpose(1, 2)) * scale
    scores = scores.masked_fill(~present.unsqueeze(1), float("-inf"))
    columns = [scores]
    if sink is not None:
        columns.append(sink.view(1, -1, 1).expand(q.shape[0], -1, 1))
    top = torch.cat(columns, dim=-1).amax(dim=-1, keepdim=True) if scores.shape[-1] or sink is not None else None
    if top is None:
        return torch.zeros_like(q)
    top = top.masked_fill(top == float("-inf"), 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(dim=-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink.view(1, -1, 1) - top)
    return torch.matmul(weights, keys) / total.clamp_min(1e-30)
