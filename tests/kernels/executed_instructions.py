"""Count the wave-instructions that each Triton kernel executes as gfx942 and gfx950 code, at one small stated shape.

`python -m tests.kernels.executed_instructions FILE` prints a table and writes FILE (JSON); `make amd-emulate` runs it.
What a count says, and what it needs to run: see emulation.py. Every call's results are compared with the reference.
"""

from __future__ import annotations

import copy
import importlib
import json
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from tests.kernels import emulation
from tests.kernels.implementations import implementations
from tests.support.e4m3 import random_bytes
from tests.support.pages import fp8_cache, padded_rows

from dsv4dist.arch import traits_by_name  # isort: skip
from dsv4dist.kernels.block_table import BlockTable  # isort: skip
from dsv4dist.kernels.paged_cache import CacheFormat, Fp8Format, PagedCache  # isort: skip
from dsv4dist.kernels.segments import Segment  # isort: skip
from dsv4dist.kernels.step_rows import CompressedTables  # isort: skip

CPU = torch.device("cpu")
EPS = 1e-6
WINDOW, SELECTED, SPLITS = 128, 512, 4
DECODE = "sparse_attention, window 128 + 512 keys, h 16, 4 splits"
"""The call whose counts are also given per key."""


@dataclass(frozen=True)
class Call:
    """One call: `op` as `implementations` names it, `triton` its other stem there; `tuning` is for Triton alone."""

    what: str
    op: str
    arguments: tuple[Any, ...]
    triton: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    tuning: Mapping[str, Any] = field(default_factory=dict)


