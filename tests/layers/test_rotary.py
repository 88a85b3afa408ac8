"""Rotary frequencies against published check values, and rotation against complex numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsv4dist.config.model import RotaryConfig
from dsv4dist.kernels.reference.rotary import rotate
from dsv4dist.layers.rotary import rotary_frequencies, rotary_table

YARN = RotaryConfig(160000.0, factor=16.0)


@pytest.mark.parametrize(
    ("rotary", "pair", "value"),
    [
        (YARN, 0, 1.0),
        (YARN, 1, 0.687656022),
        (YARN, 15, 3.63553858e-3),
        (YARN, 16, 2.265625e-3),
        (YARN, 20, 2.96977778e-4),
        (YARN, 24, 1.953125e-5),
        (YARN, 25, 5.37231267e-6),
        (YARN, 31, 5.68052904e-7),
        (RotaryConfig(10000.0), 1, 0.749894209),
        (RotaryConfig(10000.0), 16, 0.01),
        (RotaryConfig(10000.0), 31, 1.33352143e-4),
    ],
)
def test_check_values(rotary: RotaryConfig, pair: int, value: float) -> None:
    assert rotary_frequencies(rotary, 64)[pair].item() == pytest.approx(value, rel=1e-7)


@pytest.mark.parametrize("heads", [None, 3])
def test_rotation_multiplies_pairs_by_a_unit_complex_number(heads: int | None) -> None:
    torch.manual_seed(0)
    shape = (5, 40) if heads is None else (5, heads, 40)
    x, positions = torch.randn(shape), torch.tensor([0, 3, 7, 7, 99])
    table = rotary_table(RotaryConfig(10000.0), 16, 100, torch.device("cpu"))
    turned = rotate(x, positions, table)
    angle = np.outer(positions.numpy(), rotary_frequencies(RotaryConfig(10000.0), 16).numpy())
    pairs = x.numpy()[..., -16:].astype(np.float64)
    unit = np.exp(1j * angle).reshape(5, *([1] * (x.dim() - 2)), 8)
    expected = (pairs[..., ::2] + 1j * pairs[..., 1::2]) * unit
    assert np.abs(turned.numpy()[..., -16::2] - expected.real).max() < 1e-5
    assert np.abs(turned.numpy()[..., -15::2] - expected.imag).max() < 1e-5
    assert torch.equal(turned[..., :-16], x[..., :-16])
    assert torch.allclose(rotate(turned, positions, table, inverse=True), x, atol=1e-6)
