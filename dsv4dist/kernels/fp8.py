"""The byte formats in plain torch: e4m3 (OCP and FNUZ), e8m0 scale bytes, e2m1 pairs, and the block quantisers.

Every kernel and reader is judged against this file. Scale arithmetic is integer arithmetic on exponents, never log2.
Non-finite input: a single number that is NaN encodes as the format's NaN and an infinity saturates; a block that holds
either gets a NaN scale (byte 255) and data bytes 0, so that all of it decodes to NaN and no data byte is a NaN code.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4dist.errors import ShapeError, UnsupportedError
from dsv4dist.kernels.paged_cache import Fp8Format

AMAX_FLOOR = 1e-4  # of the cache quantisers (attention spec 2.2); keeps the scale of an all-zero block away from 0
NAN_SCALE_BYTE = 255
WEIGHT_BLOCK = 128  # rows and columns that share one scale of an fp8 weight
FP4_BLOCK = 32  # columns that share one scale of an fp4 weight
FP4_MAX = 6.0

_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decode_fp8(data: Tensor, fp8_format: Fp8Format) -> Tensor:
    """The fp32 values of e4m3 bytes, any shape, given as uint8 or as the format's torch dtype (attention spec 2.1).

    Raises: ShapeError when the dtype is neither, so that bytes of the other encoding cannot be read by accident.
    """
    if data.dtype not in (torch.uint8, fp8_format.torch_dtype):
        raise ShapeError("fp8 data", f"uint8 or {fp8_format.torch_dtype}", data.dtype)
    return data.view(fp8_format.torch_dtype).float()


def encode_fp8(values: Tensor, fp8_format: Fp8Format) -> Tensor:
    """uint8 e4m3 bytes of `values` (any float dtype), clamped to quant_max, rounded to nearest even (spec 2.1).

    No number becomes a NaN byte: FNUZ writes -0 and negative underflow as 0x00, since 0x80 is its NaN.
    """
    x = values.float()
    limit = fp8_format.quant_max
    data = x.clamp(-limit, limit).to(fp8_format.torch_dtype).view(torch.uint8)
    if fp8_format is Fp8Format.FNUZ:
        data = data.where(data != 0x80, torch.zeros_like(data))
        return data.masked_fill(x.isnan(), 0x80)
    return data.masked_fill(x.isnan(), 0x7F)


def decode_scale_byte(scale: Tensor) -> Tensor:
    """fp32 2^(b-127) of e8m0 bytes, given as uint8 or float8_e8m0fnu; byte 0 is 2^-127 exactly, byte 255 is NaN."""
    byte = scale_bytes(scale).to(torch.int32)
    bits = (byte << 23).where(byte > 0, torch.full_like(byte, 0x00400000))
    return bits.masked_fill(byte == NAN_SCALE_BYTE, 0x7FC00000).view(torch.float32)


def encode_scale_byte(scale: Tensor) -> Tensor:
    """The uint8 e8m0 bytes of fp32 powers of two, 2^-127 to 2^127; nothing is rounded (attention spec 6.5).

    Raises: UnsupportedError for NaN, infinity, 0, a negative number, or a number that is not a power of two.
    """
    bits = scale.float().contiguous().view(torch.int32)
    byte = bits >> 23
    smallest = bits == 0x00400000  # 2^-127 is a subnormal fp32: exponent field 0
    power = (byte > 0) & (byte < 255) & (bits & 0x7FFFFF == 0)
    bad = ~(power | smallest)
    if bool(bad.any()):
        found = scale[bad].flatten()[0].item()
        raise UnsupportedError(f"scale {found} is not a positive power of two; it cannot be stored as an exponent byte")
    return byte.to(torch.uint8)


def scale_bytes(scale: Tensor) -> Tensor:
    """e8m0 scales as uint8, whichever of the two dtypes they came in.  Raises: ShapeError for any other dtype."""
    if scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise ShapeError("scale bytes", "uint8 or float8_e8m0fnu", scale.dtype)
    return scale.view(torch.uint8)


def scale_byte_of(amax: Tensor, quant_max: float) -> Tensor:
    """uint8 scale bytes 127 + ceil(log2(amax / quant_max)) of fp32 magnitudes; 255 where amax is not finite.

    Read off the bit pattern: the exponents' difference, plus one if amax has the larger mantissa (spec 2.2). `amax`
    must not be negative; the caller applies its floor.
    """
    top = int(torch.tensor(quant_max, dtype=torch.float32).view(torch.int32).item())
    carry = 0x7FFFFF - (top & 0x7FFFFF)
    finite = amax.isfinite()
    bits = amax.float().masked_fill(~finite, 0.0).view(torch.int32)
    byte = ((bits + carry) >> 23) - ((top >> 23) - 127)
    return byte.clamp(0, 254).masked_fill(~finite, NAN_SCALE_BYTE).to(torch.uint8)


def ocp_to_fnuz(data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Rewrite OCP bytes and their e8m0 scales as FNUZ: the same bytes are worth half, so each exponent grows by one.

    data uint8 or float8_e4m3fn, scale uint8 or float8_e8m0fnu; returns uint8 of both. -0 becomes 0, NaN data becomes
    0x80, NaN scales stay 255.  Raises: UnsupportedError for scale byte 254, which has no double.
    """
    byte = scale_bytes(scale)
    if bool((byte == 254).any()):
        raise UnsupportedError("scale byte 254 (2^127) cannot be doubled for the FNUZ encoding")
    return ocp_bytes_to_fnuz(data), (byte + 1).where(byte < NAN_SCALE_BYTE, byte)


