"""Sparse decode attention over paged caches in Triton: checks, plan and launch (attention spec 4.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4dist.arch import traits_by_name
from dsv4dist.errors import UnsupportedError, one_error
from dsv4dist.kernels._triton.compile_spec import ARCHS, POINTER_OF, CompileSpec, spec
from dsv4dist.kernels._triton.decode_kernels import sparse_decode_partial_kernel, sparse_decode_reduce_kernel
from dsv4dist.kernels._triton.decode_traits import DecodeTraits, Tile, traits_for, traits_of
from dsv4dist.kernels._triton.early_launch import early_launch
from dsv4dist.kernels.paged_cache import CacheFormat, Fp8Format, PagedCache
from dsv4dist.kernels.segments import Segment
from dsv4dist.kernels.split_plan import plan_splits

HEAD_DIM = 512
ROTARY_DIM = 64
LOG2_E = 1.4426950408889634
MAX_QUERIES = 1 << 31
IN_PLACE_QUERIES = {8: (range(128, 256), range(1024, MAX_QUERIES)), 16: (range(128, MAX_QUERIES),)}
"""For up to so many heads, and for so many queries, Hopper runs the kernel in which keys stay in registers."""
_FORMATS = {Fp8Format.OCP: 1, Fp8Format.FNUZ: 2}  # as in tiles.py; 3 = rows, 0 = no segment
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class _Source:
    """What the kernel takes of one segment; `code` 0 stands for an absent one."""

    data: torch.Tensor
    indices: torch.Tensor
    indptr: torch.Tensor
    stride: int
    slots: int
    block_size: int
    code: int
    native: bool


def sparse_attention(
    q: torch.Tensor,
    main: Segment,
    extra: Segment | None,
    sink: torch.Tensor | None,
    scale: float,
    positions: torch.Tensor | None = None,
    cos_sin: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Attend every query to its own slots of both segments, with one softmax; keys are values (spec 1.2, 4.3).

    Q queries, h local heads, D = 512:
        q           [Q, h, D] bf16, fp16 or fp32, unit stride in D
        main, extra caches fp8_ds_mla (each with its own encoding) or rows; slots outside the cache are absent
        sink        [>= h] fp32, natural-log score, or None; it joins the denominator only
        positions   [Q] int64 with cos_sin [P, 64] fp32: the result is rotated back by the query's position
        out         [Q, h, D], written and returned; allocated like q if None; exact 0 where a query has no key
        num_splits  programs that share a query's keys; planned from sizes if None
    Two fp8 or fp16 caches are multiplied in fp16, which holds every fp8 value times its scale; a share of keys whose
    result is not finite is computed again in bf16 with NaN taken as 0.  Capture: launches depend on sizes only.
    Raises: ShapeError, UnsupportedError, all problems in one message.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    _check(q, main, extra, sink, positions, cos_sin, out)
    num_queries, num_heads, _ = q.shape
    if num_queries == 0 or num_heads == 0:
        return out
    traits = traits_of(q.device)
    sources = (_source(main, traits), _absent(q) if extra is None else _source(extra, traits))
    dtype, exact = _compute_types([main] if extra is None else [main, extra], traits)
    capacities = [source.indices.numel() if source.code else 0 for source in sources]
    tile = traits.tile(num_heads, dtype, all(_gluon_ready(source) for source in sources), sum(capacities))
    if num_splits is None and _in_place(tile, num_queries, num_heads):
        from dsv4dist.kernels._triton.hopper_prefill import launch_in_place

        with _on(q.device):
            launch_in_place(q, *sources, sink, scale * LOG2_E, positions, cos_sin, out)
        return out
    if num_splits is None:
        blocks = triton.cdiv(num_heads, tile.heads)
        num_splits = plan_splits(num_queries, blocks, *capacities, traits.num_units, tile.splits)
    rotate = positions is not None
    _launch(q, sources, sink, scale, positions, cos_sin, out, num_splits, tile, dtype, exact, rotate)
    return out


def _in_place(tile: Tile, num_queries: int, num_heads: int) -> bool:
    ranges = next((ranges for heads, ranges in IN_PLACE_QUERIES.items() if num_heads <= heads), ())
    return tile.warpgroup and any(num_queries in one for one in ranges)


def planned_splits(
    device: torch.device, num_queries: int, num_heads: int, main_capacity: int, extra_capacity: int
) -> int:
    """The split count of a call on two fp8 caches in the device's own encoding, whose lists have these capacities."""
    traits = traits_of(device)
    dtype = tl.float32 if traits.only_fp32 else tl.float16
    tile = traits.tile(num_heads, dtype, True, main_capacity + extra_capacity)
    if _in_place(tile, num_queries, num_heads):
        return 1
    blocks = triton.cdiv(num_heads, tile.heads)
    return plan_splits(num_queries, blocks, main_capacity, extra_capacity, traits.num_units, tile.splits)


