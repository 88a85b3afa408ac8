"""The grouped projection against float64 sums, in floats and in fp8, and its lossless scales."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernels.implementations import Implementation, implementations
from tests.support.e4m3 import random_bytes, values_of
from tests.support.poison import poisoned, uninitialised_memory_poisoned

from dsv4dist.errors import ShapeError, UnsupportedError  # isort: skip
from dsv4dist.kernels._triton import grouped_wo_a as triton_wo_a  # isort: skip
from dsv4dist.kernels.paged_cache import Fp8Format  # isort: skip

WO_A = implementations("grouped_wo_a.grouped_wo_a")
SCALES = implementations("grouped_wo_a.exponent_scales")[:1]
QUANTISE = implementations("grouped_wo_a.quantise_groups_of_128")
OCP = Fp8Format.OCP


def relative(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found.cpu().double() - want).norm() / want.norm())


def power(byte: torch.Tensor) -> torch.Tensor:
    """float64 2^(byte - 127)."""
    return torch.ldexp(torch.ones((), dtype=torch.float64), byte.double() - 127)


def expected(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """float64 [T, g * Lo], one matrix a group."""
    return torch.cat([x[:, group] @ weight[group].T for group in range(len(weight))], dim=1)


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values as a part of wider rows whose rest is poison, as a cut of padded heads."""
    wide = poisoned(x.shape[0], x.shape[1] + 1, x.shape[2], dtype=x.dtype)
    wide[:, : x.shape[1]] = x
    return wide