def ocp_bytes_to_fnuz(data: Tensor) -> Tensor:
    """OCP bytes as FNUZ bytes, uint8, which are worth half: -0 becomes 0, NaN becomes 0x80."""
    raw = data.view(torch.uint8)
    nan = (raw & 0x7F) == 0x7F
    return raw.masked_fill(raw == 0x80, 0).masked_fill(nan, 0x80)


def quantise_groups(values: Tensor, fp8_format: Fp8Format, group: int = 64) -> tuple[Tensor, Tensor]:
    """Quantise the last dimension in groups with power-of-two scales, as the caches do (attention spec 2.2).

    values [..., n * group] any float dtype, rounded to bf16 first; returns uint8 data of the same shape and uint8 scale
    bytes [..., n].  Raises: ShapeError when the last dimension is not a multiple of `group`.
    """
    if values.shape[-1] % group:
        raise ShapeError("last dimension of values to quantise", f"a multiple of {group}", values.shape[-1])
    x = _grouped(values.to(torch.bfloat16).float(), group)
    byte = scale_byte_of(x.abs().amax(-1).clamp_min(AMAX_FLOOR), fp8_format.quant_max)
    return encode_fp8(_scaled_down(x, byte), fp8_format).flatten(-2), byte


def dequantise_groups(data: Tensor, scale: Tensor, fp8_format: Fp8Format, group: int = 64) -> Tensor:
    """fp32 values [..., n * group] of `quantise_groups` output: data as there, scale bytes [..., n]."""
    values = _grouped(decode_fp8(data, fp8_format), group) * decode_scale_byte(scale).unsqueeze(-1)
    return values.flatten(-2)


def quantise_index_rows(values: Tensor, fp8_format: Fp8Format) -> tuple[Tensor, Tensor]:
    """Quantise whole rows with one power-of-two scale each: indexer keys and queries (attention spec 2.5, 4.6).

    values [..., d] any float dtype, rounded to bf16 first; returns uint8 data [..., d] and fp32 scales [...].
    """
    data, byte = quantise_groups(values, fp8_format, group=values.shape[-1])
    return data, decode_scale_byte(byte.squeeze(-1))


def dequantise_index_rows(data: Tensor, scale: Tensor, fp8_format: Fp8Format) -> Tensor:
    """fp32 rows of `quantise_index_rows` output: data [..., d], fp32 scale [...]."""
    return decode_fp8(data, fp8_format) * scale.unsqueeze(-1)


