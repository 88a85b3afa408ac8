"""The compressor in Triton: saving states, and pooling them to entries (attention spec 1.5, 4.5)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dsv4dist.errors import ShapeError, UnsupportedError
from dsv4dist.kernels._triton.arrivals import arrival_counters
from dsv4dist.kernels._triton.checks import (
    CODE_OF,
    cache_strides,
    check_cache,
    check_integers,
    check_rotary,
    check_rows,
    check_table,
    is_fnuz,
)
from dsv4dist.kernels._triton.compile_spec import CompileSpec, archs_of, spec
from dsv4dist.kernels._triton.early_launch import early_launch, wait_for_previous
from dsv4dist.kernels._triton.quantise import cast, load_rotation, lookup_slots, rotate_by, store_entry
from dsv4dist.kernels.block_table import BlockTable
from dsv4dist.kernels.paged_cache import CacheFormat, Fp8Format, PagedCache


@triton.jit
def _compress_state_kernel(
    kv_score_ptr, ape_ptr, positions_ptr, state_ptr, slots_ptr, stride_kv_score, stride_ape, stride_block, stride_row,
    num_slots, WIDTH: tl.constexpr, RATIO: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK of the 2 * WIDTH channels of one token."""
    wait_for_previous()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = channel < 2 * WIDTH
        value = tl.load(kv_score_ptr + token * stride_kv_score + channel, mask=inside, other=0.0).to(tl.float32)
        position = tl.maximum(tl.load(positions_ptr + token), 0)
        ape_row_ptr = ape_ptr + (position % RATIO) * stride_ape
        value += tl.load(ape_row_ptr + channel - WIDTH, mask=inside & (channel >= WIDTH), other=0.0)
        row_ptr = state_ptr + (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_row
        tl.store(row_ptr + channel, cast(value, state_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _load_states(
    state_ptr, blocks_ptr, first_block_ptr, req, last, own, channel, stride_block, stride_row, stride_req, num_columns,
    num_slots, DIM: tl.constexpr, RATIO: tl.constexpr, OVERLAP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    NUM_TAPS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """(score, kv) fp32 [NUM_TAPS, C] of `channel` [C] for the entry that position `last`, with its state at `own`, completes.

    Taps before position 0 have no weight; a tap whose state is not there counts as a state of zeros.
    """
    tap = tl.arange(0, NUM_TAPS)
    position = last.to(tl.int32) - (OVERLAP * RATIO - 1) + tap
    wanted = (position >= 0) & (tap < OVERLAP * RATIO)
    first = tl.load(first_block_ptr + req)
    slot = lookup_slots(blocks_ptr + req * stride_req, first, position, wanted, num_columns, BLOCK_SIZE)
    slot = tl.where(slot < num_slots, slot, -1).to(tl.int32)[:, None]
    # Every row is read, `own` in the place of those that are not there, and what was not asked for goes by arithmetic:
    # a condition a row would have the rows wait for each other, since there are few predicates.
    factor = tl.where(slot >= 0, 1.0, 0.0)
    offset = tl.where(wanted, 0.0, float("-inf"))[:, None]
    slot = tl.where(slot >= 0, slot, own).to(tl.uint32)  # a division without signs is a shift
    # With two windows pooled, the previous one's channels come first in a state, then its own.
    side = ((tap >= RATIO).to(tl.int32) * ((OVERLAP - 1) * DIM))[:, None]
    row_ptr = state_ptr + (slot // BLOCK_SIZE).to(tl.int64) * stride_block + (slot % BLOCK_SIZE) * stride_row + side
    tile_ptr = row_ptr + channel[None, :]
    if WHOLE:
        score = tl.load(tile_ptr + OVERLAP * DIM)
        kv = tl.load(tile_ptr)
    else:
        score = tl.load(tile_ptr + OVERLAP * DIM, mask=(channel < DIM)[None, :], other=0.0)
        kv = tl.load(tile_ptr, mask=(channel < DIM)[None, :], other=0.0)
    return score.to(tl.float32) * factor + offset, kv.to(tl.float32) * factor


@triton.jit
def _finish(
    pooled, weight, cos, sin, cache_ptr, slot, stride_block, stride_row, eps, DIM: tl.constexpr, BLOCK: tl.constexpr,
    ROTARY: tl.constexpr, FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr, FNUZ: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and store a pooled row [BLOCK], which is 0 beyond DIM."""
    row = pooled * tl.rsqrt(tl.sum(pooled * pooled, 0) / DIM + eps) * weight
    row = tl.reshape(rotate_by(row[None, :], cos, sin, ROTARY, DIM, False), (BLOCK,))
    store_entry(row, cache_ptr, slot, stride_block, stride_row, DIM, BLOCK, FORMAT, BLOCK_SIZE, FNUZ)


@triton.jit
def _compress_store_kernel(
    state_ptr, blocks_ptr, first_block_ptr, token_to_req_ptr, positions_ptr, state_slots_ptr, norm_weight_ptr,
    cos_sin_ptr, cache_ptr, entry_slots_ptr, pooled_ptr, arrivals_ptr, stride_state_block, stride_state_row, stride_req,
    stride_table, stride_block, stride_row, num_tokens, num_columns, num_state_slots, num_slots, num_positions, eps,
    DIM: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, RATIO: tl.constexpr, OVERLAP: tl.constexpr,
    NUM_TAPS: tl.constexpr, STATE_BLOCK_SIZE: tl.constexpr, ROTARY: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, FNUZ: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program: PART channels of CHUNK tokens in turn, most of which complete nothing.

    With PART < BLOCK, a token's last program to pool its part finishes the entry: nothing waits for anything.
    """
    wait_for_previous()
    part = tl.program_id(1) * PART + tl.arange(0, PART)
    channel = tl.arange(0, BLOCK)
    member = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    # All that depends on nothing is loaded at once: few tokens wait for memory, one look-up after the other.
    present = member < num_tokens
    entry_slots = tl.load(entry_slots_ptr + member, mask=present, other=-1).to(tl.int64)
    state_slots = tl.load(state_slots_ptr + member, mask=present, other=-1).to(tl.int64)
    positions = tl.load(positions_ptr + member, mask=present, other=0).to(tl.int64)
    reqs = tl.load(token_to_req_ptr + member, mask=present, other=0).to(tl.int64)
    due = (entry_slots >= 0) & (state_slots >= 0) & (entry_slots < num_slots)
    left = tl.where(due, member, num_tokens)
    token = tl.min(left, 0)
    while token < num_tokens:
        mine = member == token
        last = tl.sum(tl.where(mine, positions, 0), 0)
        req = tl.sum(tl.where(mine, reqs, 0), 0)
        slot = tl.sum(tl.where(mine, entry_slots, 0), 0)
        own = tl.minimum(tl.sum(tl.where(mine, state_slots, 0), 0), num_state_slots - 1).to(tl.int32)
        first = last - (RATIO - 1) + tl.arange(0, 1)
        score, kv = _load_states(
            state_ptr, blocks_ptr, first_block_ptr, req, last, own, part, stride_state_block, stride_state_row,
            stride_req, num_columns, num_state_slots, DIM, RATIO, OVERLAP, STATE_BLOCK_SIZE, NUM_TAPS,
            WHOLE=DIM % PART == 0,
        )  # fmt: skip
        # What finishing takes arrives along with the states.
        weight = tl.load(norm_weight_ptr + channel, mask=channel < DIM, other=0.0).to(tl.float32)
        cos, sin = load_rotation(cos_sin_ptr, first, stride_table, num_positions, ROTARY, DIM, BLOCK)
        share = tl.exp(score - tl.max(score, 0)[None, :])
        pooled = tl.sum(share * kv, 0) / tl.sum(share, 0)
        if PART == BLOCK:
            pooled = tl.where(channel < DIM, pooled, 0.0)
            _finish(
                pooled, weight, cos, sin, cache_ptr, slot, stride_block, stride_row, eps, DIM, BLOCK, ROTARY, FORMAT,
                BLOCK_SIZE, FNUZ,
            )  # fmt: skip
        else:
            tl.store(pooled_ptr + token * DIM + part, pooled, mask=part < DIM)
            tl.debug_barrier()  # one thread announces what all of them have stored
            came_before = tl.atomic_add(arrivals_ptr + token, 1, sem="acq_rel", scope="gpu")
            if came_before == tl.num_programs(1) - 1:
                tl.store(arrivals_ptr + token, 0)
                whole = tl.load(pooled_ptr + token * DIM + channel, mask=channel < DIM, other=0.0, cache_modifier=".cg")
                _finish(
                    whole, weight, cos, sin, cache_ptr, slot, stride_block, stride_row, eps, DIM, BLOCK, ROTARY, FORMAT,
                    BLOCK_SIZE, FNUZ,
                )  # fmt: skip
        left = tl.where(mine, num_tokens, left)
        token = tl.min(left, 0)


def compress_state(
    kv_score: torch.Tensor, ape: torch.Tensor, positions: torch.Tensor, state: PagedCache, state_slots: torch.Tensor
) -> None:
    """Save every token's (kv, score + ape[position mod ratio]) to its state slot (spec 4.5a); fp32.

        kv_score     [T, 2 * width] float, channels adjacent: kv, then gate scores
        ape          [ratio, width] fp32
        positions    [T]; state_slots [T], both int32 or int64; a slot outside the cache writes nothing
        state        rows of 2 * width
    Capture: the launch depends on sizes only.  Raises: ShapeError, UnsupportedError.
    """
    check_rows("ape", ape, (None, None))
    ratio, width = ape.shape
    check_rows("kv_score", kv_score, (None, 2 * width))
    count = kv_score.shape[0]
    check_integers("positions", positions, (count,))
    check_integers("state_slots", state_slots, (count,))
    _check_state(state, 2 * width)
    if count == 0:
        return
    block = min(1024, triton.next_power_of_2(2 * width))
    _compress_state_kernel[(count, triton.cdiv(2 * width, block))](
        kv_score, ape, positions, state.data, state_slots, kv_score.stride(0), ape.stride(0), *cache_strides(state),
        state.num_slots, WIDTH=width, RATIO=ratio, BLOCK_SIZE=state.block_size, BLOCK=block,
        num_warps=4 if block == 1024 else 1, **early_launch(kv_score.device),
    )  # fmt: skip


@dataclass(frozen=True)
class _Shape:
    """How one compressor's pooling is cut into programs: each takes `part` of `block` channels."""

    block: int
    part: int
    taps: int

    @classmethod
    def of(cls, dim: int, taps: int) -> _Shape:
        """128 states of 512 channels are 512 KB, too much for one program, so it takes a cache line of each."""
        block, taps = triton.next_power_of_2(dim), triton.next_power_of_2(taps)
        return cls(block, block if taps * block <= 8192 else min(block, max(32, 4096 // taps)), taps)


def compress_store(
    state: PagedCache,
    state_table: BlockTable,
    token_to_req: torch.Tensor,
    positions: torch.Tensor,
    state_slots: torch.Tensor,
    norm_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    cache: PagedCache,
    entry_slots: torch.Tensor,
    ratio: int,
    overlap: int,
    eps: float,
) -> None:
    """Pool, norm, rotate and store the entry of every token that completes one (spec 1.5, 4.5b); fp32 inside.

        state, state_table  states of `compress_state`, rows of 2 * overlap * d, and where each request keeps them
        token_to_req, positions, state_slots, entry_slots  [T] int32 or int64; a token whose state or entry slot is -1,
                            or whose entry slot is outside the cache, makes no entry
        norm_weight         [d] float; cos_sin [P, rotary width] fp32
        cache               rows, fp8_ds_mla (d = 512) or fp8_index (d = 128), in either encoding
        overlap             windows pooled: 2 = the previous one (first d channels) and its own (last d), 1 = its own
    The entry is rotated at the first position of its own window. All states must be saved before the call.
    Capture: launches depend on sizes only.  Raises: ShapeError, UnsupportedError.
    """
    check_rows("norm_weight", norm_weight, (None,))
    dim, count = norm_weight.shape[0], positions.shape[0]
    check_rotary(dim, positions, cos_sin, count)
    for name, one in (("token_to_req", token_to_req), ("state_slots", state_slots), ("entry_slots", entry_slots)):
        check_integers(name, one, (count,))
    check_cache("cache", cache, dim)
    _check_state(state, 2 * overlap * dim)
    check_table("state_table", state_table)
    if overlap not in (1, 2):
        raise UnsupportedError(f"compress_store pools 1 or 2 windows, not {overlap}")
    if count == 0 or state.num_slots == 0:
        return
    shape = _Shape.of(dim, overlap * ratio)
    parts = triton.cdiv(dim, shape.part)
    chunk = _tokens_per_program(count, ratio, parts)
    pooled = arrivals = None
    if parts > 1:
        pooled = torch.empty(count, dim, dtype=torch.float32, device=positions.device)
        arrivals = arrival_counters(count, positions.device)
    _compress_store_kernel[(triton.cdiv(count, chunk), parts)](
        state.data, state_table.blocks, state_table.first_block, token_to_req, positions, state_slots, norm_weight,
        cos_sin, cache.data, entry_slots, pooled, arrivals, *cache_strides(state), state_table.blocks.stride(0),
        cos_sin.stride(0), *cache_strides(cache), count, state_table.blocks.shape[1], state.num_slots,
        cache.num_slots, cos_sin.shape[0], eps, DIM=dim, BLOCK=shape.block, PART=shape.part, RATIO=ratio,
        OVERLAP=overlap, NUM_TAPS=shape.taps, STATE_BLOCK_SIZE=state.block_size, ROTARY=cos_sin.shape[1],
        FORMAT=CODE_OF[cache.format], BLOCK_SIZE=cache.block_size, FNUZ=is_fnuz(cache), CHUNK=chunk,
        num_warps=4, enable_fp_fusion=False, **early_launch(positions.device),
    )  # fmt: skip


def _tokens_per_program(num_tokens: int, ratio: int, parts: int) -> int:
    """Tokens that one program looks through: of `ratio` tokens of a request only one completes an entry."""
    programs = 1024 if parts == 1 else 256
    return min(triton.next_power_of_2(ratio), triton.next_power_of_2(triton.cdiv(num_tokens, programs)))


def _check_state(state: PagedCache, width: int) -> None:
    if state.format is not CacheFormat.ROWS:
        raise ShapeError("state cache format", CacheFormat.ROWS.value, state.format.value)
    check_cache("state cache", state, width)


def compile_specs() -> list[CompileSpec]:
    """The three compressors of a model (CSA entries, CSA index keys, HCA entries), for few tokens and for many."""
    specs = []
    for name, width, ratio, size in (("csa", 1024, 4, 4), ("csa index", 256, 4, 4), ("hca", 512, 128, 8)):
        block = min(1024, 2 * width)
        signature = {"kv_score_ptr": "*fp32", "ape_ptr": "*fp32", "positions_ptr": "*i64", "state_ptr": "*fp32",
                     "slots_ptr": "*i64", "stride_kv_score": "i32", "stride_ape": "i32", "stride_block": "i32",
                     "stride_row": "i32", "num_slots": "i32"}  # fmt: skip
        values = {"WIDTH": width, "RATIO": ratio, "BLOCK_SIZE": size, "BLOCK": block}
        specs.append(spec(_compress_state_kernel, f"compress_state {name}", signature, constexprs=values,
                          num_warps=4 if block == 1024 else 1))  # fmt: skip
    for encoding in Fp8Format:
        for chunk in (1, 4):
            specs += [
                _store_spec("csa", 512, 4, 2, 1, 64, encoding, chunk),
                _store_spec("csa index", 128, 4, 2, 2, 64, encoding, chunk),
                _store_spec("hca", 512, 128, 1, 1, 2, encoding, chunk),
            ]
    return specs


def _store_spec(
    name: str, dim: int, ratio: int, overlap: int, code: int, size: int, encoding: Fp8Format, chunk: int
) -> CompileSpec:
    shape = _Shape.of(dim, ratio * overlap)
    pointers = {
        "state_ptr": "*fp32", "blocks_ptr": "*i32", "first_block_ptr": "*i32", "token_to_req_ptr": "*i64",
        "positions_ptr": "*i64", "state_slots_ptr": "*i64", "norm_weight_ptr": "*fp32", "cos_sin_ptr": "*fp32",
        "cache_ptr": "*u8", "entry_slots_ptr": "*i64",
    }  # fmt: skip
    strides = ("state_block", "state_row", "req", "table", "block", "row")
    counts = ("num_tokens", "num_columns", "num_state_slots", "num_slots", "num_positions")
    signature = {**pointers, **{f"stride_{one}": "i32" for one in strides}, **dict.fromkeys(counts, "i32")}
    values = {
        "DIM": dim, "BLOCK": shape.block, "PART": shape.part, "RATIO": ratio, "OVERLAP": overlap,
        "NUM_TAPS": shape.taps, "STATE_BLOCK_SIZE": 8 if ratio == 128 else 4, "ROTARY": 64, "FORMAT": code,
        "BLOCK_SIZE": size, "FNUZ": encoding is Fp8Format.FNUZ, "CHUNK": chunk,
    }  # fmt: skip
    if shape.part == shape.block:
        values |= {"pooled_ptr": None, "arrivals_ptr": None}
    else:
        signature |= {"pooled_ptr": "*fp32", "arrivals_ptr": "*i32"}
    return spec(_compress_store_kernel, f"compress_store {name} {encoding.value} x{chunk}",
                {**signature, "eps": "fp32"}, constexprs=values,
                unaligned=("stride_req",), large=("cache_ptr",), options={"enable_fp_fusion": False},
                archs=archs_of(encoding))  # fmt: skip
