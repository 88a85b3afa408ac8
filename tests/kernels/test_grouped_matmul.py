"""Rows times the matrix of their group, against float64."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.implementations import Implementation, implementations
from tests.support.poison import uninitialised_memory_poisoned

GROUPED = implementations("grouped_matmul.grouped_matmul")


@pytest.mark.parametrize("impl", GROUPED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize(
    ("counts", "columns", "channels"),
    [
        ([1], 16, 32),
        ([0, 0, 5, 0, 1, 17, 0], 72, 40),
        ([0] * 255 + [3], 64, 128),
        ([33, 0, 31], 130, 300),
    ],
)
def test_grouped_matmul(
    impl: Implementation, dtype: torch.dtype, counts: list[int], columns: int, channels: int
) -> None:
    generator = torch.Generator().manual_seed(3)
    rows, experts = sum(counts), len(counts)
    wide = torch.randn(rows, channels + 8, generator=generator).to(dtype)  # rows further apart than they are long
    x = wide[:, :channels]
    weight = torch.randn(experts, columns, channels, generator=generator).to(dtype)
    ends = torch.tensor(counts).cumsum(0)
    expert = torch.repeat_interleave(torch.arange(experts), torch.tensor(counts))
    expected = torch.einsum("mk,mnk->mn", x.double(), weight.double()[expert])
    with uninitialised_memory_poisoned():
        out = impl.op(wide.to(impl.device)[:, :channels], weight.to(impl.device), ends.to(impl.device))
    assert out.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    assert (out.cpu().double() - expected).abs().max() <= tolerance * max(1.0, expected.abs().max().item())


@pytest.mark.gpu
@pytest.mark.parametrize("impl", GROUPED[2:])
@pytest.mark.parametrize("tokens", [1, 8, 128, 2048])
def test_real_sizes_in_bf16(impl: Implementation, tokens: int) -> None:
    torch.manual_seed(0)
    experts, columns, channels = 256, 256, 4096
    x = torch.randn(tokens * 6, channels, device=impl.device, dtype=torch.bfloat16)
    weight = torch.randn(experts, columns, channels, device=impl.device, dtype=torch.bfloat16)
    expert = torch.randint(0, experts, (tokens * 6,), device=impl.device).sort().values
    ends = torch.searchsorted(expert, torch.arange(experts, device=impl.device), right=True)
    out = impl.op(x, weight, ends)
    for row in range(0, len(x), max(1, len(x) // 40)):
        expected = weight[expert[row]].double() @ x[row].double()
        assert (out[row].double() - expected).abs().max() < 1.0  # sums of 4,096 products near 64, rounded to bf16


@pytest.mark.parametrize("impl", GROUPED[1:2])
def test_what_does_not_fit_is_refused(impl: Implementation) -> None:
    from dsv4dist.errors import ShapeError

    x, ends = torch.zeros(2, 16), torch.tensor([2])
    with pytest.raises(ShapeError, match="experts"):
        impl.op(x, torch.zeros(1, 8, 12), ends)
    with pytest.raises(ShapeError, match="ends"):
        impl.op(x, torch.zeros(1, 8, 16), ends.float())
    with pytest.raises(ShapeError, match="rows"):
        impl.op(x.T, torch.zeros(1, 8, 2), ends)
