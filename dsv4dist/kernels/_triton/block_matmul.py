"""The matrix product behind the projections: y = x . w^T per group, with one scale per 128 channels or without."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4dist.arch import ArchTraits, arch_of, traits_by_name
from dsv4dist.kernels._triton.compile_spec import ARCHS, CompileSpec, spec
from dsv4dist.kernels._triton.early_launch import early_launch, wait_for_previous
from dsv4dist.kernels._triton.quantise import cast, decode_e4m3, decode_scale
from dsv4dist.kernels.paged_cache import Fp8Format

SCALE_BLOCK = 128
"""Channels that share a scale in x, and rows and channels that share one in w."""
UNSCALED, FP32_SCALE, BYTE_SCALE = 0, 1, 2
FORMATS = {None: 0, Fp8Format.OCP: 1, Fp8Format.FNUZ: 2}
"""How kernels are told an encoding, or that there is none."""
_FNUZ = tl.constexpr(FORMATS[Fp8Format.FNUZ])
_UNSCALED, _BYTE_SCALE = tl.constexpr(UNSCALED), tl.constexpr(BYTE_SCALE)
_SCALE_BLOCK = tl.constexpr(SCALE_BLOCK)


@dataclass(frozen=True)
class Tile:
    """One compiled shape: `rows` of x by `columns` of w a program, for at most `max_rows` rows of x.

    stages  tiles of one-byte weights in flight; wider ones get as many fewer
    """

    max_rows: int
    rows: int
    columns: int
    warps: int
    stages: int


_MANY = 1 << 30
_SMALL = (Tile(16, 16, 64, 4, 5), Tile(32, 32, 64, 4, 4), Tile(64, 64, 64, 4, 4), Tile(128, 128, 64, 4, 4))
_TILES = {
    "sm90": (*_SMALL, Tile(_MANY, 128, 128, 8, 4)),
    "gfx942": (Tile(16, 16, 32, 2, 2), Tile(64, 32, 64, 4, 2), Tile(256, 64, 64, 4, 2), Tile(_MANY, 128, 128, 8, 2)),
    "gfx950": (Tile(16, 16, 32, 2, 2), Tile(64, 32, 64, 4, 2), Tile(256, 64, 64, 4, 2), Tile(_MANY, 128, 128, 8, 2)),
    "other": (Tile(_MANY, 32, 32, 4, 2),),
}
"""Shapes by architecture, ascending by rows; the first that holds x's rows is taken."""
_BYTE_SCALED_TILES = {"sm90": (*_SMALL[:-1], replace(_SMALL[-1], max_rows=_MANY))}
"""Instead of those where x's scales are bytes: decoding them takes registers, which the largest shape lacks."""
MIN_BLOCKS, MAX_SPLITS = 4, 16
"""A split covers at least this many blocks of 128 channels, and there are at most so many splits."""


@dataclass(frozen=True)
class Operand:
    """One factor of the product, [groups, rows, channels] with unit stride in channels, and its scales.

    data    float, or bytes of an fp8 encoding
    scale   [groups, rows or blocks of rows, blocks of channels] fp32 or e8m0 bytes, any strides; None = unscaled
    """

    data: torch.Tensor
    scale: torch.Tensor | None = None

    @property
    def scale_kind(self) -> int:
        return UNSCALED if self.scale is None else FP32_SCALE if self.scale.dtype == torch.float32 else BYTE_SCALE

    @property
    def scale_or_data(self) -> torch.Tensor:
        return self.data if self.scale is None else self.scale

    @property
    def scale_strides(self) -> tuple[int, ...]:
        return (0, 0, 0) if self.scale is None else self.scale.stride()


@triton.jit
def load_scale(ptr, mask, KIND: tl.constexpr):
    """fp32 scales: stored so, or as e8m0 bytes, of which 0 is 2^-127 and 255 is NaN."""
    if KIND == _BYTE_SCALE:
        return decode_scale(tl.load(ptr, mask=mask, other=127))
    else:
        return tl.load(ptr, mask=mask, other=1.0)


@triton.jit
def load_operand(ptr, mask, FORMAT: tl.constexpr, STORED: tl.constexpr, DOT: tl.constexpr):
    """A tile in DOT: of a type that the device converts (STORED), of other floats (FORMAT 0), or fp8 bytes to decode."""
    if STORED is not None:
        return tl.load(ptr.to(tl.pointer_type(STORED)), mask=mask, other=0.0).to(DOT)
    elif FORMAT == 0:
        return tl.load(ptr, mask=mask, other=0.0).to(DOT)
    else:
        return decode_e4m3(tl.load(ptr, mask=mask, other=0), FORMAT == _FNUZ).to(DOT)


