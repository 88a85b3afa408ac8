"""Products with an fp32 result, against float64."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.implementations import Implementation, implementations
from tests.support.poison import uninitialised_memory_poisoned

PRODUCT = implementations("vector.product_in_fp32")


@pytest.mark.parametrize("implementation", PRODUCT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns", "channels"), [(1, 130, 384), (1, 16, 5000), (3, 40, 200)])
def test_product_in_fp32(
    implementation: Implementation, dtype: torch.dtype, rows: int, columns: int, channels: int
) -> None:
    """Nothing is rounded to the operands' type; a weight that is a part of a larger one."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, channels, generator=generator).to(dtype)
    weight = torch.randn(columns + 8, channels, generator=generator).to(dtype)[8:]
    expected = x.double() @ weight.double().T
    with uninitialised_memory_poisoned():
        found = implementation.op(x.to(implementation.device), weight.to(implementation.device))
    assert found.dtype == torch.float32
    tolerance = 1e-5 if dtype is not torch.float32 or implementation.device.type == "cpu" else 1e-3
    assert float((found.cpu().double() - expected).norm() / expected.norm()) < tolerance
