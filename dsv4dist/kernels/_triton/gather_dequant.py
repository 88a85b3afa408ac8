"""Reading entries of a paged cache into a contiguous workspace, in Triton (attention spec 4.7)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4dist.errors import ShapeError, UnsupportedError
from dsv4dist.kernels._triton.checks import (
    CODE_OF,
    cache_strides,
    check_cache,
    check_integers,
    check_rows,
    check_table,
    is_fnuz,
)
from dsv4dist.kernels._triton.compile_spec import CompileSpec, spec
from dsv4dist.kernels._triton.quantise import ROWS, cast, decode_e4m3, decode_scale, lookup_slots
from dsv4dist.kernels.block_table import BlockTable
from dsv4dist.kernels.paged_cache import NOPE_DIM, ROPE_DIM, SCALE_GROUP, TOKEN_BYTES, CacheFormat, PagedCache

TILE_ROWS = 8
_NOPE = tl.constexpr(NOPE_DIM)
_GROUP = tl.constexpr(SCALE_GROUP)
_GROUPS = tl.constexpr(8)  # of 64 channels, the last of them rotary
_ROPE = tl.constexpr(ROPE_DIM)
_TOKEN_BYTES = tl.constexpr(TOKEN_BYTES)


@triton.jit
def _gather_dequant_kernel(
    cache_ptr, blocks_ptr, first_block_ptr, seq_lens_ptr, gather_lens_ptr, out_ptr, stride_block, stride_row,
    stride_req, stride_out_req, stride_out_row, num_columns, num_slots, num_rows, offset,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr, FNUZ: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """One program: N consecutive gathered rows of one request."""
    req = tl.program_id(1).to(tl.int64)
    count = tl.load(gather_lens_ptr + req).to(tl.int64)
    first = tl.program_id(0) * N
    if first < count:
        row = (first + tl.arange(0, N)).to(tl.int64)
        wanted = (row < count) & (row < num_rows)
        entry = tl.load(seq_lens_ptr + req).to(tl.int64) - count + row
        first_block = tl.load(first_block_ptr + req)
        slot = lookup_slots(blocks_ptr + req * stride_req, first_block, entry, wanted, num_columns, BLOCK_SIZE)
        there = wanted & (slot >= 0) & (slot < num_slots)
        slot = tl.where(there, slot, 0)
        place = slot % BLOCK_SIZE
        page = (slot // BLOCK_SIZE) * stride_block
        out_row_ptr = out_ptr + req * stride_out_req + (row + offset) * stride_out_row
        if FORMAT == ROWS:
            channel = tl.arange(0, BLOCK)
            inside = (channel < WIDTH)[None, :]
            row_ptr = cache_ptr + (page + place * stride_row)[:, None] + channel[None, :]
            value = tl.load(row_ptr, mask=there[:, None] & inside, other=0.0).to(tl.float32)
            tl.store(out_row_ptr[:, None] + channel[None, :], cast(value, out_ptr.dtype.element_ty),
                     mask=wanted[:, None] & inside)  # fmt: skip
        else:
            group = tl.arange(0, _GROUPS)
            scale_ptr = cache_ptr + page + BLOCK_SIZE * _TOKEN_BYTES + place * 8
            scale = tl.load(scale_ptr[:, None] + group[None, :], mask=there[:, None], other=127)
            channel = tl.arange(0, BLOCK)
            nope = (channel < _NOPE)[None, :]
            token = page + place * _TOKEN_BYTES
            byte = tl.load(cache_ptr + token[:, None] + channel[None, :], mask=there[:, None] & nope, other=0)
            value = tl.reshape(decode_e4m3(byte, FNUZ), (N, _GROUPS, _GROUP)) * decode_scale(scale)[:, :, None]
            value = cast(tl.reshape(value, (N, BLOCK)), out_ptr.dtype.element_ty)
            tl.store(out_row_ptr[:, None] + channel[None, :], value, mask=wanted[:, None] & nope)
            rotary = tl.arange(0, _ROPE)
            rope_ptr = (cache_ptr + token + _NOPE).to(tl.pointer_type(tl.bfloat16))
            rope = tl.load(rope_ptr[:, None] + rotary[None, :], mask=there[:, None], other=0.0)
            tl.store(out_row_ptr[:, None] + _NOPE + rotary[None, :], rope.to(out_ptr.dtype.element_ty),
                     mask=wanted[:, None])  # fmt: skip


def gather_dequant(
    cache: PagedCache,
    table: BlockTable,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor | None,
    out: torch.Tensor,
    offset: int,
) -> None:
    """Copy the last gather_lens[r] of seq_lens[r] entries of each request to rows offset, offset + 1, ... of out[r].

        cache        rows, or fp8_ds_mla in either encoding (spec 2.3), any page distance
        table        where each request keeps its entries, one row per row of `out`
        seq_lens     [R] int32 or int64, entries of the request; gather_lens [R], None = all of them
        out          [R, M, D] float, channels adjacent; a value is the stored code times its scale, rounded once
    An entry without a slot gives zeros. Rows behind a request's entries keep what they held; entries that do not fit
    into M rows are left out.  Capture: the launch depends on sizes only.  Raises: ShapeError, UnsupportedError.
    """
    check_rows("out", out, (None, None, None))
    num_requests, num_rows, width = out.shape
    check_integers("seq_lens", seq_lens, (num_requests,))
    if gather_lens is not None:
        check_integers("gather_lens", gather_lens, (num_requests,))
    check_table("table", table)
    if table.blocks.shape[0] != num_requests:
        raise ShapeError("table", f"{num_requests} requests", table.blocks.shape[0])
    if cache.format is CacheFormat.FP8_INDEX:
        raise UnsupportedError("gather_dequant reads rows and fp8_ds_mla caches, not fp8_index")
    check_cache("cache", cache, width)
    if not 0 <= offset <= num_rows:
        raise ShapeError("offset", f"0 to {num_rows}", offset)
    if num_requests == 0 or num_rows == offset:
        return
    blocks = table.blocks
    _gather_dequant_kernel[(triton.cdiv(num_rows - offset, TILE_ROWS), num_requests)](
        cache.data, blocks, table.first_block, seq_lens, seq_lens if gather_lens is None else gather_lens, out,
        *cache_strides(cache), blocks.stride(0), out.stride(0), out.stride(1), blocks.shape[1], cache.num_slots,
        num_rows - offset, offset, WIDTH=width, BLOCK=triton.next_power_of_2(width), FORMAT=CODE_OF[cache.format],
        BLOCK_SIZE=cache.block_size, FNUZ=is_fnuz(cache), N=TILE_ROWS, num_warps=4,
    )  # fmt: skip


def compile_specs() -> list[CompileSpec]:
    """Window and CSA caches (64 entries a block) and HCA caches (2), both encodings and rows."""
    specs = []
    for name, code, fnuz, size in (("ocp 64", 1, False, 64), ("fnuz 64", 1, True, 64), ("ocp 2", 1, False, 2),
                                   ("rows 64", 0, False, 64)):  # fmt: skip
        signature = {
            "cache_ptr": "*u8" if code else "*bf16", "blocks_ptr": "*i32", "first_block_ptr": "*i32",
            "seq_lens_ptr": "*i32", "gather_lens_ptr": "*i32", "out_ptr": "*bf16", "stride_block": "i32",
            "stride_row": "i32", "stride_req": "i32", "stride_out_req": "i32", "stride_out_row": "i32",
            "num_columns": "i32", "num_slots": "i32", "num_rows": "i32", "offset": "i32",
        }  # fmt: skip
        values = {"WIDTH": 512, "BLOCK": 512, "FORMAT": code, "BLOCK_SIZE": size, "FNUZ": fnuz, "N": TILE_ROWS}
        specs.append(spec(_gather_dequant_kernel, f"gather_dequant {name}", signature, constexprs=values,
                          unaligned=("stride_req",), large=("cache_ptr",)))  # fmt: skip
    return specs
