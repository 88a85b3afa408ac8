"""Memory that cannot be read by accident: NaN for floats, all bits set for bytes, huge values for integers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def poison_(tensor: torch.Tensor) -> torch.Tensor:
    """Fill `tensor` in place with the value of its dtype that does the most harm when read; returns it."""
    if tensor.dtype == torch.uint8:
        return tensor.fill_(0xFF)
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e8m0fnu):
        tensor.view(torch.uint8).fill_(0x80 if tensor.dtype == torch.float8_e4m3fnuz else 0xFF)
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    # Far beyond every tensor, yet products with a stride still fit 64 bits: the read fails instead of wrapping around.
    return tensor.fill_(min(torch.iinfo(tensor.dtype).max, 2**40))


def poisoned(*shape: int, dtype: torch.dtype, device: str | torch.device = "cpu") -> torch.Tensor:
    """A new contiguous tensor full of poison."""
    return poison_(torch.empty(shape, dtype=dtype, device=device))


@contextmanager
def uninitialised_memory_poisoned() -> Iterator[None]:
    """Inside, torch.empty and its relatives return NaN (floats) or the largest value (integers)."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = fill
