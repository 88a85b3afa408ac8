"""The indexer: queries, scores of compressed entries, and the selection (attention spec 1.6, 4.6 and 4.8)."""

from __future__ import annotations

import torch

from dsv4dist.kernels.block_table import ABSENT, BlockTable
from dsv4dist.kernels.fp8 import quantise_index_rows
from dsv4dist.kernels.paged_cache import Fp8Format, PagedCache
from dsv4dist.kernels.reference.key_lists import ragged
from dsv4dist.kernels.reference.pages import read_entries
from dsv4dist.kernels.reference.rotary import rotate

LOGITS_ELEMENTS = 1 << 24
"""Bound on [rows, heads, entries] held at once; results do not depend on it."""


def indexer_query(
    q: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    fp8_format: Fp8Format | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the index queries, quantise them where the keys are fp8, and scale their head weights.

        q           [T, Hi, Di]; weights [T, Hi]; positions [T]; cos_sin [P, rotary width] fp32
        fp8_format  the keys' encoding: one power-of-two scale per token and head joins the weights; None = no fp8
    Returns q, rotated, in its dtype or the encoding's, and fp32 weights ((w * q scale) * Di^-0.5) * Hi^-0.5.
    """
    _, heads, dim = q.shape
    rotated, head_weights = rotate(q, positions, cos_sin), weights.float()
    if fp8_format is not None:
        data, scale = quantise_index_rows(rotated, fp8_format)
        return data.view(fp8_format.torch_dtype), head_weights * scale * dim**-0.5 * heads**-0.5
    return rotated.to(q.dtype), head_weights * dim**-0.5 * heads**-0.5


def indexer_logits(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: PagedCache,
    table: BlockTable,
    token_to_req: torch.Tensor,
    visible_lens: torch.Tensor,
) -> torch.Tensor:
    """Score every visible compressed entry for every token: sum over heads of relu(q . k) times the head's weight.

        q             [T, Hi, Di], float or the keys' fp8 dtype; weights [T, Hi] fp32
        cache, table  the index keys and where each request keeps them
        token_to_req  [T], ascending; visible_lens [T]
    Returns fp32 [T, max(visible_lens)]; columns at or beyond a row's visible_lens are undefined.
    """
    total = int(visible_lens.max()) if visible_lens.numel() else 0
    logits = torch.full((q.shape[0], total), float("nan"), device=q.device)
    for req in torch.unique(token_to_req).tolist() if total else []:
        rows = torch.nonzero(token_to_req == req).flatten()
        length = int(visible_lens[rows].max())
        if length == 0:
            continue
        entry = torch.arange(length, device=q.device)
        keys = read_entries(cache, table.slots(torch.full_like(entry, req), entry)).float()
        for part in torch.split(rows, max(1, LOGITS_ELEMENTS // (q.shape[1] * length))):
            scores = torch.relu(torch.einsum("thd,ed->the", q[part].float(), keys))
            logits[part, :length] = torch.einsum("the,th->te", scores, weights[part])
    return logits


def topk_entries(logits: torch.Tensor, lens: torch.Tensor, k: int) -> torch.Tensor:
    """The `k` largest entries of each row among its first lens[t] columns, ascending; NaN counts as -inf.

    Ties go to the lowest entry. Returns int32 [T, k], the valid entries first, then -1.
    """
    rows, width = logits.shape
    out = torch.full((rows, k), ABSENT, dtype=torch.int32, device=logits.device)
    take = min(k, width)
    if take == 0:
        return out
    column = torch.arange(width, device=logits.device)
    outside = column >= lens.unsqueeze(1)
    ranked = logits.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    ranked = ranked.masked_fill(outside, float("-inf"))
    chosen = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, :take]
    chosen = torch.where(chosen < lens.unsqueeze(1), chosen, width).sort(dim=-1).values
    out[:, :take] = torch.where(chosen < width, chosen, ABSENT).to(torch.int32)
    return out


def select_key_list(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: PagedCache,
    table: BlockTable,
    token_to_req: torch.Tensor,
    visible_lens: torch.Tensor,
    k: int,
    max_entries: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots of each token's `k` best entries by `indexer_logits`, as a ragged list (indices, indptr), int32 (3.5).

    They ascend by entry; one that is not there is listed as -1.
    max_entries  an upper bound of visible_lens, which other implementations size their launches by
    """
    logits = indexer_logits(q, weights, cache, table, token_to_req, visible_lens)
    assert logits.shape[1] <= max_entries, f"{logits.shape[1]} visible entries; at most {max_entries} were announced"
    entries, indptr = ragged(topk_entries(logits, visible_lens, k))
    return table.slots(token_to_req.repeat_interleave(indptr.diff()), entries).to(torch.int32), indptr