def calls(fp8_format: Fp8Format) -> Iterator[Call]:
    """One token of a Flash model's layer on one of several ranks, unless `what` says otherwise."""
    torch.manual_seed(0)
    long = torch.int64
    zero, three = torch.zeros(1, dtype=long), torch.tensor([3])
    x, table = torch.randn(1, 4096).bfloat16(), torch.randn(1024, 64)
    norms = (torch.randn(1024), torch.randn(512))
    yield Call("rms_norm, 4096 wide", "norm.rms_norm", (x, torch.randn(4096), EPS))
    qr_kv = torch.randn(1, 1536).bfloat16()
    yield Call("qr_kv_norm, 1024 + 512", "norm.qr_kv_norm", (qr_kv, *norms, EPS))
    yield Call("qr_kv_norm_quantised, 1024 + 512", "norm_quantise.qr_kv_norm_quantised",
               (qr_kv, *norms, EPS, fp8_format), "norm")  # fmt: skip
    q, kv = torch.randn(1, 16, 512).bfloat16(), torch.randn(1, 512).bfloat16()
    yield Call("q_rope_kv_insert, h 16, fp8", "q_rope_kv_insert.q_rope_kv_insert",
               (q, kv, three, table, tokens(1, fp8_format), three, EPS))  # fmt: skip
    main, extra = tokens(WINDOW // 64, fp8_format), tokens(SELECTED // 64, fp8_format)
    yield Call(DECODE, "sparse_attention.sparse_attention",
               (q, listed(main), listed(extra), torch.randn(16), 512**-0.5, three, table), "sparse_decode",
               tuning={"num_splits": SPLITS})  # fmt: skip
    lists = (torch.randperm(640).int(), torch.tensor([0, 640], dtype=torch.int32))
    yield Call("sparse_prefill, 640 bf16 rows, h 16", "sparse_prefill.sparse_prefill",
               (q, torch.randn(640, 512).bfloat16(), *lists, torch.randn(16), 512**-0.5, three, table))  # fmt: skip
    yield Call("inverse_rope, h 16", "inverse_rope.inverse_rope", (q, three, table))
    yield from compressor_calls(fp8_format, table)
    index_q, weights = torch.randn(1, 64, 128).bfloat16(), torch.randn(1, 64)
    yield Call("indexer_query, 64 heads", "indexer.indexer_query", (index_q, weights, three, table, fp8_format),
               "indexer_query")  # fmt: skip
    entries = torch.tensor([512])
    index_q8 = random_bytes((1, 64, 128), fp8_format, torch.Generator()).view(fp8_format.torch_dtype)
    yield Call("indexer_logits, 64 heads, 512 entries", "indexer.indexer_logits",
               (index_q8, weights, index_keys(8, fp8_format), block_table(8, 64), zero, entries),
               "indexer_logits")  # fmt: skip
    table64 = block_table(16, 64)
    yield Call("topk_entries, 512 of 4,096", "indexer.topk_entries", (torch.randn(1, 4096), torch.tensor([4096]), 512),
               "topk")  # fmt: skip
    yield Call("window_key_list, 128", "key_lists.window_key_list", (table64, zero, torch.tensor([900]), 128))
    yield Call("window_key_list, 128, 65 tokens", "key_lists.window_key_list",
               (table64, torch.zeros(65, dtype=long), torch.arange(500, 565), 128))  # fmt: skip
    chosen = torch.arange(512, dtype=torch.int32)[None]
    yield Call("entry_key_list, 512", "key_lists.entry_key_list", (table64, zero, chosen))
    yield Call("visible_key_list, 512 of 1,024", "key_lists.visible_key_list", (table64, zero, entries, 1024))
    yield Call("compact_rows, 512", "combine_indices.compact_rows", (chosen, entries, 1024), "key_lists")
    yield Call("combine_indices, window 128 + 512", "combine_indices.combine_indices",
               (chosen, zero, torch.tensor([3000]), torch.tensor([750]), torch.tensor([3001]), torch.tensor([128]),
                512, 128, 1024, 1152))  # fmt: skip
    yield Call("gather_dequant, 128 rows", "gather_dequant.gather_dequant",
               (main, block_table(2, 64), torch.tensor([128]), None, torch.zeros(1, 128, 512).bfloat16(), 0),
               )  # fmt: skip
    compressed = (
        CompressedTables(4, table64, block_table(256, 4)),
        CompressedTables(128, block_table(16, 2), block_table(64, 8)),
    )
    yield Call("step_rows, CSA and HCA", "step_rows.step_rows",
               (three.int(), torch.tensor([0, 1]).int(), torch.tensor([900]).int(), table64, compressed))  # fmt: skip
    yield from projection_calls(fp8_format, x)
    rows = [PagedCache(torch.randn(count // 64, 64, 512).bfloat16(), 64) for count in (WINDOW, SELECTED)]
    yield Call("sparse_attention, the same keys as bf16 rows", "sparse_attention.sparse_attention",
               (q, listed(rows[0]), listed(rows[1]), torch.randn(16), 512**-0.5, three, table), "sparse_decode",
               tuning={"num_splits": SPLITS})  # fmt: skip


def compressor_calls(fp8_format: Fp8Format, table: torch.Tensor) -> Iterator[Call]:
    """The token that completes an entry."""
    zero, slots = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    for name, dim, ratio, overlap, size, entries in (
        ("CSA", 512, 4, 2, 4, 64), ("CSA index", 128, 4, 2, 4, 64), ("HCA", 512, 128, 1, 8, 2),
    ):  # fmt: skip
        width, last = overlap * dim, overlap * ratio - 1
        state = padded_rows(last // size + 1, size, 2 * width, torch.float32, CPU)
        state.data.copy_(torch.randn(state.data.shape))
        position, slot = torch.tensor([last]), torch.tensor([last])
        yield Call(f"compress_state, {name}", "compress.compress_state",
                   (torch.randn(1, 2 * width), torch.randn(ratio, width), position, state, slot))  # fmt: skip
        cache = index_keys(1, fp8_format) if dim == 128 else fp8_cache(1, entries, CacheFormat.FP8_DS_MLA, fp8_format)
        yield Call(f"compress_store, {name}", "compress.compress_store",
                   (state, block_table(last // size + 1, size), zero, position, slot, torch.randn(dim), table, cache,
                    slots, ratio, overlap, EPS))  # fmt: skip


def projection_calls(fp8_format: Fp8Format, x: torch.Tensor) -> Iterator[Call]:
    """Small projections: their counts grow with columns x channels."""
    generator = torch.Generator().manual_seed(1)
    weight = random_bytes((256, 4096), fp8_format, generator).view(fp8_format.torch_dtype)
    yield Call("fp8_linear, 4096 to 256", "fp8_linear.fp8_linear",
               (x, weight, torch.rand(2, 32) + 0.5), options={"fp8_format": fp8_format})  # fmt: skip
    yield Call("fp8_weight_linear, 4096 to 256", "fp8_linear.fp8_weight_linear",
               (x[:, None], weight[None], torch.rand(1, 2, 32) + 0.5, fp8_format))  # fmt: skip
    yield Call("product_in_fp32, 4096 to 256, bf16", "vector.product_in_fp32", (x, torch.randn(256, 4096).bfloat16()))
    grouped = torch.randn(1, 2, 1024).bfloat16()
    yield Call("grouped_wo_a, 2 x 1024 to 256, bf16", "grouped_wo_a.grouped_wo_a",
               (grouped, torch.randn(2, 256, 1024).bfloat16()))  # fmt: skip
    yield Call("quantise_groups_of_128, 2 x 1024", "grouped_wo_a.quantise_groups_of_128", (grouped, fp8_format))
    rows, experts = torch.randn(8, 1024).bfloat16(), torch.randn(4, 256, 1024).bfloat16()
    yield Call("grouped_matmul, 8 rows of 4 experts, 1024 to 256, bf16", "grouped_matmul.grouped_matmul",
               (rows, experts, torch.tensor([2, 3, 3, 8])))  # fmt: skip


def tokens(num_blocks: int, fp8_format: Fp8Format) -> PagedCache:
    """fp8_ds_mla pages of 64 tokens, all of them stored."""
    cache = fp8_cache(num_blocks, 64, CacheFormat.FP8_DS_MLA, fp8_format)
    codes = random_bytes((num_blocks, 64, 576), fp8_format, torch.Generator().manual_seed(num_blocks))
    codes[:, :, 448:] = torch.randn(num_blocks, 64, 64).bfloat16().view(torch.uint8)
    scales = torch.randint(117, 121, (num_blocks, 64, 8), dtype=torch.uint8)
    scales[:, :, 7] = 0
    cache.data[:, : 64 * 584] = torch.cat((codes.flatten(1), scales.flatten(1)), 1)
    return cache


def index_keys(num_blocks: int, fp8_format: Fp8Format) -> PagedCache:
    cache = fp8_cache(num_blocks, 64, CacheFormat.FP8_INDEX, fp8_format)
    cache.data[:, : 64 * 128] = random_bytes((num_blocks, 64 * 128), fp8_format, torch.Generator().manual_seed(2))
    cache.data[:, 64 * 128 : 64 * 132] = torch.rand(num_blocks, 64).view(torch.uint8)
    return cache


def listed(cache: PagedCache) -> Segment:
    """All slots of a cache as one query's keys, in random order."""
    count = cache.num_slots
    return Segment(cache, torch.randperm(count).int(), torch.tensor([0, count], dtype=torch.int32))


def block_table(num_blocks: int, block_size: int) -> BlockTable:
    blocks = torch.arange(num_blocks, dtype=torch.int32)[None]
    return BlockTable(blocks, torch.zeros(1, dtype=torch.int32), block_size)


def compare(call: Call, op: Callable[..., Any], arguments: tuple[Any, ...], found: Any) -> None:
    """Refuse a call whose results, or arguments afterwards, are not those of the reference within bf16's rounding."""
    want_arguments = copy.deepcopy(call.arguments)
    want = op(*want_arguments, **call.options)
    pairs = zip(numbers((found, arguments)), numbers((want, want_arguments)), strict=True)
    for got, expected in pairs:
        count = min(len(got), len(expected))  # ragged lists may have room behind their end
        error = (got[:count] - expected[:count]).norm() / (expected[:count].norm() + 1e-30)
        assert error < 2e-2, f"{call.what}: relative error {error:.2g}"


def numbers(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in `value` in float64, flat, with NaN as 0 (poison, which both sides keep)."""
    if isinstance(value, torch.Tensor):
        yield value.detach().flatten().double().nan_to_num()
    elif isinstance(value, tuple | list):
        for one in value:
            yield from numbers(one)
    elif is_dataclass(value):
        for one in fields(value):
            yield from numbers(getattr(value, one.name))


def reference(call: Call) -> Callable[..., Any]:
    """The reference of a call; inverse_rope, which works in place, has one of another name that does not."""
    if call.op == "inverse_rope.inverse_rope":
        rotate = implementations("rotary.rotate")[0].values[0].op

        def rotate_in_place(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> None:
            x.copy_(rotate(x, positions, table, inverse=True))

        return rotate_in_place
    op: Callable[..., Any] = implementations(call.op)[0].values[0].op
    return op


def rows_of(arch: str) -> Iterator[dict[str, Any]]:
    """One row a launch, every call checked."""
    for call in calls(traits_by_name(arch).fp8_format):
        parameters = implementations(call.op, call.triton)
        op = next(one.values[0].op for one in parameters if one.id == f"emulated-{arch}")
        arguments = copy.deepcopy(call.arguments)
        first = len(emulation.launches)
        found = op(*arguments, **call.options, **call.tuning)
        compare(call, reference(call), arguments, found)
        for launch in emulation.launches[first:]:
            row = {"call": call.what} | asdict(launch) | {"instructions": launch.instructions}
            yield row | row.pop("counts")


def print_tables(rows: list[dict[str, Any]]) -> None:
    keys = WINDOW + SELECTED
    kinds = ("instructions", *emulation.KINDS)
    registers = ("vgprs", "vgpr_spills", "sgpr_spills")
    print(f"| arch | per key: all | {' | '.join((*emulation.KINDS, *registers))} |\n|---|{'--:|' * (len(kinds) + 3)}")
    for row in rows:
        if row["call"] == DECODE and "partial" in row["kernel"]:
            counts = [f"{row[kind] / keys:.1f}" for kind in kinds]
            print(f"| {' | '.join((row['arch'], *counts, *(str(row[one]) for one in registers)))} |")
    print(f"\n| call | kernel | {' | '.join(emulation.ARCHS)} |\n|---|---|{'--:|' * len(emulation.ARCHS)}")
    table: dict[tuple[str, str], dict[str, int]] = {}
    for row in rows:
        counts = table.setdefault((row["call"], row["kernel"]), {})
        counts[row["arch"]] = counts.get(row["arch"], 0) + row["instructions"]
    for (what, kernel), counts in table.items():
        print(f"| {what} | {kernel} |", " | ".join(f"{counts.get(arch, 0):,}" for arch in emulation.ARCHS), "|")


def missing_kernels(rows: list[dict[str, Any]]) -> set[str]:
    """Kernels of the package that no call has launched, those for Hopper aside."""
    package = importlib.import_module("dsv4dist.kernels._triton")
    names = [one.name for one in pkgutil.iter_modules(package.__path__) if not one.name.startswith("hopper")]
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
    return {name for one in modules for name in vars(one) if name.endswith("_kernel")} - {row["kernel"] for row in rows}


def main() -> None:
    if not emulation.ARCHS:
        sys.exit("AMD_EMU_DIR is not set, so there is no emulator; run `make amd-emulate EMU=... TINYGRAD_DIR=...`")
    torch.set_num_threads(1)
    rows = [row for arch in emulation.ARCHS for row in rows_of(arch)]
    target = Path(sys.argv[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print_tables(rows)
    if missing := missing_kernels(rows):
        sys.exit(f"{', '.join(sorted(missing))}: executed by no call; add one to {__file__}")


if __name__ == "__main__":
    main()