@pytest.mark.parametrize("implementation", WO_A)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("tokens", "groups", "rows", "channels"), [(1, 1, 64, 128), (17, 3, 48, 200)])
def test_float_weights(
    implementation: Implementation, dtype: torch.dtype, tokens: int, groups: int, rows: int, channels: int
) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, groups, channels, generator=generator).to(dtype)
    weight = torch.randn(groups, rows, channels, generator=generator).to(dtype)
    device = implementation.device
    with uninitialised_memory_poisoned():
        found = implementation.op(strided(x).to(device)[:, :groups], weight.to(device))
    assert found.shape == (tokens, groups * rows)
    assert found.dtype == dtype
    assert relative(found, expected(x.double(), weight.double())) < (1e-5 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("implementation", WO_A)
@pytest.mark.parametrize("fp8_format", list(Fp8Format))
@pytest.mark.parametrize("kind", ["uint8", "e8m0", "fp32"])
def test_fp8_weights(implementation: Implementation, fp8_format: Fp8Format, kind: str) -> None:
    """Quantised input and weight, two groups, every way to hand over the same scales."""
    generator = torch.Generator().manual_seed(4)
    tokens, groups, rows, channels = 3, 2, 128, 256
    x = random_bytes((tokens, groups, channels), fp8_format, generator)
    weight = random_bytes((groups, rows, channels), fp8_format, generator)
    x_byte = torch.randint(120, 130, (tokens, groups, 2), dtype=torch.uint8, generator=generator)
    byte = torch.randint(120, 130, (groups, 1, 2), dtype=torch.uint8, generator=generator)
    scale = {"uint8": byte, "e8m0": byte.view(torch.float8_e8m0fnu), "fp32": power(byte).float()}[kind]
    x_values = values_of(x, fp8_format) * power(x_byte).repeat_interleave(128, 2)
    weight_values = values_of(weight, fp8_format) * power(byte).repeat_interleave(128, 1).repeat_interleave(128, 2)
    device = implementation.device
    x8, w8 = (t.view(fp8_format.torch_dtype).to(device) for t in (x, weight))
    with uninitialised_memory_poisoned():
        found = implementation.op(
            x8, w8, scale.to(device), x_byte.to(device), fp8_format=fp8_format, out_dtype=torch.float32
        )
    assert relative(found, expected(x_values, weight_values)) < (1e-3 if device.type == "cuda" else 1e-6)


@pytest.mark.parametrize("implementation", WO_A)
def test_fp8_weights_of_a_float_input(implementation: Implementation) -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(5, 2, 256, generator=generator).to(torch.bfloat16)
    weight = random_bytes((2, 128, 256), OCP, generator)
    byte = torch.full((2, 1, 2), 120, dtype=torch.uint8)
    device = implementation.device
    with uninitialised_memory_poisoned():
        x_on = strided(x).to(device)[:, :2]
        found = implementation.op(x_on, weight.view(torch.float8_e4m3fn).to(device), byte.to(device))
    assert found.dtype == torch.bfloat16
    assert relative(found, expected(x.double(), values_of(weight, OCP) * 2.0**-7)) < 0.04


@pytest.mark.parametrize("implementation", QUANTISE)
@pytest.mark.parametrize("fp8_format", list(Fp8Format))
def test_quantiser(implementation: Implementation, fp8_format: Fp8Format) -> None:
    """The smallest power of two that fits the group, or the floor's, and values within half a step."""
    x = torch.randn(2, 2, 256, generator=torch.Generator().manual_seed(6)) * 5
    x[0, 0, :128] = 0
    x[0, 1, 128:] = 448.0  # exactly the limit of OCP
    x[1, 1, 3] = math.inf
    data, byte = implementation.op(x.to(implementation.device), fp8_format)
    data, byte = data.cpu().view(torch.uint8), byte.cpu()
    for index in [(t, g, b) for t in range(2) for g in range(2) for b in range(2)]:
        token, group, block = index
        part = x[token, group, block * 128 : (block + 1) * 128].double()
        codes = data[token, group, block * 128 : (block + 1) * 128]
        if not part.isfinite().all():
            assert byte[index] == 255
            assert not codes.any()
            continue
        amax = max(float(part.abs().max()), float(torch.tensor(1e-8)))
        assert int(byte[index]) == 127 + math.ceil(math.log2(amax / fp8_format.quant_max))
        error = (values_of(codes, fp8_format) * power(byte[index]) - part).abs()
        assert bool((error <= part.abs() / 16 + power(byte[index]) * 2.0**-9).all())


@pytest.mark.parametrize("implementation", SCALES)
def test_scales_pass_unchanged_or_not_at_all(implementation: Implementation) -> None:
    convert = implementation.op
    byte = torch.tensor([[1, 120, 127, 134, 254]], dtype=torch.uint8)
    assert torch.equal(convert(byte), byte)
    assert torch.equal(convert(byte.view(torch.float8_e8m0fnu)), byte)
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(convert(power(byte).to(dtype)), byte)
    for bad in (3.0, 0.75 * 2**-5, 0.0, -1.0, math.inf, math.nan):
        with pytest.raises(UnsupportedError, match="power of two"):
            convert(torch.tensor([[1.0, bad]]))
    with pytest.raises(UnsupportedError, match="int32"):
        convert(torch.ones(1, 1, dtype=torch.int32))
    with pytest.raises(UnsupportedError, match="float64"):
        convert(torch.tensor([[1.0 + 2.0**-40]], dtype=torch.float64))


@pytest.mark.parametrize("implementation", WO_A)
def test_nothing_to_do(implementation: Implementation) -> None:
    device = implementation.device
    x, weight = torch.zeros(0, 2, 128, device=device), torch.zeros(2, 64, 128, device=device)
    assert implementation.op(x, weight).shape == (0, 128)


@pytest.mark.parametrize("implementation", WO_A)
def test_refuses_ragged_fp8_blocks(implementation: Implementation) -> None:
    device = implementation.device
    x, byte = torch.zeros(1, 1, 200, device=device), torch.full((1, 1, 2), 127, dtype=torch.uint8, device=device)
    weight = torch.zeros(1, 128, 200, device=device).to(torch.float8_e4m3fn)
    with pytest.raises(ShapeError, match="whole 128 x 128 block"):
        implementation.op(x, weight, byte)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 31, 512])
def test_model_shapes(tokens: int) -> None:
    x = torch.randn(tokens, 2, 4096, device="cuda").to(torch.bfloat16)
    weight = torch.randn(2, 1024, 4096, device="cuda").to(torch.bfloat16)
    found = triton_wo_a.grouped_wo_a(x, weight)
    assert relative(found, expected(x.double(), weight.double()).cpu()) < 4e-3