def _launch(
    q: torch.Tensor,
    sources: tuple[_Source, _Source],
    sink: torch.Tensor | None,
    scale: float,
    positions: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    out: torch.Tensor,
    num_splits: int,
    tile: Tile,
    dtype: tl.dtype,
    exact: tl.dtype,
    rotate: bool,
) -> None:
    """Enqueue the partial kernel and, with more than one split, the reduction; reads no device value."""
    num_queries, num_heads, dim = q.shape
    finish = num_splits == 1
    parts = 0 if finish else num_queries * num_splits * num_heads
    top = torch.empty(parts, dtype=torch.float32, device=q.device)
    total = torch.empty_like(top)
    acc = torch.empty(parts * dim, dtype=torch.float32, device=q.device)
    main, extra = sources
    # Programs that fill the device and run long are better placed once those before them are gone.
    early = {} if finish else early_launch(q.device)
    sink_or_q, table, where = (q if x is None else x for x in (sink, cos_sin, positions))
    with _on(q.device):
        if tile.warpgroup:
            from dsv4dist.kernels._triton.hopper_decode import sparse_decode_hopper_kernel

            there = extra if extra.code else main
            sparse_decode_hopper_kernel[(triton.cdiv(num_heads, tile.heads) * num_splits * num_queries,)](
                q, main.data, main.indices, main.indptr, there.indptr, sink_or_q, where, table,
                top, total, acc, out, q.stride(0), q.stride(1), out.stride(0), out.stride(1),
                (there.data.data_ptr() - main.data.data_ptr()) // 16,
                (there.indices.data_ptr() - main.indices.data_ptr()) // 4,
                main.stride // 16, there.stride // 16, main.block_size.bit_length() - 1,
                there.block_size.bit_length() - 1, main.slots, there.slots, num_heads, num_splits, scale * LOG2_E,
                EXTRA=extra.code != 0, HAS_SINK=sink is not None, ROTATE=rotate, FINISH=finish,
                HEADS=tile.heads, KEYS=tile.keys, num_warps=tile.warps, **early,
            )  # fmt: skip
        elif tile.cdna:
            from dsv4dist.kernels._triton.cdna_decode import sparse_decode_partial_cdna_kernel

            there = extra if extra.code else main
            sparse_decode_partial_cdna_kernel[(triton.cdiv(num_heads, tile.heads) * num_splits * num_queries,)](
                q, main.data, main.indices, main.indptr, there.data, there.indices, there.indptr, sink_or_q, where, table,
                top, total, acc, out, q.stride(0), q.stride(1), out.stride(0), out.stride(1),
                main.stride, there.stride, main.block_size.bit_length() - 1,
                there.block_size.bit_length() - 1, main.slots, there.slots, num_heads, num_splits, scale * LOG2_E,
                EXTRA=extra.code != 0, HAS_SINK=sink is not None, ROTATE=rotate, FINISH=finish,
                CDNA=tile.cdna, num_warps=tile.warps,
            )  # fmt: skip
        else:
            sparse_decode_partial_kernel[(triton.cdiv(num_heads, tile.heads) * num_splits * num_queries,)](
            q, main.data, main.indices, main.indptr, extra.data, extra.indices, extra.indptr, sink_or_q, where, table,
            top, total, acc, out, q.stride(0), q.stride(1), out.stride(0), out.stride(1),
            main.stride, extra.stride, main.slots, extra.slots, num_heads, num_splits, scale * LOG2_E,
            MAIN=main.code, MAIN_BLOCK=main.block_size, MAIN_NATIVE=main.native,
            EXTRA=extra.code, EXTRA_BLOCK=extra.block_size, EXTRA_NATIVE=extra.native,
            DTYPE=dtype, EXACT=exact, HAS_SINK=sink is not None, ROTATE=rotate, FINISH=finish,
            BLOCK_H=tile.heads, BLOCK_K=tile.keys, num_warps=tile.warps, num_stages=tile.stages, **early,
        )  # fmt: skip
        if not finish:
            sparse_decode_reduce_kernel[(num_queries * num_heads,)](
                top, total, acc, sink_or_q, where, table, out, out.stride(0), out.stride(1), num_heads, num_splits,
                SPLITS=triton.next_power_of_2(num_splits), HAS_SINK=sink is not None, ROTATE=rotate, num_warps=4,
                **early,
            )  # fmt: skip