def quantise_block_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight [out, in] as the releases store it: float8_e4m3fn and e8m0 scales, one per 128x128 block.

    Returns data [out, in] and float8_e8m0fnu [ceil(out/128), ceil(in/128)]; edge blocks may be ragged (checkpoint
    spec 2). Scales round up, so nothing clips.
    """
    rows, columns = weight.shape
    blocks = _blocks(rows), _blocks(columns)
    padded = torch.zeros(blocks[0] * WEIGHT_BLOCK, blocks[1] * WEIGHT_BLOCK, device=weight.device)
    padded[:rows, :columns] = weight
    tiles = padded.view(blocks[0], WEIGHT_BLOCK, blocks[1], WEIGHT_BLOCK)
    byte = scale_byte_of(tiles.abs().amax(dim=(1, 3)).clamp_min(AMAX_FLOOR), Fp8Format.OCP.quant_max)
    data = encode_fp8(_scaled_down(tiles.transpose(1, 2).flatten(2), byte), Fp8Format.OCP)
    data = data.view(*blocks, WEIGHT_BLOCK, WEIGHT_BLOCK).transpose(1, 2).reshape(padded.shape)[:rows, :columns]
    return data.contiguous().view(torch.float8_e4m3fn), byte.view(torch.float8_e8m0fnu)


def dequantise_block_fp8(weight: Tensor, scale: Tensor) -> Tensor:
    """fp32 values of a weight [out, in] float8_e4m3fn with one scale per 128x128 block, edges ragged.

    scale [ceil(out/128), ceil(in/128)] float8_e8m0fnu, uint8 (exponent bytes) or fp32; it multiplies. A part of a
    larger weight must begin at a block border in both dimensions.  Raises: ShapeError.
    """
    rows, columns = weight.shape
    expected = (_blocks(rows), _blocks(columns))
    if tuple(scale.shape) != expected:
        raise ShapeError(f"block scale of a weight {[rows, columns]}", list(expected), list(scale.shape))
    factor = scale if scale.dtype == torch.float32 else decode_scale_byte(scale)
    values = decode_fp8(weight, Fp8Format.OCP)
    for row in range(expected[0]):  # a block row at a time: no fp32 copy of the scales at the weight's size
        lines = factor[row].repeat_interleave(WEIGHT_BLOCK)[:columns]
        values[row * WEIGHT_BLOCK : (row + 1) * WEIGHT_BLOCK] *= lines
    return values


def quantise_fp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """An expert weight [out, in] as the releases store it: e2m1 pairs and e8m0 scales, one per 32 columns.

    Returns int8 [out, in/2] (low nibble = even column) and float8_e8m0fnu [out, in/32] (checkpoint spec 2). Scales
    round up, values to nearest even.  Raises: ShapeError when `in` is not a multiple of 32.
    """
    rows, columns = weight.shape
    if columns % FP4_BLOCK:
        raise ShapeError("columns of an fp4 weight", f"a multiple of {FP4_BLOCK}", columns)
    blocks = weight.float().view(rows, -1, FP4_BLOCK)
    byte = scale_byte_of(blocks.abs().amax(-1).clamp_min(AMAX_FLOOR), FP4_MAX)
    x = _scaled_down(blocks, byte).view(rows, columns)
    size = x.abs()
    # Midpoints between neighbouring magnitudes; on a tie the even code wins, hence > and >= in turn.
    code = (size > 0.25).to(torch.uint8)
    for middle, tie_up in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += (size >= middle) if tie_up else (size > middle)
    code |= (x < 0).to(torch.uint8) << 3
    return (code[:, 0::2] | (code[:, 1::2] << 4)).view(torch.int8), byte.view(torch.float8_e8m0fnu)


def dequantise_fp4(packed: Tensor, scale: Tensor) -> Tensor:
    """fp32 values [out, in] of e2m1 pairs [out, in/2] int8 or uint8, low nibble = even column.

    scale [out, ceil(in/32)] float8_e8m0fnu, uint8 or fp32; it multiplies. A part of a larger weight must begin at a
    multiple of 32 columns.  Raises: ShapeError.
    """
    if packed.dtype not in (torch.int8, torch.uint8):
        raise ShapeError("fp4 data", "int8 or uint8", packed.dtype)
    rows, columns = packed.shape[0], packed.shape[1] * 2
    expected = (rows, -(-columns // FP4_BLOCK))
    if tuple(scale.shape) != expected:
        raise ShapeError(f"scale of an fp4 weight {[rows, columns]}", list(expected), list(scale.shape))
    factor = scale if scale.dtype == torch.float32 else decode_scale_byte(scale)
    code_values = torch.tensor([*_FP4_VALUES, *(-value for value in _FP4_VALUES)], device=packed.device)
    byte = torch.arange(256, device=packed.device)
    pairs = torch.stack((code_values[byte & 0x0F], code_values[byte >> 4]), dim=-1)
    values = pairs[packed.view(torch.uint8).int()].flatten(1)
    return values * factor.repeat_interleave(FP4_BLOCK, dim=1)[:, :columns]


def _blocks(size: int) -> int:
    return -(-size // WEIGHT_BLOCK)


def _grouped(values: Tensor, group: int) -> Tensor:
    return values.reshape(*values.shape[:-1], values.shape[-1] // group, group)


def _scaled_down(x: Tensor, byte: Tensor) -> Tensor:
    """x [..., n] times 2^-e of its scale byte [...]; zeros where the scale is NaN, so that no NaN code is written."""
    inverse = decode_scale_byte(254 - byte.clamp_max(254)).unsqueeze(-1)
    return (x * inverse).masked_fill((byte == NAN_SCALE_BYTE).unsqueeze(-1), 0.0)
