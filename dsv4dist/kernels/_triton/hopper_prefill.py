"""Attention of many queries over fp8_ds_mla caches in place on Hopper: launch of `hopper_prefill_kernels` (spec 4.4).

Nothing is gathered: what bounds few heads are the bytes that come from the L2, and a row has 584 of them here and 1,024
in a 16-bit workspace. Decoding a key again for every query that lists it is hidden behind them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton

from dsv4dist.kernels._triton.compile_spec import CompileSpec, spec
from dsv4dist.kernels._triton.hopper_prefill_kernels import (
    FEW_WARPS,
    prefill_few_heads_kernel,
)

if TYPE_CHECKING:
    from dsv4dist.kernels._triton.sparse_decode import _Source


def launch_in_place(
    q: torch.Tensor,
    main: _Source,
    extra: _Source,
    sink: torch.Tensor | None,
    scale_log2: float,
    positions: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Enqueue the kernel for q's heads, 8 or 16 of which a program has; arguments as `sparse_decode` has checked them, caches fp8_ds_mla in OCP encoding.

    Both caches' pages, and both lists, are reached by their distance from the main one's. Reads no device value.
    """
    num_queries, num_heads, _ = q.shape
    there = extra if extra.code else main
    heads, options = _heads_and_options(num_heads)
    prefill_few_heads_kernel[(triton.cdiv(num_heads, heads) * num_queries,)](
        q, main.data, main.indices, main.indptr, there.indptr, *(q if x is None else x for x in (sink, positions, cos_sin)),
        out, q.stride(0), q.stride(1), out.stride(0), out.stride(1),
        (there.data.data_ptr() - main.data.data_ptr()) // 16, (there.indices.data_ptr() - main.indices.data_ptr()) // 4,
        main.stride // 16, there.stride // 16, main.block_size.bit_length() - 1, there.block_size.bit_length() - 1,
        main.slots, there.slots, num_heads, scale_log2, EXTRA=extra.code != 0, HAS_SINK=sink is not None,
        ROTATE=positions is not None, HEADS=heads, **options,
    )  # fmt: skip


def _heads_and_options(num_heads: int) -> tuple[int, dict[str, int]]:
    """How many heads a program has, and launch options."""
    if num_heads > 8:
        return 16, {"num_warps": FEW_WARPS.value}
    # 168 registers let three programs share a multiprocessor, as their shared memory does.
    return 8, {"num_warps": FEW_WARPS.value, "maxnreg": 168}


def compile_specs() -> list[CompileSpec]:
    """Each kernel with both caches, sink and rotation."""
    signature = {
        **dict.fromkeys(("q_ptr", "out_ptr"), "*bf16"),
        "data_ptr": "*u8",
        **dict.fromkeys(("indices_ptr", "main_indptr_ptr", "extra_indptr_ptr"), "*i32"),
        **dict.fromkeys(("sink_ptr", "cos_sin_ptr"), "*fp32"),
        "positions_ptr": "*i64",
        **dict.fromkeys(
            ("stride_q", "stride_head", "stride_out", "stride_out_head", "main_stride", "extra_stride"), "i32"
        ),
        **dict.fromkeys(("main_shift", "extra_shift", "main_slots", "extra_slots", "num_heads"), "i32"),
        **dict.fromkeys(("pages_delta", "indices_delta"), "i64"),
        "scale_log2": "fp32",
    }
    specs = []
    for num_heads in (8, 16):
        heads, options = _heads_and_options(num_heads)
        values = {"EXTRA": True, "HAS_SINK": True, "ROTATE": True, "HEADS": heads}
        limit = {name: value for name, value in options.items() if name != "num_warps"}
        specs.append(spec(prefill_few_heads_kernel, f"prefill in place {heads} heads hopper", signature, constexprs=values,
                          unaligned=("main_stride", "extra_stride"), large=("data_ptr",), has_dot=True, archs=("sm90",),
                          spills_because="the register limit was chosen by time on an H200",
                          num_warps=options["num_warps"], options=limit))  # fmt: skip
    return specs
