"""Block-scaled fp8 linears against float64 sums over decoded bytes; the token quantiser against Python arithmetic."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernels.implementations import Implementation, implementations
from tests.support.e4m3 import byte_values, random_bytes, values_of
from tests.support.poison import poisoned, uninitialised_memory_poisoned

from dsv4dist.errors import ShapeError  # isort: skip
from dsv4dist.kernels._triton import fp8_linear as triton_linear  # isort: skip
from dsv4dist.kernels._triton.block_matmul import plan_splits  # isort: skip
from dsv4dist.kernels.paged_cache import Fp8Format  # isort: skip

LINEAR = implementations("fp8_linear.fp8_linear")
WEIGHT_ONLY = implementations("fp8_linear.fp8_weight_linear")
QUANTISE = implementations("fp8_linear.quantise_tokens")
OCP, FNUZ = Fp8Format.OCP, Fp8Format.FNUZ


def scales(rows: int, columns: int, kind: str, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Block scales of a kind, and their float64 values."""
    if kind == "fp32":
        scale = torch.rand(-(-rows // 128), -(-columns // 128), generator=generator) + 0.5
        return scale, scale.double()
    byte = torch.randint(120, 132, (-(-rows // 128), -(-columns // 128)), dtype=torch.uint8, generator=generator)
    return byte.view(torch.float8_e8m0fnu), torch.ldexp(torch.ones((), dtype=torch.float64), byte.double() - 127)


def expected(x: torch.Tensor, w: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
    """float64 product of values scaled element by element."""
    rows, columns = w.shape
    w = w * w_scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return (x * x_scale.repeat_interleave(128, 1)[:, :columns]) @ w.T


def relative(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found.cpu().double() - want).norm() / want.norm())


@pytest.mark.parametrize("implementation", LINEAR)
@pytest.mark.parametrize("fp8_format", list(Fp8Format))
@pytest.mark.parametrize(("rows", "columns", "channels"), [(1, 192, 256), (17, 130, 200), (3, 64, 1100)])
@pytest.mark.parametrize("kind", ["fp32", "e8m0"])
def test_quantised_input(
    implementation: Implementation, fp8_format: Fp8Format, rows: int, columns: int, channels: int, kind: str
) -> None:
    """Whole and ragged blocks, in both encodings; x a part of wider rows whose rest is poison."""
    generator = torch.Generator().manual_seed(rows)
    x = random_bytes((rows, channels), fp8_format, generator)
    w = random_bytes((columns, channels), fp8_format, generator)
    x_scale = torch.rand(rows, -(-channels // 128), generator=generator) + 0.5
    w_scale, w_values = scales(columns, channels, kind, generator)
    want = expected(values_of(x, fp8_format), values_of(w, fp8_format), x_scale.double(), w_values)
    wide = poisoned(rows, channels + 16, dtype=torch.uint8)
    wide[:, :channels] = x
    device = implementation.device
    x8, w8 = (t.view(fp8_format.torch_dtype).to(device) for t in (wide, w))
    with uninitialised_memory_poisoned():
        found = implementation.op(
            x8[:, :channels], w8, w_scale.to(device), x_scale.to(device), fp8_format=fp8_format, out_dtype=torch.float32
        )
    assert relative(found, want) < (1e-3 if device.type == "cuda" else 1e-6)


@pytest.mark.parametrize("implementation", LINEAR)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_float_input(implementation: Implementation, dtype: torch.dtype) -> None:
    """The product of the input itself, up to what quantising it and rounding to bf16 cost."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 300, generator=generator).to(dtype)[:, :256]
    w = random_bytes((160, 256), OCP, generator)
    w_scale, w_values = scales(160, 256, "e8m0", generator)
    want = expected(x.double(), values_of(w, OCP), torch.ones(5, 2, dtype=torch.float64), w_values)
    device = implementation.device
    with uninitialised_memory_poisoned():
        found = implementation.op(x.to(device), w.view(torch.float8_e4m3fn).to(device), w_scale.to(device))
    assert found.dtype == torch.bfloat16
    assert relative(found, want) < 0.04


@pytest.mark.parametrize("implementation", LINEAR[1:])
def test_splits_of_the_channels(implementation: Implementation) -> None:
    """Shares that do not divide the blocks evenly; the same bits on every launch."""
    generator = torch.Generator().manual_seed(2)
    device = implementation.device
    x, w = random_bytes((2, 896), OCP, generator), random_bytes((64, 896), OCP, generator)
    x_scale = torch.rand(2, 7, generator=generator)
    w_scale, w_values = scales(64, 896, "fp32", generator)
    want = expected(values_of(x, OCP), values_of(w, OCP), x_scale.double(), w_values)
    x8, w8 = (t.view(torch.float8_e4m3fn).to(device) for t in (x, w))
    for splits in (1, 2, 3, 7):
        arguments = (x8, w8, w_scale.to(device), x_scale.to(device))
        with uninitialised_memory_poisoned():
            found = implementation.op(*arguments, out_dtype=torch.float32, num_splits=splits)
            again = implementation.op(*arguments, out_dtype=torch.float32, num_splits=splits)
        assert relative(found, want) < (1e-3 if device.type == "cuda" else 1e-6)
        assert torch.equal(found, again)


@pytest.mark.parametrize("implementation", WEIGHT_ONLY)
@pytest.mark.parametrize("fp8_format", list(Fp8Format))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("groups", "tokens", "rows", "channels"), [(1, 1, 130, 384), (3, 5, 64, 200), (2, 60, 96, 128), (2, 1, 96, 8200)]
)
def test_fp8_weights_alone(
    implementation: Implementation,
    fp8_format: Fp8Format,
    dtype: torch.dtype,
    groups: int,
    tokens: int,
    rows: int,
    channels: int,
) -> None:
    """The product with exactly the stored weights: x is not rounded to fp8."""
    generator = torch.Generator().manual_seed(4)
    wide = torch.randn(tokens, groups, channels + 8, generator=generator).to(dtype)
    w = torch.stack([random_bytes((rows, channels), fp8_format, generator) for _ in range(groups)])
    pairs = [scales(rows, channels, "fp32" if groups > 1 else "e8m0", generator) for _ in range(groups)]
    ones = torch.ones(tokens, -(-channels // 128), dtype=torch.float64)
    x = wide[..., :channels]
    want = torch.stack(
        [expected(x[:, g].double(), values_of(w[g], fp8_format), ones, pairs[g][1]) for g in range(groups)], dim=1
    )
    device = implementation.device
    w_scale = torch.stack([pair[0].view(torch.uint8) if groups == 1 else pair[0] for pair in pairs])
    w_scale = w_scale.view(torch.float8_e8m0fnu) if groups == 1 else w_scale
    with uninitialised_memory_poisoned():
        found = implementation.op(
            wide.to(device)[..., :channels], w.view(fp8_format.torch_dtype).to(device), w_scale.to(device), fp8_format
        )
    assert found.dtype == dtype
    assert relative(found, want) < {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]


@pytest.mark.parametrize("implementation", WEIGHT_ONLY[1:])
@pytest.mark.parametrize(("groups", "rows", "channels"), [(1, 96, 200), (1, 256, 512)])
def test_many_rows_are_quantised(implementation: Implementation, groups: int, rows: int, channels: int) -> None:
    """Beyond FEW_ROWS activations are quantised; whole blocks take the library's product where it exists."""
    generator = torch.Generator().manual_seed(5)
    tokens = triton_linear.FEW_ROWS + 7
    x = torch.randn(tokens, groups, channels, generator=generator).to(torch.bfloat16)
    w = torch.stack([random_bytes((rows, channels), OCP, generator) for _ in range(groups)])
    pairs = [scales(rows, channels, "fp32", generator) for _ in range(groups)]
    ones = torch.ones(tokens, -(-channels // 128), dtype=torch.float64)
    want = torch.stack([expected(x[:, g].double(), values_of(w[g], OCP), ones, pairs[g][1]) for g in range(groups)], 1)
    device = implementation.device
    w_scale = torch.stack([pair[0] for pair in pairs]).to(device)
    with uninitialised_memory_poisoned():
        found = implementation.op(x.to(device), w.view(torch.float8_e4m3fn).to(device), w_scale)
    assert found.shape == (tokens, groups, rows)
    assert relative(found, want) < 0.04


def test_split_plan() -> None:
    assert plan_splits(tiles=512, blocks=64, compute_units=132) == 1
    assert plan_splits(tiles=24, blocks=32, compute_units=132) == 8
    assert plan_splits(tiles=1, blocks=3, compute_units=132) == 1
    assert plan_splits(tiles=1, blocks=1000, compute_units=304) == 16


@pytest.mark.parametrize("implementation", QUANTISE)
@pytest.mark.parametrize("fp8_format", list(Fp8Format))
@pytest.mark.parametrize("channels", [128, 200, 1152])
def test_quantiser(implementation: Implementation, fp8_format: Fp8Format, channels: int) -> None:
    """Each code is the nearest to x / scale, ties to even, with the scale of spec 6.2 exactly."""
    x = torch.randn(3, channels, generator=torch.Generator().manual_seed(3)) * 3
    x[1, :128] = 0
    x[2, :128] *= 1e-12
    x[0, 5] = -1e-6  # underflows to a zero, which FNUZ must not write as its NaN
    with uninitialised_memory_poisoned():
        data, scale = implementation.op(x.to(implementation.device), fp8_format)
    codes, scale = data.cpu().view(torch.uint8), scale.cpu()
    values = byte_values(fp8_format)
    steps = values[:127]  # the numbers, ascending, up to quant_max
    for row in range(3):
        for group in range(-(-channels // 128)):
            part = x[row, group * 128 : (group + 1) * 128]
            want = torch.maximum(part.abs().max(), torch.tensor(1e-10)) / torch.tensor(fp8_format.quant_max)
            assert scale[row, group] == want
            ratio = (part / want).double()
            nearest = (ratio.abs()[:, None] - steps[None, :]).abs().min(1).values
            code = codes[row, group * 128 : (group + 1) * 128].long()
            assert torch.equal((values[code] - ratio).abs(), nearest)
            assert not values[code].isnan().any()


@pytest.mark.parametrize("implementation", QUANTISE)
def test_quantiser_of_damaged_groups(implementation: Implementation) -> None:
    x = torch.ones(2, 256)
    x[0, 3], x[1, 200] = math.nan, -math.inf
    data, scale = implementation.op(x.to(implementation.device))
    assert scale.cpu().isnan().tolist() == [[True, False], [False, True]]
    codes = data.cpu().view(torch.uint8)
    assert not codes[0, :128].any()
    assert not codes[1, 128:].any()
    assert bool((codes[0, 128:] == 0x7E).all())


@pytest.mark.parametrize("implementation", LINEAR)
def test_nothing_to_do(implementation: Implementation) -> None:
    device = implementation.device
    w, scale = torch.zeros(64, 128, device=device).to(torch.float8_e4m3fn), torch.ones(1, 1, device=device)
    assert implementation.op(torch.zeros(0, 128, device=device), w, scale).shape == (0, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 33, 128, 500, 4096])
@pytest.mark.parametrize(("columns", "channels"), [(1536, 4096), (4096, 1024), (2048, 7168), (1600, 8192)])
def test_model_shapes(rows: int, columns: int, channels: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, w = random_bytes((rows, channels), OCP, generator), random_bytes((columns, channels), OCP, generator)
    x_scale = torch.rand(rows, channels // 128, generator=generator)
    w_scale, w_values = scales(columns, channels, "e8m0", generator)
    table = byte_values(OCP).cuda()
    want = expected(table[x.cuda().long()], table[w.cuda().long()], x_scale.double().cuda(), w_values.cuda()).cpu()
    x8, w8 = (t.cuda().view(torch.float8_e4m3fn) for t in (x, w))
    found = triton_linear.fp8_linear(x8, w8, w_scale.cuda(), x_scale.cuda(), out_dtype=torch.float32)
    assert relative(found, want) < 1e-3


def test_refuses_what_does_not_fit() -> None:
    x, w, scale = torch.zeros(2, 256), torch.zeros(64, 256).to(torch.float8_e4m3fn), torch.ones(1, 2)
    linear = triton_linear.fp8_linear
    with pytest.raises(ShapeError, match="float8_e4m3fnuz in two dimensions"):
        linear(x, w, scale, fp8_format=FNUZ)
    with pytest.raises(ShapeError, match=r"weight_scale: expected fp32 or e8m0 \[1, 2\]"):
        linear(x, w, torch.ones(2, 1))
    with pytest.raises(ShapeError, match="x: expected"):
        linear(x[:, :128], w, scale)
    with pytest.raises(ShapeError, match="quantised x: expected"):
        linear(x, w, scale, torch.ones(2, 2))
    with pytest.raises(ShapeError, match=r"x_scale: expected fp32 \[2, 2\]"):
        linear(x.to(torch.float8_e4m3fn), w, scale, torch.ones(2, 1))
    with pytest.raises(ShapeError, match="out_dtype"):
        linear(x, w, scale, out_dtype=torch.float64)
