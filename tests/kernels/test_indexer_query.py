"""Index queries: rotation, fp8 rows with power-of-two scales, and the weights that absorb them."""

from __future__ import annotations

import math

import pytest
import torch

from dsv4dist.errors import ShapeError
from dsv4dist.kernels.paged_cache import Fp8Format
from tests.kernels.implementations import Implementation, implementations
from tests.support.e4m3 import values_of
from tests.support.pages import quantisation_error, rotated
from tests.support.poison import uninitialised_memory_poisoned

IMPLEMENTATIONS = implementations("indexer.indexer_query", triton="indexer_query")


def inputs(count: int, heads: int, width: int, rotary: int) -> tuple[torch.Tensor, ...]:
    source = torch.Generator().manual_seed(count * 7 + heads)
    q = (torch.randn(count, heads, width, generator=source) * 20).to(torch.bfloat16)
    weights = torch.randn(count, heads, generator=source).to(torch.bfloat16)
    return q, weights, torch.randint(0, 9, (count,), generator=source), torch.randn(9, rotary, generator=source)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("fp8_format", list(Fp8Format))
@pytest.mark.parametrize(("count", "heads"), [(0, 4), (1, 64), (3, 5), (65, 1)])
def test_fp8(impl: Implementation, fp8_format: Fp8Format, count: int, heads: int) -> None:
    q, weights, positions, cos_sin = inputs(count, heads, 128, 64)
    with uninitialised_memory_poisoned():
        data, scaled = impl.op(*(one.to(impl.device) for one in (q, weights, positions, cos_sin)), fp8_format)
    assert (data.dtype, scaled.dtype, scaled.shape) == (fp8_format.torch_dtype, torch.float32, (count, heads))
    for token in range(count):
        expected = rotated(q[token], cos_sin[positions[token]])
        for head in range(heads):
            amax = expected[head].to(torch.bfloat16).abs().max().clamp_min(1e-4).item()
            scale = 2.0 ** math.ceil(math.log2(amax / fp8_format.quant_max))
            factor = weights[token, head].item() * scale * 128**-0.5 * heads**-0.5
            assert scaled[token, head].item() == pytest.approx(factor, rel=1e-6)
            got = values_of(data[token, head], fp8_format) * scale
            assert ((got - expected[head]).abs() <= quantisation_error(expected[head], 128)).all()
    if fp8_format is Fp8Format.FNUZ:
        assert not (data.view(torch.uint8) == 0x80).any()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_without_fp8(impl: Implementation, dtype: torch.dtype) -> None:
    q, weights, positions, cos_sin = inputs(5, 6, 32, 16)
    with uninitialised_memory_poisoned():
        got, scaled = impl.op(*(one.to(impl.device) for one in (q.to(dtype), weights.to(dtype), positions, cos_sin)))
    assert got.dtype == dtype
    for token in range(5):
        expected = rotated(q[token], cos_sin[positions[token]])
        rtol = 2**-8 * 1.01 if dtype is torch.bfloat16 else 1e-6
        torch.testing.assert_close(got[token].cpu().double(), expected, rtol=rtol, atol=1e-5)
    torch.testing.assert_close(scaled.cpu().double(), weights.double() * 32**-0.5 * 6**-0.5, rtol=1e-6, atol=0)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS[1:])
@pytest.mark.parametrize("fp8_format", list(Fp8Format))
def test_bytes_equal_those_of_the_reference(impl: Implementation, fp8_format: Fp8Format) -> None:
    from dsv4dist.kernels.reference.indexer import indexer_query

    q, weights, positions, cos_sin = inputs(6, 8, 128, 64)
    q[:, :, 64:] = 0.0
    for head, amax in enumerate((0.0, 447.0, 448.0, 450.0, 3.5, 1e-3, float("nan"), float("inf"))):
        q[0, head, 3] = amax
    expected = indexer_query(q, weights, positions, cos_sin, fp8_format)
    got = impl.op(*(one.to(impl.device) for one in (q, weights, positions, cos_sin)), fp8_format)
    assert torch.equal(got[0].cpu().view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(got[1].cpu().nan_to_num(nan=-7.0), expected[1].nan_to_num(nan=-7.0))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS[1:])
@pytest.mark.parametrize("fp8_format", list(Fp8Format))
def test_every_bf16_number_gets_the_bytes_of_the_reference(impl: Implementation, fp8_format: Fp8Format) -> None:
    from dsv4dist.kernels.reference.indexer import indexer_query

    # Sorted by magnitude, a row spans the codes of few exponents; shuffled, it spans all of them.
    bits = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    finite = bits[bits.isfinite()][: 128 * 500]
    by_size = finite[finite.float().abs().argsort()]
    mixed = finite[torch.randperm(len(finite), generator=torch.Generator().manual_seed(0))]
    q = torch.cat((by_size, mixed)).view(100, 10, 128)
    no_turn = torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), 1)
    arguments = (q, torch.ones(100, 10), torch.zeros(100, dtype=torch.int64), no_turn)
    expected = indexer_query(*arguments, fp8_format)
    got = impl.op(*(one.to(impl.device) for one in arguments), fp8_format)
    assert torch.equal(got[0].cpu().view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(got[1].cpu(), expected[1])


@pytest.mark.parametrize("impl", IMPLEMENTATIONS[1:])
def test_wrong_input_is_refused(impl: Implementation) -> None:
    q, weights, positions, cos_sin = (one.to(impl.device) for one in inputs(2, 3, 32, 16))
    with pytest.raises(ShapeError, match="weights"):
        impl.op(q, weights[:, :2].contiguous(), positions, cos_sin)
