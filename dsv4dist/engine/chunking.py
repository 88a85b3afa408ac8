"""How much of a prompt one step takes. Pure."""

from __future__ import annotations

CHUNK_ALIGNMENT = 128
"""Prompts are cut at multiples of this, so that chunks end where compressed entries do."""


def chunk_tokens(start: int, left: int, budget: int, is_first: bool) -> int:
    """Tokens of a prompt to run next; 0 = none in this step.

    start     tokens of it that are computed
    left      tokens that are not
    budget    tokens that the step still takes
    is_first  no other prompt runs in this step yet: it takes what it can get, so that a small budget, or one that
              decode rows use up, cannot hold prompts up for ever
    A cut prompt gets at least CHUNK_ALIGNMENT tokens otherwise: a smaller piece costs a whole step later.
    """
    if left <= budget:
        return left
    if budget <= 0:
        return 0
    aligned = (start + budget) // CHUNK_ALIGNMENT * CHUNK_ALIGNMENT - start
    if aligned >= CHUNK_ALIGNMENT:
        return aligned
    return budget if budget >= CHUNK_ALIGNMENT or is_first else 0
