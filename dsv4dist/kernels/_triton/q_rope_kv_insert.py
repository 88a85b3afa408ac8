"""Head norm and rotation of the query, rotation and insertion of the key: one Triton launch (attention spec 4.1)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4dist.errors import ShapeError
from dsv4dist.kernels._triton.checks import (
    CODE_OF,
    cache_strides,
    check_cache,
    check_integers,
    check_rotary,
    check_rows,
    is_fnuz,
    power_of_2_up_to,
)
from dsv4dist.kernels._triton.compile_spec import CompileSpec, archs_of, spec
from dsv4dist.kernels._triton.early_launch import early_launch, wait_for_previous
from dsv4dist.kernels._triton.quantise import cast, rotate_rows, split_rows, store_entry
from dsv4dist.kernels.paged_cache import Fp8Format, PagedCache


@triton.jit
def _q_rope_kv_insert_kernel(
    q_ptr, kv_ptr, positions_ptr, cos_sin_ptr, cache_ptr, slots_ptr, out_ptr,
    stride_q_token, stride_q_head, stride_kv, stride_table, stride_block, stride_row,
    num_tokens, num_heads, num_positions, num_slots, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROTARY: tl.constexpr, FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    FNUZ: tl.constexpr, ROWS: tl.constexpr, ONE_TOKEN: tl.constexpr,
):  # fmt: skip
    """The first num_tokens programs each insert one key; every other one norms and rotates ROWS query heads."""
    wait_for_previous()
    program = tl.program_id(0)
    channel = tl.arange(0, BLOCK)
    inside = channel < WIDTH
    if program < num_tokens:
        key_token = program.to(tl.int64)
        slot = tl.load(slots_ptr + key_token).to(tl.int64)
        if (slot >= 0) & (slot < num_slots):
            key_position = tl.load(positions_ptr + key_token + tl.arange(0, 1))
            kv = tl.load(kv_ptr + key_token * stride_kv + channel, mask=inside, other=0.0).to(tl.float32)
            kv = rotate_rows(kv[None, :], cos_sin_ptr, key_position, stride_table, num_positions, ROTARY, WIDTH, False)
            kv = tl.reshape(kv, (BLOCK,))
            store_entry(kv, cache_ptr, slot, stride_block, stride_row, WIDTH, BLOCK, FORMAT, BLOCK_SIZE, FNUZ)
    else:
        first_row = (program - num_tokens).to(tl.int64) * ROWS
        row = first_row + tl.arange(0, ROWS)
        token, head = split_rows(first_row, num_heads, ROWS, ONE_TOKEN)
        mask = (token < num_tokens)[:, None] & inside[None, :]
        position = tl.load(positions_ptr + token, mask=token < num_tokens, other=0)
        q_row_ptr = q_ptr + token * stride_q_token + head * stride_q_head
        q = tl.load(q_row_ptr[:, None] + channel[None, :], mask=mask, other=0.0).to(tl.float32)
        q *= tl.rsqrt(tl.sum(q * q, 1) / WIDTH + eps)[:, None]
        q = rotate_rows(q, cos_sin_ptr, position, stride_table, num_positions, ROTARY, WIDTH, False)
        tl.store(out_ptr + row[:, None] * WIDTH + channel[None, :], cast(q, out_ptr.dtype.element_ty), mask=mask)


def q_rope_kv_insert(
    q: torch.Tensor,
    kv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    cache: PagedCache,
    slots: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Norm and rotate every query head; rotate kv and store it (spec 4.1); fp32 inside, one rounding at each store.

        q          [T, h, D] float, channels adjacent
        kv         [T, D] float, already normed; row t goes to slots[t]
        positions  [T] int32 or int64; cos_sin [P, rotary width] fp32
        cache      rows, or fp8_ds_mla (D = 512, rotary width 64) in either encoding; any page distance
        slots      [T] int32 or int64; outside [0, cache.num_slots) nothing is written
    Returns the new q, contiguous, in its dtype; writes the cache.
    Capture: the launch depends on sizes only.  Raises: ShapeError, UnsupportedError.
    """
    check_rows("q", q, (None, None, None))
    num_tokens, num_heads, width = q.shape
    check_rows("kv", kv, (num_tokens, width))
    check_rotary(width, positions, cos_sin, num_tokens)
    check_integers("slots", slots, (num_tokens,))
    check_cache("cache", cache, width)
    if cache.fp8_format is not None and cos_sin.shape[1] != ROTARY_OF_FP8:
        raise ShapeError("rotary width of an fp8_ds_mla cache", ROTARY_OF_FP8, cos_sin.shape[1])
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return out
    stride_block, stride_row = cache_strides(cache)
    rows = _rows_per_program(num_tokens * num_heads)
    block = triton.next_power_of_2(width)
    _q_rope_kv_insert_kernel[(num_tokens + triton.cdiv(num_tokens * num_heads, rows),)](
        q, kv, positions, cos_sin, cache.data, slots, out, q.stride(0), q.stride(1), kv.stride(0), cos_sin.stride(0),
        stride_block, stride_row, num_tokens, num_heads, cos_sin.shape[0], cache.num_slots, eps,
        WIDTH=width, BLOCK=block, ROTARY=cos_sin.shape[1], FORMAT=CODE_OF[cache.format], BLOCK_SIZE=cache.block_size,
        FNUZ=is_fnuz(cache), ROWS=rows, ONE_TOKEN=num_heads % rows == 0, num_warps=_warps(rows * block), enable_fp_fusion=False,
        **early_launch(q.device),
    )  # fmt: skip
    return out


ROTARY_OF_FP8 = 64


def _rows_per_program(num_rows: int) -> int:
    """Query heads of one program: one where they are few, else enough to keep several loads in flight."""
    return 1 if num_rows < 1024 else 4


def _warps(elements: int) -> int:
    return min(8, power_of_2_up_to(elements // 512))


def compile_specs() -> list[CompileSpec]:
    """Head dimension 512 over the window cache in both encodings and as rows, few tokens and many."""
    specs = []
    for kind, code, fnuz, pointer in (("ocp", 1, False, "*u8"), ("fnuz", 1, True, "*u8"), ("rows", 0, False, "*bf16")):
        for rows in (1, 4):
            signature = {
                "q_ptr": "*bf16", "kv_ptr": "*bf16", "positions_ptr": "*i64", "cos_sin_ptr": "*fp32",
                "cache_ptr": pointer, "slots_ptr": "*i64", "out_ptr": "*bf16", "stride_q_token": "i32",
                "stride_q_head": "i32", "stride_kv": "i32", "stride_table": "i32", "stride_block": "i32",
                "stride_row": "i32", "num_tokens": "i32", "num_heads": "i32", "num_positions": "i32",
                "num_slots": "i32", "eps": "fp32",
            }  # fmt: skip
            values = {"WIDTH": 512, "BLOCK": 512, "ROTARY": 64, "FORMAT": code, "BLOCK_SIZE": 64, "FNUZ": fnuz,
                      "ROWS": rows, "ONE_TOKEN": True}  # fmt: skip
            specs.append(spec(_q_rope_kv_insert_kernel, f"q_rope_kv_insert {kind} x{rows}", signature,
                              constexprs=values, num_warps=_warps(rows * 512), large=("cache_ptr",),
                              options={"enable_fp_fusion": False},
                              archs=archs_of(Fp8Format(kind)) if code else ()))  # fmt: skip
    return specs
