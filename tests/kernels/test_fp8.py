"""The byte formats against exact arithmetic: float64 tables, fractions and loops, never the functions under test."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4dist.errors import ShapeError, UnsupportedError
from dsv4dist.kernels import fp8
from dsv4dist.kernels.paged_cache import Fp8Format

FORMATS = [Fp8Format.OCP, Fp8Format.FNUZ]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def e4m3_value(byte: int, fp8_format: Fp8Format) -> float:
    """What an e4m3 byte is worth, from the definition of the encoding."""
    bias = 7 if fp8_format is Fp8Format.OCP else 8
    if byte == 0x80 and fp8_format is Fp8Format.FNUZ:
        return math.nan
    sign, exponent, mantissa = byte >> 7, (byte >> 3) & 15, byte & 7
    if fp8_format is Fp8Format.OCP and exponent == 15 and mantissa == 7:
        return math.nan
    size = mantissa / 8 * 2.0 ** (1 - bias) if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - bias)
    return -size if sign else size


def ceil_log2(value: Fraction) -> int:
    exponent = value.numerator.bit_length() - value.denominator.bit_length() - 1
    while Fraction(2) ** exponent < value:
        exponent += 1
    return exponent


def nearest_even(value: float, magnitudes: list[float]) -> int:
    """The code whose magnitude is nearest to |value|, the even code on a tie."""
    size = abs(value)
    return min(range(len(magnitudes)), key=lambda code: (abs(magnitudes[code] - size), code % 2))


@pytest.mark.parametrize("fp8_format", FORMATS)
def test_all_bytes_decode(fp8_format: Fp8Format) -> None:
    got = fp8.decode_fp8(torch.arange(256, dtype=torch.uint8), fp8_format).double().numpy()
    expected = np.array([e4m3_value(byte, fp8_format) for byte in range(256)])
    np.testing.assert_array_equal(got, expected)
    assert (np.signbit(got) == np.signbit(expected))[~np.isnan(expected)].all()


def test_known_bytes_of_both_encodings() -> None:
    data = torch.tensor([0x00, 0x38, 0x7E, 0x7F, 0x80, 0xB8], dtype=torch.uint8)
    nan = math.nan
    np.testing.assert_array_equal(fp8.decode_fp8(data, Fp8Format.OCP).numpy(), [0, 1, 448, nan, -0.0, -1])
    np.testing.assert_array_equal(fp8.decode_fp8(data, Fp8Format.FNUZ).numpy(), [0, 0.5, 224, 240, nan, -0.5])


def test_bytes_of_the_other_encoding_are_refused() -> None:
    with pytest.raises(ShapeError, match="float8_e4m3fnuz"):
        fp8.decode_fp8(torch.zeros(4).to(torch.float8_e4m3fn), Fp8Format.FNUZ)


@pytest.mark.parametrize("fp8_format", FORMATS)
def test_encode_rounds_to_nearest_even(fp8_format: Fp8Format) -> None:
    magnitudes = [e4m3_value(byte, fp8_format) for byte in range(0x7F)]
    middles = [(low + high) / 2 for low, high in itertools.pairwise(magnitudes)]
    around = [x for middle in middles for x in (middle, np.nextafter(np.float32(middle), np.float32(0)))]
    drawn = np.random.default_rng(0).normal(0, 40, 500).astype(np.float32)
    values = [float(value) for value in (*magnitudes, *around, *drawn)]
    values += [-value for value in values]
    got = fp8.encode_fp8(torch.tensor(values, dtype=torch.float32), fp8_format).tolist()
    for value, byte in zip(values, got, strict=True):
        code = nearest_even(min(abs(value), fp8_format.quant_max), magnitudes)
        negative = math.copysign(1, value) < 0
        if fp8_format is Fp8Format.FNUZ and code == 0:
            negative = False
        assert byte == code | (0x80 if negative else 0), value


def test_encode_extremes() -> None:
    values = torch.tensor([math.inf, -math.inf, 1e30, -1e-9, -(2.0**-11), -0.0, 1e-9])
    assert fp8.encode_fp8(values, Fp8Format.OCP).tolist() == [0x7E, 0xFE, 0x7E, 0x80, 0x80, 0x80, 0]
    assert fp8.encode_fp8(values, Fp8Format.FNUZ).tolist() == [0x7E, 0xFE, 0x7E, 0, 0, 0, 0]
    nan = torch.tensor([math.nan])
    for fp8_format in FORMATS:
        assert fp8.decode_fp8(fp8.encode_fp8(nan, fp8_format), fp8_format).isnan().all()


@pytest.mark.parametrize(
    ("amax", "ocp"),
    [(0.0, 105), (1.0, 119), (1.75, 119), (3.5, 120), (7.0, 121), (224.0, 126), (448.0, 127), (449.0, 128)],
)
def test_scale_byte_table(amax: float, ocp: int) -> None:
    row = torch.zeros(1, 64)
    row[0, 13] = -amax
    for fp8_format, expected in ((Fp8Format.OCP, ocp), (Fp8Format.FNUZ, ocp + 1)):
        # Groups are rounded to bf16 first: 449 becomes 448 there, so it is checked on the bare function only.
        if amax != 449.0:
            assert fp8.quantise_groups(row, fp8_format)[1].item() == expected
        floored = torch.tensor([max(amax, fp8.AMAX_FLOOR)])
        assert fp8.scale_byte_of(floored, fp8_format.quant_max).item() == expected


@settings(max_examples=300, deadline=None)
@given(
    st.floats(min_value=2.0**-100, max_value=2.0**120, width=32),
    st.sampled_from([448.0, 224.0, 6.0]),
)
def test_scale_byte_is_the_exact_ceiling(amax: float, quant_max: float) -> None:
    expected = 127 + ceil_log2(Fraction(amax) / Fraction(quant_max))
    assert fp8.scale_byte_of(torch.tensor([amax]), quant_max).item() == max(0, expected)


@pytest.mark.parametrize("quant_max", [448.0, 224.0, 6.0])
def test_scale_byte_beside_the_powers(quant_max: float) -> None:
    for exponent in range(-12, 13):
        edge = np.float32(quant_max * 2.0**exponent)
        beside = [np.nextafter(edge, np.float32(0)), edge, np.nextafter(edge, np.float32(np.inf))]
        got = fp8.scale_byte_of(torch.tensor(beside), quant_max).tolist()
        assert got == [127 + exponent, 127 + exponent, 128 + exponent]


def test_scale_byte_of_nothing_finite() -> None:
    assert fp8.scale_byte_of(torch.tensor([math.inf, math.nan]), 448.0).tolist() == [255, 255]


def test_scale_bytes_decode_exactly() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    for scale in (every, every.view(torch.float8_e8m0fnu)):
        got = fp8.decode_scale_byte(scale)
        assert [Fraction(value) for value in got[:255].tolist()] == [Fraction(2) ** (b - 127) for b in range(255)]
        assert got[255].isnan()
    assert torch.equal(fp8.encode_scale_byte(fp8.decode_scale_byte(every[:255])), every[:255])


@pytest.mark.parametrize("bad", [3.0, 0.75 * 2**-5, 0.0, -1.0, math.inf, math.nan, 2.0**-128])
def test_only_powers_of_two_become_scale_bytes(bad: float) -> None:
    with pytest.raises(UnsupportedError, match="power of two"):
        fp8.encode_scale_byte(torch.tensor([1.0, bad]))


def test_scale_bytes_refuse_other_types() -> None:
    with pytest.raises(ShapeError, match="float8_e8m0fnu"):
        fp8.decode_scale_byte(torch.ones(3))


def test_ocp_to_fnuz_keeps_every_value() -> None:
    data = torch.arange(256, dtype=torch.uint8)
    scale = torch.tensor([0, 1, 127, 252, 253], dtype=torch.uint8)
    for byte in scale:
        fnuz, doubled = fp8.ocp_to_fnuz(data, byte.reshape(1))
        before = fp8.decode_fp8(data, Fp8Format.OCP).double() * 2.0 ** (byte.item() - 127)
        after = fp8.decode_fp8(fnuz, Fp8Format.FNUZ).double() * 2.0 ** (doubled.item() - 127)
        assert torch.equal(before.nan_to_num(nan=1e300), after.nan_to_num(nan=1e300))
    assert fp8.ocp_to_fnuz(data, torch.tensor([255], dtype=torch.uint8))[1].item() == 255
    with pytest.raises(UnsupportedError, match="254"):
        fp8.ocp_to_fnuz(data, torch.tensor([253, 254, 255], dtype=torch.uint8))


@pytest.mark.parametrize("fp8_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_groups_against_a_loop(fp8_format: Fp8Format, dtype: torch.dtype) -> None:
    spread = torch.exp2(torch.randint(-14, 10, (5, 7, 1)).float())
    wide = (torch.randn(5, 7, 64) * spread).flatten(1).to(dtype)
    values = torch.cat((wide, torch.full_like(wide, math.nan)), dim=1)[:, :448]  # strided view, poison beside it
    data, scale = fp8.quantise_groups(values, fp8_format)
    assert data.dtype == scale.dtype == torch.uint8
    assert scale.shape == (5, 7)
    magnitudes = [e4m3_value(byte, fp8_format) for byte in range(0x7F)]
    for row in range(5):
        for group in range(7):
            x = [float(v.to(torch.bfloat16)) for v in values[row, group * 64 : group * 64 + 64]]
            amax = max(max(map(abs, x)), float(np.float32(1e-4)))
            exponent = ceil_log2(Fraction(amax) / Fraction(fp8_format.quant_max))
            assert scale[row, group] == exponent + 127
            for value, byte in zip(x, data[row, group * 64 : group * 64 + 64].tolist(), strict=True):
                code = nearest_even(value * 2.0**-exponent, magnitudes)
                signed = math.copysign(1, value) < 0 and (code > 0 or fp8_format is Fp8Format.OCP)
                assert byte == code | (0x80 if signed else 0)
    decoded = fp8.dequantise_groups(data, scale, fp8_format)
    np.testing.assert_allclose(decoded.numpy(), values.float().numpy(), rtol=2**-4, atol=2**-9 * 2**-14)


def test_both_encodings_write_the_same_bytes() -> None:
    values = torch.randn(8, 448) * torch.logspace(-3, 3, 8).unsqueeze(1)
    ocp, ocp_scale = fp8.quantise_groups(values, Fp8Format.OCP)
    fnuz, fnuz_scale = fp8.quantise_groups(values, Fp8Format.FNUZ)
    assert torch.equal(fnuz, ocp.masked_fill(ocp == 0x80, 0))
    assert torch.equal(fnuz_scale, ocp_scale + 1)
    assert not (fnuz == 0x80).any()


@pytest.mark.parametrize("fp8_format", FORMATS)
def test_zero_and_tiny_groups(fp8_format: Fp8Format) -> None:
    values = torch.cat((torch.zeros(64), torch.full((64,), 1e-30), torch.full((64,), -1e-30), torch.ones(64)))
    data, scale = fp8.quantise_groups(values, fp8_format)
    decoded = fp8.dequantise_groups(data, scale, fp8_format)
    assert (decoded[:192] == 0).all()
    assert (decoded[192:] == 1).all()
    assert ((scale > 0) & (scale < 255)).all()


@pytest.mark.parametrize("fp8_format", FORMATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_group_that_is_not_finite_is_all_nan(fp8_format: Fp8Format, bad: float) -> None:
    values = torch.ones(192)
    values[70] = bad
    data, scale = fp8.quantise_groups(values, fp8_format)
    assert scale[1] == 255
    assert (data[64:128] == 0).all()
    decoded = fp8.dequantise_groups(data, scale, fp8_format)
    assert decoded[64:128].isnan().all()
    assert (decoded[:64] == 1).all()
    assert (decoded[128:] == 1).all()


def test_groups_need_whole_groups() -> None:
    with pytest.raises(ShapeError, match="multiple of 64"):
        fp8.quantise_groups(torch.zeros(3, 100), Fp8Format.OCP)


@pytest.mark.parametrize("fp8_format", FORMATS)
@pytest.mark.parametrize("amax", [447.9, 448.0, 448.1, 3.5, 1e-3, 0.0])
def test_index_rows(fp8_format: Fp8Format, amax: float) -> None:
    rows = torch.rand(3, 4, 128) * amax
    rows[..., 5] = -amax
    data, scale = fp8.quantise_index_rows(rows, fp8_format)
    assert data.shape == rows.shape
    assert scale.shape == (3, 4)
    rounded = Fraction(max(float(torch.tensor(amax).to(torch.bfloat16)), float(np.float32(1e-4))))
    assert (scale == 2.0 ** ceil_log2(rounded / Fraction(fp8_format.quant_max))).all()
    decoded = fp8.dequantise_index_rows(data, scale, fp8_format)
    np.testing.assert_allclose(decoded.numpy(), rows.numpy(), rtol=2**-4 + 2**-8, atol=amax * 2**-16)


def block_scales(kind: str, exponents: torch.Tensor) -> torch.Tensor:
    byte = (exponents + 127).to(torch.uint8)
    if kind == "fp32":
        return torch.ldexp(torch.ones(exponents.shape), exponents)
    return byte.view(torch.float8_e8m0fnu) if kind == "e8m0" else byte


@pytest.mark.parametrize("kind", ["e8m0", "uint8", "fp32"])
@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (129, 127), (300, 260)])
def test_block_weights_against_a_loop(kind: str, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape).to(torch.float8_e4m3fn)
    exponents = torch.randint(-8, 8, [-(-size // 128) for size in shape])
    got = fp8.dequantise_block_fp8(weight, block_scales(kind, exponents))
    expected = np.zeros(shape)
    stored = weight.view(torch.uint8).tolist()
    for row in range(shape[0]):
        for column in range(shape[1]):
            scale = 2.0 ** int(exponents[row // 128, column // 128])
            expected[row, column] = e4m3_value(stored[row][column], Fp8Format.OCP) * scale
    np.testing.assert_array_equal(got.double().numpy(), expected)


def test_block_weights_with_the_smallest_and_a_nan_scale() -> None:
    weight = torch.ones(128, 256).to(torch.float8_e4m3fn)
    got = fp8.dequantise_block_fp8(weight, torch.tensor([[0, 255]], dtype=torch.uint8))
    assert (got[:, :128] == 2.0**-127).all()
    assert got[:, 128:].isnan().all()


def test_block_scales_of_a_wrong_shape() -> None:
    with pytest.raises(ShapeError, match=r"\[2, 1\]"):
        fp8.dequantise_block_fp8(torch.zeros(130, 128).to(torch.float8_e4m3fn), torch.ones(1, 1))


def test_block_quantiser_neither_clips_nor_wastes() -> None:
    weight = torch.randn(200, 300) * torch.exp2(torch.randint(-6, 6, (200, 300)).float())
    weight[128:, 256:] = 0
    data, scale = fp8.quantise_block_fp8(weight)
    assert (data.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float8_e8m0fnu)
    assert scale.shape == (2, 3)
    exponents = scale.view(torch.uint8).int() - 127
    for row in range(2):
        for column in range(3):
            part = (slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128))
            block = weight[part].double()
            amax = max(float(block.abs().max()), float(np.float32(1e-4)))
            exponent = int(exponents[row, column])
            assert exponent == ceil_log2(Fraction(amax) / 448)
            error = (data[part].double() * 2.0**exponent - block).abs()
            assert (error <= torch.maximum(block.abs() * 2**-4, torch.tensor(2.0 ** (exponent - 10)))).all()


def test_fp4_nibbles_and_scales_against_a_loop() -> None:
    packed = torch.arange(256, dtype=torch.uint8).reshape(8, 32)
    exponents = torch.randint(-5, 5, (8, 2))
    expected = np.zeros((8, 64))
    for row in range(8):
        for column in range(64):
            byte = int(packed[row, column // 2])
            code = byte & 15 if column % 2 == 0 else byte >> 4
            sign = -1 if code & 8 else 1
            expected[row, column] = sign * E2M1[code & 7] * 2.0 ** int(exponents[row, column // 32])
    for kind in ("e8m0", "uint8", "fp32"):
        for data in (packed, packed.view(torch.int8)):
            np.testing.assert_array_equal(fp8.dequantise_fp4(data, block_scales(kind, exponents)).numpy(), expected)


def test_fp4_quantiser_rounds_to_nearest_even() -> None:
    edges = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    beside = [float(np.nextafter(np.float32(edge), np.float32(side))) for edge in edges for side in (0, 9)]
    values = [*E2M1, *edges, *beside, -5.0, -0.25, 6.0]  # 32 values with amax 6: scale 1
    assert len(values) == 32
    weight = torch.tensor([values, [value * 2.0**-9 for value in values], [0.0] * 32])
    packed, scale = fp8.quantise_fp4(weight)
    assert scale.view(torch.uint8).flatten().tolist()[:2] == [127, 118]
    decoded = fp8.dequantise_fp4(packed, scale)
    expected = [math.copysign(E2M1[nearest_even(value, E2M1)], value) for value in values]
    np.testing.assert_array_equal(decoded[0].numpy(), expected)
    np.testing.assert_array_equal(decoded[1].numpy(), [value * 2.0**-9 for value in expected])
    assert (decoded[2] == 0).all()
    with pytest.raises(ShapeError, match="multiple of 32"):
        fp8.quantise_fp4(torch.zeros(2, 48))


def test_fp4_refuses_wrong_types_and_shapes() -> None:
    with pytest.raises(ShapeError, match="int8"):
        fp8.dequantise_fp4(torch.zeros(2, 16), torch.ones(2, 1))
    with pytest.raises(ShapeError, match=r"\[2, 2\]"):
        fp8.dequantise_fp4(torch.zeros(2, 32, dtype=torch.int8), torch.ones(2, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("fp8_format", FORMATS)
def test_a_gpu_writes_the_same_bytes(fp8_format: Fp8Format) -> None:
    values = torch.randn(64, 448) * torch.exp2(torch.randint(-20, 12, (64, 448)).float())
    values[3, 5], values[4, 6], values[5, :64] = math.nan, -math.inf, 0
    for here, there in zip(
        fp8.quantise_groups(values, fp8_format), fp8.quantise_groups(values.cuda(), fp8_format), strict=True
    ):
        assert torch.equal(here, there.cpu())
    every = torch.arange(256, dtype=torch.uint8)
    for decode in (fp8.decode_scale_byte, lambda data: fp8.decode_fp8(data, fp8_format)):
        np.testing.assert_array_equal(decode(every.cuda()).cpu().numpy(), decode(every).numpy())


@pytest.mark.gpu
def test_a_gpu_stores_the_same_weights() -> None:
    weight = torch.randn(300, 288) * torch.exp2(torch.randint(-9, 9, (300, 288)).float())
    for quantise, dequantise in (
        (fp8.quantise_block_fp8, fp8.dequantise_block_fp8),
        (fp8.quantise_fp4, fp8.dequantise_fp4),
    ):
        here, there = quantise(weight), quantise(weight.cuda())
        for one, other in zip(here, there, strict=True):
            assert torch.equal(one.view(torch.uint8), other.cpu().view(torch.uint8))
        assert torch.equal(dequantise(*here), dequantise(*there).cpu())
