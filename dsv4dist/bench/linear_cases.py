"""Cases of the projections: block-scaled fp8 products beside those of the library that torch calls, and bf16."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from dsv4dist.arch import arch_of
from dsv4dist.bench.cases import Case, CaseSkippedError, Linear, Sizes, normal
from dsv4dist.bench.device_time import Call
from dsv4dist.kernels.fp8 import WEIGHT_BLOCK, decode_scale_byte

LIBRARY_ROWS = 4
"""The library's block-scaled product takes multiples of this many rows only; fewer are padded."""


def linear_cases(sizes: Sizes) -> Iterator[Case]:
    """Per projection and number of rows: ours from bf16 rows and from quantised ones, the library's in fp8 and bf16.

    The library's fp8 products get quantised rows: compare them with ours from quantised rows.
    """
    for linear in sizes.linears:
        for rows in sizes.linear_rows:
            yield from _grouped_cases(linear, rows) if linear.layer == "wo_a" else _linear_cases(linear, rows)


def _fields(linear: Linear, rows: int, dtype: str) -> dict[str, object]:
    groups = {"groups": linear.groups} if linear.layer == "wo_a" else {}
    return {
        "model": linear.model, "layer": linear.layer, "tp": linear.tp, "rows": rows, **groups, "n": linear.n,
        "k": linear.k, "dtype": dtype,
    }  # fmt: skip