@triton.jit
def _block_matmul_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    out_ptr,
    num_rows,
    num_columns,
    num_channels,
    blocks_per_split,
    stride_x_group,
    stride_x_row,
    stride_x_scale_group,
    stride_x_scale_row,
    stride_x_scale_block,
    stride_w_group,
    stride_w_row,
    stride_w_scale_group,
    stride_w_scale_row,
    stride_w_scale_block,
    stride_out_split,
    stride_out_group,
    stride_out_row,
    X_SCALE: tl.constexpr,
    W_SCALE: tl.constexpr,
    X_FORMAT: tl.constexpr,
    W_FORMAT: tl.constexpr,
    X_STORED: tl.constexpr,
    W_STORED: tl.constexpr,
    DOT: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One tile [COLUMNS, ROWS] of (x . w^T)^T: the weight is the first factor, whose side may not be small.

    COLUMNS divides 128, so that a tile has one weight scale per block of channels. EVEN: no ragged block of channels.
    """
    wait_for_previous()
    row_tiles = tl.cdiv(num_rows, ROWS)
    row_tile = tl.program_id(0) % row_tiles  # neighbours share weights, the larger factor
    column_tile = tl.program_id(0) // row_tiles
    group = tl.program_id(2).to(tl.int64)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    channel = tl.arange(0, _SCALE_BLOCK)
    row_ok = row < num_rows
    column_ok = column < num_columns
    wide_row = row.to(tl.int64)
    wide_column = column.to(tl.int64)
    x_tile = x_ptr + group * stride_x_group + wide_row[None, :] * stride_x_row + channel[:, None]
    w_tile = w_ptr + group * stride_w_group + wide_column[:, None] * stride_w_row + channel[None, :]
    x_scale_tile = x_scale_ptr + group * stride_x_scale_group + wide_row * stride_x_scale_row
    w_scale_row = (column_tile * COLUMNS // _SCALE_BLOCK).to(tl.int64)
    w_scale_tile = w_scale_ptr + group * stride_w_scale_group + w_scale_row * stride_w_scale_row
    acc = tl.zeros((COLUMNS, ROWS), tl.float32)
    first = tl.program_id(1) * blocks_per_split
    last = tl.minimum(first + blocks_per_split, tl.cdiv(num_channels, _SCALE_BLOCK))
    for block in tl.range(first, last, num_stages=STAGES):
        at = block * _SCALE_BLOCK
        x_mask = row_ok[None, :]
        w_mask = column_ok[:, None]
        if not EVEN:
            x_mask = x_mask & (channel[:, None] + at < num_channels)
            w_mask = w_mask & (channel[None, :] + at < num_channels)
        w = load_operand(w_tile + at, w_mask, W_FORMAT, W_STORED, DOT)
        x = load_operand(x_tile + at, x_mask, X_FORMAT, X_STORED, DOT)
        if W_SCALE == _UNSCALED:
            acc = tl.dot(w, x, acc, input_precision="ieee")
        else:
            w_scale = load_scale(w_scale_tile + block * stride_w_scale_block, block < last, W_SCALE)
            if X_SCALE == _UNSCALED:
                acc += tl.dot(w, x, input_precision="ieee") * w_scale
            else:
                x_scale = load_scale(x_scale_tile + block * stride_x_scale_block, row_ok, X_SCALE)
                acc += tl.dot(w, x, input_precision="ieee") * (x_scale * w_scale)[None, :]
    out_tile = out_ptr + tl.program_id(1).to(tl.int64) * stride_out_split + group * stride_out_group
    out_tile = out_tile + wide_row[None, :] * stride_out_row + column[:, None]
    tl.store(out_tile, cast(acc, out_ptr.dtype.element_ty), mask=row_ok[None, :] & column_ok[:, None])


@triton.jit
def _add_splits_kernel(
    part_ptr, out_ptr, num_rows, num_columns, splits, stride_part, stride_out_group, stride_out_row, BLOCK: tl.constexpr
):
    """out[group, row, column] = the sum over splits, first to last, of part[split, group, row, column], contiguous."""
    wait_for_previous()
    row = tl.program_id(1).to(tl.int64)
    group = tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = column < num_columns
    here = part_ptr + (group * num_rows + row) * num_columns + column
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(splits):
        total += tl.load(here, mask=mask, other=0.0)
        here += stride_part
    out = out_ptr + group * stride_out_group + row * stride_out_row + column
    tl.store(out, cast(total, out_ptr.dtype.element_ty), mask=mask)


def block_matmul(
    x: Operand, w: Operand, out: torch.Tensor, fp8_format: Fp8Format | None = None, num_splits: int | None = None
) -> None:
    """out[g, m, n] = sum over k of x[g, m, k] * w[g, n, k], accumulated in fp32, scales applied per 128 channels.

        x, w        same groups and channels; both unscaled (floats), both scaled (bytes of `fp8_format`), or only w
        out         [groups, rows of x, rows of w] any float dtype, unit stride in the last dimension, written
        num_splits  shares of the channels that different programs sum; planned from sizes if None
    The result does not depend on the order in which programs run.  Capture: launches depend on sizes only.
    """
    groups, rows, channels = x.data.shape
    columns = w.data.shape[1]
    arch = arch_traits(x.data.device)
    tile = _tile(rows, arch, fp8_format, x.data.dtype, x.scale_kind)
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)
    blocks = triton.cdiv(channels, SCALE_BLOCK)
    splits = plan_splits(tiles * groups, blocks, arch.compute_units) if num_splits is None else num_splits
    per_split = triton.cdiv(blocks, splits) if blocks else 0
    splits = triton.cdiv(blocks, per_split) if blocks else 1  # none is empty
    target = out
    if splits > 1:
        target = torch.empty((splits, groups, rows, columns), dtype=torch.float32, device=out.device)
    x_data, w_data = (f.data if f.scale is None else f.data.view(torch.uint8) for f in (x, w))
    _block_matmul_kernel[(tiles, splits, groups)](
        x_data,
        x.scale_or_data,
        w_data,
        w.scale_or_data,
        target,
        rows,
        columns,
        channels,
        per_split,
        x_data.stride(0),
        x_data.stride(1),
        *x.scale_strides,
        w_data.stride(0),
        w_data.stride(1),
        *w.scale_strides,
        target.stride(0) if splits > 1 else 0,
        target.stride(-3),
        target.stride(-2),
        X_SCALE=x.scale_kind,
        W_SCALE=w.scale_kind,
        EVEN=channels % SCALE_BLOCK == 0,
        num_warps=tile.warps,
        **early_launch(out.device),
        **_constants(tile, x.data.dtype, arch, fp8_format, x.scale is not None),
    )
    if splits > 1:
        block = _columns_to_add(columns)
        _add_splits_kernel[(triton.cdiv(columns, block), rows, groups)](
            target, out, rows, columns, splits, target.stride(0), out.stride(0), out.stride(1), BLOCK=block,
            num_warps=4, **early_launch(out.device),
        )  # fmt: skip


def plan_splits(tiles: int, blocks: int, compute_units: int) -> int:
    """Shares of `blocks` blocks of channels for `tiles` tiles on so many compute units; 1 once the tiles fill them."""
    if tiles >= compute_units:
        return 1
    return max(1, min(MAX_SPLITS, blocks // MIN_BLOCKS, 2 * compute_units // max(1, tiles)))


@functools.cache
def arch_traits(device: torch.device) -> ArchTraits:
    """The traits of the device that a tensor lies on, asked for once."""
    return arch_of(device)


def _tile(rows: int, arch: ArchTraits, fp8_format: Fp8Format | None, dtype: torch.dtype, x_scale: int) -> Tile:
    tiles = _TILES.get(arch.name, _TILES["other"])
    if x_scale == BYTE_SCALE:
        tiles = _BYTE_SCALED_TILES.get(arch.name, tiles)
    if dtype == torch.float32 or (fp8_format is not None and fp8_format is not arch.fp8_format):
        tiles = _TILES["other"]  # wide elements, or bytes decoded in registers: little room
    return next(tile for tile in tiles if rows <= tile.max_rows)


def _constants(
    tile: Tile, dtype: torch.dtype, arch: ArchTraits, fp8_format: Fp8Format | None, x_is_fp8: bool
) -> dict[str, Any]:
    """What the tile and the types of x (`dtype`) and w decide among the kernel's compile-time arguments."""
    interpreted = arch.name == "cpu"  # whose bf16 product is wrong and whose fp8 one is slow
    fp8_type = None
    if fp8_format is arch.fp8_format and not interpreted:
        fp8_type = tl.float8e4nv if fp8_format is Fp8Format.OCP else tl.float8e4b8
    if x_is_fp8:
        x_type, dot = fp8_type, fp8_type or tl.float16
    else:
        wide = interpreted or dtype == torch.float32
        x_type = None if wide else tl.bfloat16 if dtype == torch.bfloat16 else tl.float16
        dot = x_type or tl.float32
    return {
        "X_FORMAT": FORMATS[fp8_format] if x_is_fp8 else 0, "W_FORMAT": FORMATS[fp8_format], "X_STORED": x_type,
        "W_STORED": x_type if fp8_format is None else fp8_type, "DOT": dot, "ROWS": tile.rows, "COLUMNS": tile.columns,
        "STAGES": max(2, tile.stages if fp8_format is not None else tile.stages // dtype.itemsize),
    }  # fmt: skip


def _columns_to_add(columns: int) -> int:
    return min(1024, triton.next_power_of_2(columns))


ROW_COUNTS = (1, 64, 256, 4096)
"""Tokens of the launches that are compiled ahead: from one request's decode step to a chunk of a prompt."""


def matmul_specs(
    name: str, groups: int, columns: int, channels: int, x_scale: int, w_scale: int, decoded: bool = False,
    row_counts: tuple[int, ...] = ROW_COUNTS,
) -> list[CompileSpec]:  # fmt: skip
    """The launches of one projection [groups, columns, channels] with so many tokens, each shape compiled once.

    x_scale, w_scale as `Operand.scale_kind`; UNSCALED = bf16. x's scales are column-major if fp32. decoded: OCP
    bytes, as checkpoints have them, where the matrix unit knows only FNUZ; otherwise the encoding that it knows.
    """
    specs: dict[tuple[Any, ...], CompileSpec] = {}
    for arch in map(traits_by_name, ARCHS):
        if decoded and arch.fp8_format is Fp8Format.OCP:
            continue
        fp8_format = None if w_scale == UNSCALED else Fp8Format.OCP if decoded else arch.fp8_format
        dtype = fp8_format.torch_dtype if fp8_format and x_scale != UNSCALED else torch.bfloat16
        for rows in row_counts:
            tile = _tile(rows, arch, fp8_format, dtype, x_scale)
            tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns) * groups
            blocks = triton.cdiv(channels, SCALE_BLOCK)
            splits = plan_splits(tiles, blocks, arch.compute_units)
            share = triton.cdiv(blocks, splits)
            key = (arch.name, tile, splits > 1)
            if key not in specs:
                specs[key] = _matmul_spec(
                    name, arch, tile, splits > 1, share % 16 == 0, rows > 1, dtype, fp8_format, x_scale, w_scale
                )
    return list(specs.values())


