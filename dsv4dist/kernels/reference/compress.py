"""The compressor: per-token states, and the entries pooled from them (attention spec 1.5 and 4.5)."""

from __future__ import annotations

import torch

from dsv4dist.kernels.block_table import BlockTable
from dsv4dist.kernels.paged_cache import PagedCache
from dsv4dist.kernels.reference.norm import rms_norm
from dsv4dist.kernels.reference.pages import read_entries, write_entries
from dsv4dist.kernels.reference.rotary import rotate


def compress_state(
    kv_score: torch.Tensor, ape: torch.Tensor, positions: torch.Tensor, state: PagedCache, state_slots: torch.Tensor
) -> None:
    """Save every token's (kv, score + ape[position mod ratio]) to its state slot.

    kv_score   [T, 2 * width] fp32: kv channels, then gate scores
    ape        [ratio, width] fp32
    positions  [T]; state_slots [T], -1 = do not write
    """
    ratio, width = ape.shape
    score = kv_score[:, width:] + ape[positions.long() % ratio]
    write_entries(state, state_slots, torch.cat((kv_score[:, :width], score), dim=-1))


def compress_store(
    state: PagedCache,
    state_table: BlockTable,
    token_to_req: torch.Tensor,
    positions: torch.Tensor,
    state_slots: torch.Tensor,
    norm_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    cache: PagedCache,
    entry_slots: torch.Tensor,
    ratio: int,
    overlap: int,
    eps: float,
) -> None:
    """Pool, norm, rotate and store the entry of every token that completes one; all states must be saved before.

        state, state_table  fp32 states of `compress_state`, and where each request keeps them
        token_to_req, positions, state_slots  [T]; a token with state slot -1 makes no entry
        norm_weight         [d] fp32
        entry_slots         [T] slot of the entry that the token completes, -1 where it completes none
        overlap             windows pooled: 2 = the previous one (first d channels) and its own (last d), 1 = its own
    The entry is rotated at the first position of its own window.
    """
    rows = torch.nonzero((entry_slots >= 0) & (state_slots >= 0)).flatten()
    if rows.numel() == 0:
        return
    dim, last = norm_weight.shape[0], positions[rows].long()
    taps = last.unsqueeze(1) + torch.arange(1 - overlap * ratio, 1, device=last.device)
    req = token_to_req[rows].unsqueeze(1).expand_as(taps)
    states = read_entries(state, state_table.slots(req, taps))
    kv, score = states.chunk(2, dim=-1)
    if overlap == 2:
        previous = torch.arange(2 * ratio, device=last.device).view(1, -1, 1) < ratio
        kv = torch.where(previous, kv[..., :dim], kv[..., dim:])
        score = torch.where(previous, score[..., :dim], score[..., dim:])
    before_start = (taps < 0).unsqueeze(-1)
    kv, score = kv.masked_fill(before_start, 0.0), score.masked_fill(before_start, float("-inf"))
    pooled = (torch.softmax(score, dim=1) * kv).sum(dim=1)
    first = last - (ratio - 1)
    write_entries(cache, entry_slots[rows], rotate(rms_norm(pooled, norm_weight, eps), first, cos_sin))