def _linear_cases(linear: Linear, rows: int) -> Iterator[Case]:
    n, k = linear.n, linear.k
    results, blocks = rows * n * 2, -(-k // WEIGHT_BLOCK)
    fp8_weight = n * k + -(-n // WEIGHT_BLOCK) * blocks
    fp8_rows = rows * (k + blocks * 4)
    flops = 2 * rows * n * k

    def case(method: str, make: Callable[..., Call], bytes_moved: int, fp8: bool = True) -> Case:
        fields = _fields(linear, rows, "fp8" if fp8 else "bfloat16")
        op = "fp8_linear"
        return Case(op, method, fields, partial(make, linear, rows), bytes_moved + results, flops, fp8)

    yield case("triton", _ours, fp8_weight + rows * k * 2)
    yield case("as in layers", _as_in_layers, fp8_weight + rows * k * 2)
    yield case("triton, quantised rows", _ours_quantised, fp8_weight + fp8_rows)
    yield case("torch scaled_mm, 128-blocks", _library_blocks, fp8_weight + fp8_rows)
    yield case("torch scaled_mm, one scale per row", _library_rows, n * (k + 4) + rows * (k + 4))
    yield case("torch matmul", _library_bf16, (n + rows) * k * 2, fp8=False)


def _weight(shape: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """An fp8 weight in the device's encoding and its e8m0 block scales, around 2^-7."""
    data = normal(*shape, device=device).to(arch_of(device).fp8_format.torch_dtype)
    blocks = [*shape[:-2], -(-shape[-2] // WEIGHT_BLOCK), -(-shape[-1] // WEIGHT_BLOCK)]
    scale = torch.randint(118, 122, blocks, dtype=torch.uint8, device=device)
    return data, scale.view(torch.float8_e8m0fnu)


def _ours(linear: Linear, rows: int, device: torch.device) -> Call:
    from dsv4dist.kernels._triton.fp8_linear import fp8_linear

    x = normal(rows, linear.k, device=device)
    data, scale = _weight((linear.n, linear.k), device)
    return partial(fp8_linear, x, data, decode_scale_byte(scale), fp8_format=arch_of(device).fp8_format)


def _as_in_layers(linear: Linear, rows: int, device: torch.device) -> Call:
    """What layers call: few rows are not quantised; the kernel is chosen by their number."""
    from dsv4dist.kernels._triton.fp8_linear import fp8_weight_linear

    groups = linear.groups if linear.layer == "wo_a" else 1
    data, scale = _weight((groups, linear.n, linear.k), device)
    x = normal(rows, groups, linear.k, device=device)
    return partial(fp8_weight_linear, x, data, decode_scale_byte(scale), arch_of(device).fp8_format)


def _ours_quantised(linear: Linear, rows: int, device: torch.device) -> Call:
    from dsv4dist.kernels._triton.fp8_linear import fp8_linear, quantise_tokens

    encoding = arch_of(device).fp8_format
    data, scale = quantise_tokens(normal(rows, linear.k, device=device), encoding)
    return partial(fp8_linear, data, *_weight((linear.n, linear.k), device), scale, fp8_format=encoding)


def _library_blocks(linear: Linear, rows: int, device: torch.device) -> Call:
    from dsv4dist.kernels._triton.fp8_linear import quantise_tokens

    padded = -(-rows // LIBRARY_ROWS) * LIBRARY_ROWS
    data, scale = quantise_tokens(normal(padded, linear.k, device=device), arch_of(device).fp8_format)
    weight, block_scale = _weight((linear.n, linear.k), device)
    # Scales of x column by column, those of the weight row by row, padded to a multiple of four blocks of channels.
    weight_scale = F.pad(decode_scale_byte(block_scale), (0, -block_scale.shape[1] % 4)).T
    return _scaled_mm(data, weight.T, scale.T.contiguous().T, "BlockWise1x128", weight_scale, "BlockWise128x128")


def _library_rows(linear: Linear, rows: int, device: torch.device) -> Call:
    encoding = arch_of(device).fp8_format.torch_dtype
    x, weight = normal(rows, linear.k, device=device).to(encoding), _weight((linear.n, linear.k), device)[0]
    ones = torch.ones(rows, 1, device=device), torch.ones(1, linear.n, device=device)
    return _scaled_mm(x, weight.T, ones[0], "RowWise", ones[1], "RowWise", fast=True)


def _scaled_mm(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    x_kind: str,
    weight_scale: torch.Tensor,
    weight_kind: str,
    fast: bool = False,
) -> Call:
    """torch's product of fp8 matrices, tried once.  Raises: CaseSkippedError where torch or the device has it not."""
    try:
        kinds = getattr(F.ScalingType, x_kind), getattr(F.ScalingType, weight_kind)
        call = partial(F.scaled_mm, x, weight, x_scale, kinds[0], weight_scale, kinds[1], use_fast_accum=fast)
        call()
    except (AttributeError, RuntimeError, NotImplementedError, ValueError) as error:
        raise CaseSkippedError(str(error).splitlines()[0]) from None
    return call


def _library_bf16(linear: Linear, rows: int, device: torch.device) -> Call:
    return partial(F.linear, normal(rows, linear.k, device=device), normal(linear.n, linear.k, device=device))


def _grouped_cases(linear: Linear, rows: int) -> Iterator[Case]:
    groups, n, k = linear.groups, linear.n, linear.k
    results, x_bytes = rows * groups * n * 2, rows * groups * k * 2
    blocks = groups * -(-n // WEIGHT_BLOCK) * -(-k // WEIGHT_BLOCK)
    flops = 2 * rows * groups * n * k
    for method, dtype, make in (
        ("triton", "fp8", _grouped_fp8),
        ("as in layers", "fp8", _as_in_layers),
        ("triton", "bfloat16", _grouped_bf16),
        ("torch einsum", "bfloat16", _grouped_einsum),
    ):
        weight = groups * n * k + blocks if dtype == "fp8" else groups * n * k * 2
        fields = _fields(linear, rows, dtype)
        through = weight + x_bytes + results
        yield Case("grouped_wo_a", method, fields, partial(make, linear, rows), through, flops, dtype == "fp8")


def _grouped_fp8(linear: Linear, rows: int, device: torch.device) -> Call:
    from dsv4dist.kernels._triton.grouped_wo_a import grouped_wo_a

    x = normal(rows, linear.groups, linear.k, device=device)
    weight = _weight((linear.groups, linear.n, linear.k), device)
    return partial(grouped_wo_a, x, *weight, fp8_format=arch_of(device).fp8_format)


def _grouped_bf16(linear: Linear, rows: int, device: torch.device) -> Call:
    from dsv4dist.kernels._triton.grouped_wo_a import grouped_wo_a

    x = normal(rows, linear.groups, linear.k, device=device)
    return partial(grouped_wo_a, x, normal(linear.groups, linear.n, linear.k, device=device))


def _grouped_einsum(linear: Linear, rows: int, device: torch.device) -> Call:
    x = normal(rows, linear.groups, linear.k, device=device)
    return partial(torch.einsum, "tgi,goi->tgo", x, normal(linear.groups, linear.n, linear.k, device=device))