def _on(device: torch.device) -> torch.cuda.device:
    return torch.cuda.device(device if device.type == "cuda" else -1)


def _source(segment: Segment, traits: DecodeTraits) -> _Source:
    cache = segment.cache
    code = 3 if cache.fp8_format is None else _FORMATS[cache.fp8_format]
    native = cache.fp8_format in traits.native_fp8
    return _Source(
        cache.data,
        segment.indices,
        segment.indptr,
        cache.data.stride(0),
        cache.num_slots,
        cache.block_size,
        code,
        native,
    )


def _absent(q: torch.Tensor) -> _Source:
    return _Source(q, q, q, 0, 0, 1, 0, False)


def _gluon_ready(source: _Source) -> bool:
    """Whether the Gluon kernels can read this segment: native fp8 pages with a power of two of slots, or none."""
    return source.code == 0 or (source.native and source.block_size & (source.block_size - 1) == 0)


def _compute_types(segments: list[Segment], traits: DecodeTraits) -> tuple[tl.dtype, tl.dtype]:
    """The type that keys are multiplied in, and the one of the second attempt."""
    kept = {s.cache.data.dtype for s in segments if s.cache.format is CacheFormat.ROWS}
    if torch.float32 in kept or traits.only_fp32:
        return tl.float32, tl.float32
    return (tl.bfloat16 if kept == {torch.bfloat16} and len(segments) == _rows(segments) else tl.float16), tl.bfloat16


def _rows(segments: list[Segment]) -> int:
    return sum(s.cache.format is CacheFormat.ROWS for s in segments)


