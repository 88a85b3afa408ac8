"""RMS norms: single, both of qr_kv in one launch, and with qr leaving as fp8."""

from __future__ import annotations

import pytest
import torch

from dsv4dist.errors import ShapeError
from dsv4dist.kernels.paged_cache import Fp8Format
from tests.kernels.implementations import Implementation, implementations
from tests.support.e4m3 import values_of
from tests.support.poison import uninitialised_memory_poisoned

COUNTS = [0, 1, 3, 4, 65, pytest.param(1025, id="many")]
EPS = 1e-6


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def oracle(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    y = x.double().cpu()
    y = y / (y.square().mean(-1, keepdim=True) + EPS).sqrt()
    return y if weight is None else y * weight.double().cpu()


def close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    step = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2e-6}[dtype]
    assert got.dtype == dtype
    torch.testing.assert_close(got.cpu().double(), expected, rtol=step * 1.01, atol=1e-6)


@pytest.mark.parametrize("impl", implementations("norm.rms_norm"))
@pytest.mark.parametrize("count", [0, 1, 3, 65])
@pytest.mark.parametrize(("width", "dtype"), [(512, torch.bfloat16), (7, torch.float32), (160, torch.float16)])
def test_rms_norm(impl: Implementation, count: int, width: int, dtype: torch.dtype) -> None:
    source = generator(count)
    x = (torch.randn(count, width, generator=source) * 10).to(dtype).to(impl.device)
    weight = (1 + 2**-10 + torch.randn(width, generator=source)).to(impl.device)
    with uninitialised_memory_poisoned():
        for one in (None, weight):
            close(impl.op(x, one, EPS), oracle(x, one), dtype)


@pytest.mark.parametrize("impl", implementations("norm.rms_norm"))
def test_rms_norm_of_any_number_of_dimensions(impl: Implementation) -> None:
    x = torch.randn(2, 3, 64, generator=generator(0)).to(impl.device)
    got = impl.op(x.transpose(0, 1), None, EPS)
    assert got.shape == (3, 2, 64)
    close(got, oracle(x.transpose(0, 1), None), torch.float32)


@pytest.mark.parametrize("impl", implementations("norm.qr_kv_norm"))
@pytest.mark.parametrize("count", COUNTS)
def test_both_parts_of_strided_rows(impl: Implementation, count: int) -> None:
    widths = (48, 16) if count > 1000 else (1024, 512)
    source = generator(count)
    padded = torch.full((count, sum(widths) + 24), float("nan"))
    padded[:, : sum(widths)] = torch.randn(count, sum(widths), generator=source)
    x = padded.to(torch.bfloat16).to(impl.device)[:, : sum(widths)]
    weights = [torch.randn(width, generator=source).to(impl.device) for width in widths]
    with uninitialised_memory_poisoned():
        qr, kv = impl.op(x, *weights, EPS)
    close(qr, oracle(x[:, : widths[0]], weights[0]), torch.bfloat16)
    close(kv, oracle(x[:, widths[0] :], weights[1]), torch.bfloat16)


@pytest.mark.parametrize("impl", implementations("norm_quantise.qr_kv_norm_quantised", triton="norm"))
@pytest.mark.parametrize("fp8_format", list(Fp8Format))
@pytest.mark.parametrize("count", [0, 1, 3, 65])
def test_qr_leaves_as_fp8(impl: Implementation, fp8_format: Fp8Format, count: int) -> None:
    source = generator(count)
    x = torch.randn(count, 384 + 64, generator=source).to(torch.bfloat16)
    x[:1, :384] = 0.0
    q_weight = torch.randn(384, generator=source)
    q_weight[128:256] = 1e-12
    kv_weight = torch.randn(64, generator=source)
    with uninitialised_memory_poisoned():
        qr, scale, kv = impl.op(*(one.to(impl.device) for one in (x, q_weight, kv_weight)), EPS, fp8_format)
    assert (qr.dtype, scale.shape) == (fp8_format.torch_dtype, (count, 3))
    expected = oracle(x[:, :384], q_weight).view(count, 3, 128)
    amax = expected.abs().amax(-1).clamp_min(1e-10)
    torch.testing.assert_close(scale.cpu().double(), amax / fp8_format.quant_max, rtol=1e-5, atol=0)
    values = values_of(qr, fp8_format).view(count, 3, 128)
    assert not values.isnan().any()
    scaled = expected / scale.cpu().double().unsqueeze(-1)
    assert ((values - scaled).abs() <= scaled.abs() * 2**-4 * 1.001 + 2**-10).all()
    if fp8_format is Fp8Format.FNUZ:
        assert not (qr.view(torch.uint8) == 0x80).any()
    close(kv, oracle(x[:, 384:], kv_weight), torch.bfloat16)


@pytest.mark.parametrize("impl", implementations("norm_quantise.qr_kv_norm_quantised", triton="norm"))
def test_a_group_that_is_not_finite_has_a_nan_scale(impl: Implementation) -> None:
    x = torch.ones(2, 128 + 64, device=impl.device)
    x[0, 5] = float("nan")
    qr, scale, _ = impl.op(x, x.new_ones(128), x.new_ones(64), EPS, Fp8Format.OCP)
    assert scale.isnan().flatten().tolist() == [True, False]
    assert not qr[0].view(torch.uint8).any()


@pytest.mark.parametrize("impl", implementations("norm.qr_kv_norm")[1:])
def test_wrong_input_is_refused(impl: Implementation) -> None:
    x = torch.ones(2, 192, device=impl.device)
    with pytest.raises(ShapeError, match=r"qr_kv: expected .* 193"):
        impl.op(x, x.new_ones(128), x.new_ones(65), EPS)
    with pytest.raises(ShapeError, match="stride in the last dimension"):
        impl.op(torch.ones(192, 2, device=impl.device).T, x.new_ones(128), x.new_ones(64), EPS)