def _matmul_spec(
    name: str, arch: ArchTraits, tile: Tile, split: bool, whole: bool, many: bool, dtype: torch.dtype,
    fp8_format: Fp8Format | None, x_scale: int, w_scale: int,
) -> CompileSpec:  # fmt: skip
    x, w = "*bf16" if x_scale == UNSCALED else "*u8", "*u8" if fp8_format else "*bf16"
    scale = {FP32_SCALE: "*fp32", BYTE_SCALE: "*u8"}
    signature = {
        "x_ptr": x, "x_scale_ptr": scale.get(x_scale, x), "w_ptr": w, "w_scale_ptr": scale.get(w_scale, w),
        "out_ptr": "*fp32" if split else "*bf16", "num_rows": "i32", "num_columns": "i32", "num_channels": "i32",
        "blocks_per_split": "i32",
        **{f"stride_{one}": "i32" for one in (
            "x_group", "x_row", "x_scale_group", "x_scale_row", "x_scale_block", "w_group", "w_row", "w_scale_group",
            "w_scale_row", "w_scale_block", "out_split", "out_group", "out_row",
        )},
    }  # fmt: skip
    ones = [] if many else ["num_rows"]
    # Unit strides, of which a launch makes constants.
    if x_scale != UNSCALED:
        ones.append("stride_x_scale_row" if x_scale == FP32_SCALE else "stride_x_scale_block")
    if w_scale != UNSCALED:
        ones.append("stride_w_scale_block")
    types = _constants(tile, dtype, arch, fp8_format, x_scale != UNSCALED)
    values = {"X_SCALE": x_scale, "W_SCALE": w_scale, "EVEN": True, **types}
    return spec(
        _block_matmul_kernel,
        f"block_matmul {name} {tile.rows}x{tile.columns}" + (" split" if split else ""),
        {key: kind for key, kind in signature.items() if key not in ones},
        constexprs={**values, **dict.fromkeys(ones, 1)},
        unaligned=("stride_x_scale_group", "stride_x_scale_block") if x_scale == FP32_SCALE else (),
        aligned=("num_columns", "num_channels", *(["blocks_per_split"] if whole else [])),
        num_warps=tile.warps,
        archs=(arch.name,),
        has_dot=True,
        spills_because="two registers; timed so on an H200" if arch.name == "sm90" and tile.rows == SCALE_BLOCK else "",
    )


def compile_specs() -> list[CompileSpec]:
    """The sum over splits of a projection's output; the products are listed by the operations that launch them."""
    numbers = ("num_rows", "num_columns", "splits", "stride_part", "stride_out_group", "stride_out_row")
    signature = {"part_ptr": "*fp32", "out_ptr": "*bf16", **dict.fromkeys(numbers, "i32")}
    return [spec(_add_splits_kernel, "add_splits", signature, constexprs={"BLOCK": _columns_to_add(4096)},
                 aligned=("num_columns",))]  # fmt: skip
