"""What production launchers hand to Triton's compiler on an AMD GPU, held against the specs that are compiled ahead.

Run as a program, which prints a line per launch that no spec describes: `python -m tests.kernels.recorded_launches
gfx942`. Triton gets a driver that only knows the target and a hook that takes the place of compiling, so launchers run
on tensors without memory, whose sizes are those of the released models.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from dsv4dist.arch import traits_by_name
from dsv4dist.kernels._triton import fp8_linear, grouped_wo_a, indexer_logits, sparse_decode, topk, vector
from dsv4dist.kernels._triton.compile_spec import CompileSpec
from dsv4dist.kernels._triton.decode_traits import traits_for
from dsv4dist.kernels.block_table import BlockTable
from dsv4dist.kernels.compile_report import production_specs
from dsv4dist.kernels.paged_cache import CacheFormat, Fp8Format, PagedCache
from dsv4dist.kernels.segments import Segment

CACHE_BYTES = 3 << 30  # caches are larger than what 32-bit offsets reach


def record_launches(arch: str, launches: list[tuple[str, dict[str, Any]]]) -> None:
    """Let launchers believe in `arch`, and append (kernel, what would be compiled) for every distinct launch."""
    traits = traits_by_name(arch)
    decode_traits = traits_for(arch, traits.compute_units)
    for module in [one for name, one in sys.modules.items() if name.startswith("dsv4dist.kernels._triton.")]:
        for name, value in (("arch_of", traits), ("arch_traits", traits), ("traits_of", decode_traits)):
            if hasattr(module, name):
                setattr(module, name, lambda device, value=value: value)
    target = GPUTarget("hip", arch, traits.warp_size)
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
        )
    )

    def record(*, repr: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        launches.append((getattr(fn, "name", repr).split(".")[-1].split("[")[0], compile))
        return True  # nothing is compiled, and nothing launched

    triton.knobs.runtime.jit_cache_hook = record


def launch_everything(fp8_format: Fp8Format) -> None:
    """One launch of every shape that specs promise; row counts are odd, so that nothing is aligned by chance."""
    fp8, bf16, byte, i32, i64 = fp8_format.torch_dtype, torch.bfloat16, torch.uint8, torch.int32, torch.int64

    def of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    for rows in (1, 63, 255, 4001):
        x, weight = of(bf16, rows, 8192), of(fp8, 4096, 8192)
        scale = of(torch.float32, 32, 64)
        fp8_linear.fp8_linear(x, weight, scale, fp8_format=fp8_format)
        fp8_linear.fp8_weight_linear(x[:, None], weight[None], scale[None], fp8_format=fp8_format)
        grouped = of(bf16, rows, 1, 4096)
        grouped_wo_a.grouped_wo_a(grouped, of(fp8, 1, 1024, 4096), of(byte, 1, 8, 32), fp8_format=fp8_format)
        grouped_wo_a.grouped_wo_a(grouped, of(bf16, 1, 1024, 4096))

    for columns in (512, 2048):
        vector.product_in_fp32(of(bf16, 1, 4096), of(bf16, columns, 4096))

    def cache(size: int, page_bytes: int, width: int, kind: CacheFormat | None) -> PagedCache:
        if kind is None:
            return PagedCache(of(bf16, CACHE_BYTES // (2 * size * width), size, width), size)
        return PagedCache(of(byte, CACHE_BYTES // page_bytes, page_bytes), size, kind, fp8_format)

    table = BlockTable(of(i32, 8, 4097), of(i32, 8), 64)
    for tokens in (3, indexer_logits.MANY_TOKENS + 3):
        for kind, dtype in ((CacheFormat.FP8_INDEX, fp8), (None, bf16)):
            keys = cache(64, 8640, 128, kind)
            inputs = of(dtype, tokens, 64, 128), of(torch.float32, tokens, 64), keys, table, of(i64, tokens)
            indexer_logits.indexer_logits(*inputs, of(i64, tokens), max_entries=1003)
    for k, width in ((512, 501), (512, 4001), (512, (1 << 18) - 5), (1024, (1 << 18) - 5)):
        for rows in (3, topk.EAGER_PROGRAMS + 3):
            logits = of(torch.float32, rows, -(-width // 16) * 16)[:, :width]
            topk.topk_entries(logits, of(i64, rows), k)
            table, lists = BlockTable(of(i32, 3, 1003), of(i32, 3), 64), (of(i32, rows * k), of(i32, rows + 1))
            topk.topk_slots(logits, of(i64, rows), k, table, of(i64, rows), *lists)
    cos_sin = of(torch.float32, 1 << 20, 64)
    for heads in (8, 16, 32, 64, 128):
        for queries in (5, 3001):
            for kind in (CacheFormat.FP8_DS_MLA, None):
                lists = of(i32, queries * 128), of(i32, queries + 1)
                main, extra = (Segment(cache(64, 37440, 512, kind), *lists) for _ in range(2))
                for second in (extra, None):
                    sparse_decode.sparse_attention(
                        of(bf16, queries, heads, 512), main, second, of(torch.float32, heads), 512**-0.5,
                        positions=of(i64, queries), cos_sin=cos_sin,
                    )  # fmt: skip


def differences(spec: CompileSpec, compiled: dict[str, Any]) -> list[str]:
    """Where a launch is not what the spec says, or less aligned than it says; a launch may be more aligned."""
    names = spec.kernel.arg_names
    constants = {names[place[0]]: getattr(value, "value", value) for place, value in compiled["constants"].items()}
    attributes = {names[place[0]]: value for place, value in compiled["configs"][0].items()}
    promised = {names[place[0]]: value for place, value in spec.attributes(amd=True).items()}
    found = []
    for name in names:
        kind = compiled["signature"][name]
        if kind == "constexpr" and name in spec.signature:
            if constants[name] != 1:
                found.append(f"{name} is the constant {constants[name]}")
        elif kind != spec.signature.get(name, "constexpr"):
            found.append(f"{name} is {kind}")
        elif kind == "constexpr":
            expected = spec.constexprs[name]
            if str(constants[name]) != str(getattr(expected, "value", expected)):
                found.append(f"{name} is {constants[name]}, not {expected}")
        else:
            missing = [one for one in promised.get(name, []) if one not in attributes.get(name, [])]
            found += [f"{name} lacks {key} {value}" for key, value in missing]
    stages = spec.num_stages or compiled["num_stages"]
    for name, value in (("num_warps", spec.num_warps), ("num_stages", stages)):
        if compiled[name] != value:
            found.append(f"{name} is {compiled[name]}, not {value}")
    return found


def main(arch: str) -> None:
    """Print what differs, against the nearest spec, and at the end how many launches there were."""
    torch.set_default_device("meta")
    specs = [spec for spec in production_specs() if spec.used_on(arch)]
    launches: list[tuple[str, dict[str, Any]]] = []
    record_launches(arch, launches)
    launch_everything(traits_by_name(arch).fp8_format)
    for kernel, compiled in launches:
        near = [(differences(spec, compiled), spec.name) for spec in specs if spec.kernel.fn.__name__ == kernel]
        found, name = min(near, key=lambda one: len(one[0]), default=(["no spec at all"], "none"))
        if found:
            print(f"{kernel}, nearest {name}: {'; '.join(found)}")
    print(f"{len(launches)} launches")


if __name__ == "__main__":
    main(sys.argv[1])
