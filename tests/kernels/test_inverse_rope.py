"""Rotating back in place: values, untouched channels, round trip, and the index query's forward rotation beside it."""

from __future__ import annotations

import pytest
import torch

from dsv4dist.errors import ShapeError
from dsv4dist.kernels.reference.rotary import rotate
from tests.kernels.implementations import Implementation, implementations
from tests.support.pages import rotated

IMPLEMENTATIONS = implementations("inverse_rope.inverse_rope")[1:]


def rotate_back(impl: Implementation, x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """What the operation makes of `x`; the reference is `rotate` and one rounding."""
    if impl.is_reference:
        return rotate(x, positions, cos_sin, inverse=True).to(x.dtype)
    x = x.clone() if x.is_contiguous() else x
    impl.op(x, positions, cos_sin)
    return x


@pytest.mark.parametrize("impl", [implementations("rotary.rotate")[0], *IMPLEMENTATIONS])
@pytest.mark.parametrize(("count", "heads"), [(0, 1), (1, 8), (3, 5), (65, 2)])
@pytest.mark.parametrize(("width", "rotary", "dtype"), [(512, 64, torch.bfloat16), (96, 16, torch.float32)])
def test_values(impl: Implementation, count: int, heads: int, width: int, rotary: int, dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(count)
    x = torch.randn(count, heads, width, generator=source).to(dtype)
    x[:, :, 0] = float("inf")
    positions = torch.randint(0, 20, (count,), generator=source)
    cos_sin = torch.randn(20, rotary, generator=source)
    got = rotate_back(impl, x.to(impl.device), positions.to(impl.device), cos_sin.to(impl.device)).cpu()
    nope = width - rotary
    integer = torch.int16 if dtype is torch.bfloat16 else torch.int32
    assert torch.equal(got[..., :nope].view(integer), x[..., :nope].view(integer)), "bits before the rotary channels"
    step = 2**-8 * 1.01 if dtype is torch.bfloat16 else 1e-6
    for token in range(count):
        expected = rotated(x[token], cos_sin[positions[token]], inverse=True)
        torch.testing.assert_close(got[token, :, nope:].double(), expected[:, nope:], rtol=step, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_strided_rows_and_what_lies_between_them(impl: Implementation) -> None:
    whole = torch.randn(4, 6, 160, generator=torch.Generator().manual_seed(0)).to(impl.device)
    before, part = whole.clone(), whole[1:3, 2:5, 16:144]
    positions, cos_sin = torch.tensor([3, 0], device=impl.device), torch.randn(4, 32).to(impl.device)
    expected = rotate(part.clone(), positions, cos_sin, inverse=True)
    impl.op(part, positions, cos_sin)
    torch.testing.assert_close(part, expected, rtol=1e-6, atol=1e-6)
    before[1:3, 2:5, 16:144] = part
    assert torch.equal(before, whole)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_undoes_the_rotation(impl: Implementation) -> None:
    x = torch.randn(7, 2, 64, generator=torch.Generator().manual_seed(0))
    angle = torch.rand(30, 16, generator=torch.Generator().manual_seed(1)) * 7
    cos_sin, positions = torch.cat((angle.cos(), angle.sin()), 1), torch.arange(7) * 4
    turned = rotate(x, positions, cos_sin).to(impl.device)
    impl.op(turned, positions.to(impl.device), cos_sin.to(impl.device))
    torch.testing.assert_close(turned.cpu(), x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_wrong_input_is_refused(impl: Implementation) -> None:
    x = torch.zeros(2, 1, 64, device=impl.device)
    with pytest.raises(ShapeError, match="positions"):
        impl.op(x, torch.zeros(3, dtype=torch.int64, device=impl.device), torch.zeros(4, 16, device=impl.device))
    with pytest.raises(ShapeError, match="rotary width: expected even, at most the 64 channels, got 128"):
        impl.op(x, torch.zeros(2, dtype=torch.int64, device=impl.device), torch.zeros(4, 128, device=impl.device))
