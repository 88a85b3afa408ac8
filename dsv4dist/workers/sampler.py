"""Logits to token ids, the same on every rank, from a counter-based generator keyed by (seed, position)."""

from __future__ import annotations

import torch

from dsv4dist.workers.executor import NO_TOKEN

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox_uniform(seed: torch.Tensor, position: torch.Tensor, count: int) -> torch.Tensor:
    """Uniform numbers in (0, 1), fp64 [rows, count]: word 0 of Philox4x32-10 at counter (i, position, 0, 0).

        seed      [rows, 2] integer, low and high half of the key
        position  [rows] integer
    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
    """
    rows = seed.shape[0]
    key = [seed[:, i : i + 1].long() & _MASK for i in (0, 1)]
    index = torch.arange(count, device=seed.device).expand(rows, count)
    zero = torch.zeros_like(index)
    words = [index, (position.long() & _MASK).unsqueeze(1).expand(rows, count), zero, zero]
    for _ in range(_ROUNDS):
        low, high = (words[i] * multiplier for i, multiplier in zip((0, 2), _MULTIPLIERS, strict=True))
        words = [
            ((high >> 32) & _MASK) ^ words[1] ^ key[0],
            high & _MASK,
            ((low >> 32) & _MASK) ^ words[3] ^ key[1],
            low & _MASK,
        ]
        key = [(one + step) & _MASK for one, step in zip(key, _KEY_STEPS, strict=True)]
    return (words[0].double() + 0.5) / 2.0**32


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    top_k: torch.Tensor,
    seed: torch.Tensor,
    positions: torch.Tensor,
    *,
    all_greedy: bool = False,
) -> torch.Tensor:
    """One token per row, int64 [S]; NO_TOKEN where the largest logit is not finite, so that there is no choice.

        logits       [S, V] fp32
        temperature  [S] fp32; 0 = the largest logit, the lowest token on ties
        top_p        [S] fp32 in (0, 1]; top_k [S], 0 = all tokens: sampling is among the likeliest tokens only
        seed         [S, 2]; positions [S]: absolute position of the token to be sampled
        all_greedy   the caller knows that all temperatures are 0, which saves what drawing costs
    Sampling adds Gumbel noise to the log-probabilities and takes the largest, so that a rounding difference between two
    runs changes a token only where two noisy values nearly tie.
    """
    peak, largest = logits.max(dim=-1)  # NaN counts as the largest
    largest = torch.where(peak.abs() < float("inf"), largest, NO_TOKEN)
    if all_greedy:
        return largest
    drawn = temperature > 0
    # In float64: a tiny temperature would turn several logits into infinities that tie.
    scaled = logits.double() / torch.where(drawn, temperature, 1.0).double().unsqueeze(1)
    kept = _keep_likeliest(scaled, top_p.double(), top_k)
    noise = -torch.log(-torch.log(philox_uniform(seed, positions, logits.shape[1])))
    chosen = (scaled + noise).masked_fill(~kept, float("-inf")).argmax(dim=-1)
    return torch.where(drawn & (largest != NO_TOKEN), chosen, largest)


def _keep_likeliest(scaled: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Which tokens stay: at most top_k of them, and of those the likeliest that reach top_p together."""
    ranked, order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[1], device=scaled.device)
    within_k = (top_k.unsqueeze(1) <= 0) | (rank < top_k.unsqueeze(1))
    likelihood = torch.softmax(ranked.masked_fill(~within_k, float("-inf")), dim=-1)
    before = likelihood.cumsum(dim=-1) - likelihood
    within_p = (before < top_p.unsqueeze(1)) | (rank == 0)
    return torch.zeros_like(scaled, dtype=torch.bool).scatter_(1, order, within_k & within_p)


def token_logprobs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Log-probability fp32 [rows] of `targets` [rows] under `logits` [rows, V]; NaN where the target is negative."""
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    chosen = logprobs.gather(1, targets.clamp_min(0).long().unsqueeze(1)).squeeze(1)
    return chosen.masked_fill(targets < 0, float("nan")).float()