def _check(
    q: torch.Tensor,
    main: Segment,
    extra: Segment | None,
    sink: torch.Tensor | None,
    positions: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Every condition of the kernels, all violations in one error."""
    bad: list[str] = []
    if q.dim() != 3 or q.shape[2] != HEAD_DIM or q.dtype not in _FLOATS or q.stride(2) != 1:
        bad.append(f"q must be [queries, heads, {HEAD_DIM}] float with unit stride, got {list(q.shape)} {q.dtype}")
    elif out.shape != q.shape or out.stride(2) != 1 or out.dtype not in _FLOATS:
        bad.append(f"out must be float {list(q.shape)} with unit stride, got {list(out.shape)} {out.dtype}")
    num_queries, num_heads = q.shape[0], q.shape[1] if q.dim() > 1 else 0
    for name, segment in (("main", main), ("extra", extra)):
        if segment is not None:
            bad += _segment_problems(name, segment, num_queries, q.device)
    if sink is not None and (sink.dtype != torch.float32 or sink.numel() < num_heads or sink.stride(-1) != 1):
        bad.append(f"sink must be at least {num_heads} contiguous float32 values, got {list(sink.shape)} {sink.dtype}")
    if (positions is None) != (cos_sin is None):
        bad.append("positions and cos_sin must be given together")
    if positions is not None and (positions.dtype != torch.int64 or list(positions.shape) != [num_queries]):
        bad.append(f"positions must be int64 [{num_queries}], got {positions.dtype} {list(positions.shape)}")
    if cos_sin is not None and (
        cos_sin.dtype != torch.float32 or cos_sin.shape[-1] != ROTARY_DIM or not cos_sin.is_contiguous()
    ):
        bad.append(
            f"cos_sin must be contiguous float32 [rows, {ROTARY_DIM}], got {cos_sin.dtype} {list(cos_sin.shape)}"
        )
    if bad:
        raise one_error(UnsupportedError, "sparse attention", bad)


def _segment_problems(name: str, segment: Segment, num_queries: int, device: torch.device) -> list[str]:
    cache, bad = segment.cache, []
    data = cache.data
    if cache.format is CacheFormat.FP8_DS_MLA:
        if data.dtype != torch.uint8 or data.dim() != 2 or data.stride(1) != 1 or cache.fp8_format is None:
            bad.append(
                f"{name} cache must be uint8 [blocks, page bytes] with an fp8 format, got {data.dtype} {list(data.shape)}"
            )
        elif data.shape[1] < cache.block_size * 584 or data.stride(0) % 16 or data.data_ptr() % 16:
            bad.append(
                f"{name} pages must hold {cache.block_size} * 584 bytes and start at multiples of 16, got {data.shape[1]} bytes every {data.stride(0)}"
            )
    elif cache.format is not CacheFormat.ROWS:
        bad.append(f"{name} cache format {cache.format.value} is not one of rows, fp8_ds_mla")
    elif (
        data.dim() != 3
        or tuple(data.shape[1:]) != (cache.block_size, HEAD_DIM)
        or data.dtype not in _FLOATS
        or data.stride()[1:] != (HEAD_DIM, 1)
    ):
        bad.append(
            f"{name} rows must be float [blocks, {cache.block_size}, {HEAD_DIM}], contiguous inside a block, got {data.dtype} {list(data.shape)}"
        )
    for part, tensor in (("indices", segment.indices), ("indptr", segment.indptr)):
        if tensor.dtype != torch.int32 or tensor.dim() != 1 or tensor.stride(0) != 1:
            bad.append(
                f"{name} {part} must be contiguous int32 in one dimension, got {tensor.dtype} {list(tensor.shape)}"
            )
    if segment.indptr.numel() != num_queries + 1:
        bad.append(f"{name} indptr must have {num_queries + 1} entries, got {segment.indptr.numel()}")
    if any(t.device != device for t in (data, segment.indices, segment.indptr)):
        bad.append(f"{name} segment must lie on {device}, like q")
    if cache.num_slots >= 2**31:
        bad.append(f"{name} cache has {cache.num_slots} slots; int32 indices address fewer than 2**31")
    return bad


def compile_specs() -> list[CompileSpec]:
    """SWA and CSA layers (HCA differs in one constant) with 8 to 128 local heads, fp8 and bf16, split and whole."""
    specs: dict[tuple[Any, ...], CompileSpec] = {}
    for arch in ARCHS:
        traits = traits_for(arch, 1)
        for kind, block_size in (("swa", 0), ("csa", 64)):
            for fp8_format in (traits_by_name(arch).fp8_format, None):
                segments = [_storage(64, fp8_format)] + ([_storage(block_size, fp8_format)] if block_size else [])
                dtype, exact = _compute_types(segments, traits)
                query = torch.empty((1, 1, HEAD_DIM), dtype=torch.bfloat16, device="meta")
                main, extra = _source(segments[0], traits), _absent(query)
                if block_size:
                    extra = _source(segments[1], traits)
                for heads in (8, 16, 32, 64, 128):
                    tile = traits.tile(heads, dtype, _gluon_ready(main) and _gluon_ready(extra), num_keys=1 << 26)
                    name = f"sparse_decode {kind} {'fp8' if fp8_format else 'bf16'} {tile.heads}x{tile.keys}"
                    for finish in (False, True):
                        one = _partial_spec(name, (main, extra), dtype, exact, tile, finish, arch)
                        specs.setdefault((name, arch, finish), one)
    return [*specs.values(), *map(_reduce_spec, (2, 4, 8, 16, 32))]


def _storage(block_size: int, fp8_format: Fp8Format | None) -> Segment:
    """A segment of which only types and sizes are looked at."""
    lists = torch.empty(0, dtype=torch.int32, device="meta")
    if fp8_format is None:
        cache = PagedCache(torch.empty((1, block_size, HEAD_DIM), dtype=torch.bfloat16, device="meta"), block_size)
    else:
        data = torch.empty((1, block_size * 584), dtype=torch.uint8, device="meta")
        cache = PagedCache(data, block_size, CacheFormat.FP8_DS_MLA, fp8_format)
    return Segment(cache, lists, lists)


_RESULTS = {
    "sink_ptr": "*fp32", "positions_ptr": "*i64", "cos_sin_ptr": "*fp32", "top_ptr": "*fp32", "total_ptr": "*fp32",
    "acc_ptr": "*fp32", "out_ptr": "*bf16", "stride_out": "i32", "stride_out_head": "i32", "num_heads": "i32",
    "num_splits": "i32",
}  # fmt: skip


def _partial_spec(
    name: str, sources: tuple[_Source, _Source], dtype: tl.dtype, exact: tl.dtype, tile: Tile, finish: bool, arch: str
) -> CompileSpec:
    main, extra = sources
    main_type, extra_type = (POINTER_OF[str(one.data.dtype).removeprefix("torch.")] for one in sources)
    signature = {
        "q_ptr": "*bf16", "main_indptr_ptr": "*i32", **_RESULTS, "stride_q": "i32",
        "stride_head": "i32", "main_stride": "i32", "extra_stride": "i32", "main_slots": "i32", "extra_slots": "i32",
        "scale_log2": "fp32",
    }  # fmt: skip
    values = {"HAS_SINK": True, "ROTATE": True, "FINISH": finish}
    common: dict[str, Any] = {"num_warps": tile.warps, "archs": (arch,), "has_dot": True}
    name += " whole" if finish else " split"
    if tile.warpgroup:
        from dsv4dist.kernels._triton.hopper_decode import sparse_decode_hopper_kernel

        signature |= {
            "data_ptr": main_type, "indices_ptr": "*i32", "extra_indptr_ptr": "*i32", "pages_delta": "i64",
            "indices_delta": "i64", "main_shift": "i32", "extra_shift": "i32",
        }  # fmt: skip
        values |= {"EXTRA": extra.code != 0, "HEADS": tile.heads, "KEYS": tile.keys}
        common["spills_because"] = "decode_traits chose the shape by its time on an H200"
        return spec(sparse_decode_hopper_kernel, f"{name} hopper", signature, constexprs=values, large=("data_ptr",),
                    aligned=() if extra.code else ("pages_delta", "indices_delta"), **common)  # fmt: skip
    if tile.cdna:
        from dsv4dist.kernels._triton.cdna_decode import sparse_decode_partial_cdna_kernel

        signature |= {
            "main_ptr": main_type, "main_indices_ptr": "*i32", "extra_ptr": main_type, "extra_indices_ptr": "*i32",
            "extra_indptr_ptr": "*i32", "main_shift": "i32", "extra_shift": "i32",
        }  # fmt: skip
        values |= {"EXTRA": extra.code != 0, "CDNA": tile.cdna}
        return spec(sparse_decode_partial_cdna_kernel, f"{name} cdna", signature, constexprs=values,
                    aligned=("main_stride", "extra_stride"), large=("main_ptr", "extra_ptr"), **common)  # fmt: skip
    if arch == "sm90":
        common["spills_because"] = "Hopper's warpgroup products take 64 keys"
    list_type = "*i32" if extra.code else extra_type  # of an absent segment every pointer is the query's
    signature |= {
        "main_ptr": main_type, "main_indices_ptr": "*i32", "extra_ptr": extra_type, "extra_indices_ptr": list_type,
        "extra_indptr_ptr": list_type,
    }  # fmt: skip
    values |= {
        "MAIN": main.code, "MAIN_BLOCK": main.block_size, "MAIN_NATIVE": main.native, "EXTRA": extra.code,
        "EXTRA_BLOCK": extra.block_size, "EXTRA_NATIVE": extra.native, "DTYPE": dtype, "EXACT": exact,
        "BLOCK_H": tile.heads, "BLOCK_K": tile.keys,
    }  # fmt: skip
    return spec(
        sparse_decode_partial_kernel, name, signature, constexprs=values, aligned=("main_stride", "extra_stride"),
        large=("main_ptr", "extra_ptr") if extra.code else ("main_ptr",), num_stages=tile.stages, **common,
    )  # fmt: skip


def _reduce_spec(splits: int) -> CompileSpec:
    values = {"SPLITS": splits, "HAS_SINK": True, "ROTATE": True}
    return spec(sparse_decode_reduce_kernel, f"sparse_decode reduce {splits}", _RESULTS, constexprs=values)
