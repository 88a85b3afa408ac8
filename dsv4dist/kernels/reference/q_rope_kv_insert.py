"""Head norm and rotation of the query, rotation of the key, and its insertion into the window cache."""

from __future__ import annotations

import torch

from dsv4dist.kernels.paged_cache import PagedCache
from dsv4dist.kernels.reference.norm import rms_norm
from dsv4dist.kernels.reference.pages import write_entries
from dsv4dist.kernels.reference.rotary import rotate


def q_rope_kv_insert(
    q: torch.Tensor,
    kv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    cache: PagedCache,
    slots: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Norm and rotate every query head; rotate kv and store it (attention spec 4.1).

        q          [T, h, D], each head normed without a weight, then rotated, one rounding at the end
        kv         [T, D], already normed; row t goes to slots[t] of the cache, -1 = nowhere
        positions  [T] integer; cos_sin [P, rotary width] fp32
    Returns the new q [T, h, D] in its dtype; writes the cache.
    """
    write_entries(cache, slots, rotate(kv, positions, cos_sin))
    return rotate(rms_norm(q.float(), None, eps), positions, cos_sin).to(q.dtype)
