"""e4m3 from its definition: sign, exponent, mantissa (attention spec 2.1). Shares nothing with the package's tables."""

from __future__ import annotations

import math

import torch

from dsv4dist.kernels.paged_cache import Fp8Format


def byte_values(fp8_format: Fp8Format) -> torch.Tensor:
    """float64 value of every byte, [256]; NaN where the byte is no number."""
    bias = 7 if fp8_format is Fp8Format.OCP else 8
    values = []
    for byte in range(256):
        exponent, mantissa = byte >> 3 & 15, byte & 7
        size = math.ldexp(mantissa / 8, 1 - bias) if exponent == 0 else math.ldexp(1 + mantissa / 8, exponent - bias)
        nan = (byte & 0x7F) == 0x7F if fp8_format is Fp8Format.OCP else byte == 0x80
        values.append(math.nan if nan else -size if byte & 0x80 else size)
    return torch.tensor(values, dtype=torch.float64)


def random_bytes(shape: tuple[int, ...], fp8_format: Fp8Format, generator: torch.Generator) -> torch.Tensor:
    """uint8 codes of numbers from the whole range, none of them NaN."""
    data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    return data.masked_fill(byte_values(fp8_format)[data.long()].isnan(), 0x38)


def values_of(data: torch.Tensor, fp8_format: Fp8Format) -> torch.Tensor:
    """float64 values of uint8 or fp8 codes, any shape."""
    return byte_values(fp8_format)[data.cpu().view(torch.uint8).long()]
