"""Cases of attention itself: sparse decode, prefill, and the indexer's scores and selection."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from dsv4dist.arch import arch_of
from dsv4dist.bench.cases import (
    HEAD_DIM,
    Batch,
    Case,
    Sizes,
    normal,
    random_table,
    rotary,
    shared_cache,
)
from dsv4dist.bench.device_time import Call
from dsv4dist.cache.groups import COMPRESSED_BLOCK_TOKENS, WINDOW_BLOCK_TOKENS
from dsv4dist.kernels.ops import triton_ops
from dsv4dist.kernels.paged_cache import (
    INDEX_DIM,
    INDEX_SCALE_BYTES,
    TOKEN_BYTES,
    TOKEN_SCALE_BYTES,
    CacheFormat,
    PagedCache,
)
from dsv4dist.kernels.segments import Segment

SPLITS = (1, 2, 4, 8, 10, 16, 24, 32)
ENTRY_BYTES = TOKEN_BYTES + TOKEN_SCALE_BYTES
ENTRY_BLOCK = COMPRESSED_BLOCK_TOKENS // 4
INDEX_HEADS = 64
SCALE = HEAD_DIM**-0.5


def attention_cases(sizes: Sizes, num_splits: int | None = None) -> Iterator[Case]:
    """Decode: queries of as many requests, whose slots lie anywhere in caches larger than the device's own.

    num_splits  programs that share a query's keys, None = as planned
    """
    for heads in sizes.heads:
        for keys, queries in sizes.decode:
            yield _decode_case(heads, keys, queries, sizes, num_splits)


def _decode_case(heads: int, keys: int, queries: int, sizes: Sizes, num_splits: int | None) -> Case:
    def random_segment(cache: PagedCache, width: int, device: torch.device) -> Segment:
        slots = torch.randint(0, cache.num_slots, (queries * width,), dtype=torch.int32, device=device)
        return Segment(cache, slots, torch.arange(0, queries * width + 1, width, dtype=torch.int32, device=device))

    def make(device: torch.device) -> Call:
        blocks = sizes.cache_slots // ENTRY_BLOCK
        window = shared_cache(blocks, WINDOW_BLOCK_TOKENS, CacheFormat.FP8_DS_MLA, device)
        # One block more: the two are different caches, as in a layer.
        entries = shared_cache(blocks + 1, ENTRY_BLOCK, CacheFormat.FP8_DS_MLA, device)
        segments = random_segment(window, sizes.window, device), random_segment(entries, keys, device)
        q, rest = _rest_of_call(queries, heads, sizes, device)
        if num_splits is not None:
            rest["num_splits"] = num_splits
        return partial(triton_ops().sparse_attention, q, *segments, **rest)

    total = sizes.window + keys
    return Case(
        "sparse_attention",
        "triton",
        {"heads": heads, "keys": total, "selected": keys, "queries": queries, "dtype": "fp8_ds_mla"},
        make,
        bytes_moved=queries * (total * ENTRY_BYTES + 2 * heads * HEAD_DIM * 2),
        flops=4 * queries * heads * total * HEAD_DIM,
        about=lambda device: {"splits": num_splits or planned_splits(heads, keys, queries, sizes.window, device)},
    )


def _rest_of_call(queries: int, heads: int, sizes: Sizes, device: torch.device) -> tuple[torch.Tensor, dict[str, Any]]:
    """q, and what layers pass beside the keys: sinks, and positions, so that the result is rotated back."""
    positions = torch.randint(0, sizes.context, (queries,), device=device)
    sink = normal(heads, device=device, dtype=torch.float32)
    rest = {"sink": sink, "scale": SCALE, "positions": positions, "cos_sin": rotary(sizes.context, device)}
    return normal(queries, heads, HEAD_DIM, device=device), rest


def planned_splits(heads: int, keys: int, queries: int, window: int, device: torch.device) -> int:
    """The split count that production takes for a decode case."""
    from dsv4dist.kernels._triton import sparse_decode

    return sparse_decode.planned_splits(device, queries, heads, queries * window, queries * keys)


def prefill_cases(sizes: Sizes) -> Iterator[Case]:
    """Consecutive tokens of one request: neighbours share their windows, and each has its own selected entries.

    In place: as layers do, from fp8 caches. Gathered: from bf16 rows that gather_dequant wrote, which is not timed.
    """
    for heads in sizes.prefill_heads:
        for tokens, keys in sizes.prefill:
            rows = tokens + sizes.window + sizes.prefill_entries
            for method, make, row_bytes, dtype in (
                ("triton, in place", _make_in_place, ENTRY_BYTES, "fp8_ds_mla"),
                ("triton, gathered", _make_gathered, HEAD_DIM * 2, "bfloat16"),
            ):
                total = sizes.window + keys
                yield Case(
                    "sparse_prefill",
                    method,
                    {"heads": heads, "keys": total, "selected": keys, "queries": tokens, "dtype": dtype},
                    partial(make, heads, tokens, keys, sizes),
                    bytes_moved=rows * row_bytes + tokens * 2 * heads * HEAD_DIM * 2,
                    flops=4 * tokens * heads * total * HEAD_DIM,
                )


def _make_in_place(heads: int, tokens: int, keys: int, sizes: Sizes, device: torch.device) -> Call:
    from dsv4dist.kernels._triton.key_lists import entry_key_list, window_key_list

    batch = Batch.of(tokens, tokens + sizes.window, device)
    table, blocks = random_table(1, tokens + sizes.window, WINDOW_BLOCK_TOKENS, device)
    window = shared_cache(blocks, WINDOW_BLOCK_TOKENS, CacheFormat.FP8_DS_MLA, device)
    entry_table, blocks = random_table(1, sizes.prefill_entries, ENTRY_BLOCK, device)
    entries = shared_cache(blocks, ENTRY_BLOCK, CacheFormat.FP8_DS_MLA, device)
    selected = _selection(tokens, sizes.prefill_entries, keys, device)
    main = Segment(window, *window_key_list(table, batch.token_to_req, batch.positions, sizes.window))
    extra = Segment(entries, *entry_key_list(entry_table, batch.token_to_req, selected))
    q, rest = _rest_of_call(tokens, heads, sizes, device)
    return partial(triton_ops().sparse_attention, q, main, extra, **rest)


def _make_gathered(heads: int, tokens: int, keys: int, sizes: Sizes, device: torch.device) -> Call:
    from dsv4dist.kernels._triton.sparse_prefill import sparse_prefill

    entries, total = sizes.prefill_entries, sizes.window + keys
    rows = normal(entries + tokens + sizes.window, HEAD_DIM, device=device)
    own = torch.arange(tokens, dtype=torch.int32, device=device).unsqueeze(1) + entries
    window = own + torch.arange(1, sizes.window + 1, dtype=torch.int32, device=device)
    indices = torch.cat((_selection(tokens, entries, keys, device), window), dim=1).flatten()
    indptr = torch.arange(0, tokens * total + 1, total, dtype=torch.int32, device=device)
    q, rest = _rest_of_call(tokens, heads, sizes, device)
    return partial(sparse_prefill, q, rows, indices, indptr, **rest)


def _selection(rows: int, entries: int, count: int, device: torch.device) -> torch.Tensor:
    """int32 [rows, count] different entries of each row, ascending, as the indexer gives them."""
    parts = []
    for part in torch.arange(rows, device=device).split(512):
        order = torch.rand(len(part), entries, device=device).topk(count, dim=1).indices
        parts.append(order.sort(dim=1).values.int())
    return torch.cat(parts)


def indexer_cases(sizes: Sizes) -> Iterator[Case]:
    """Every query scores all entries of a request of its own; then its top_k, then both as the layer has them."""
    for queries, entries in sizes.indexer:
        fields = {"queries": queries, "entries": entries}
        scores, chosen = 4 * queries * entries, 4 * queries * sizes.top_k
        keys = queries * (entries * (INDEX_DIM + INDEX_SCALE_BYTES) + INDEX_HEADS * (INDEX_DIM + 4))
        flops = 2 * queries * entries * INDEX_HEADS * INDEX_DIM
        logits = Case(
            "indexer_logits",
            "triton",
            fields | {"index_heads": INDEX_HEADS, "dtype": "fp8"},
            partial(_make_logits, queries, entries, sizes, False),
            bytes_moved=keys + scores,
            flops=flops,
            fp8=True,
        )
        yield logits
        yield replace(
            logits,
            op="indexer_logits+topk",
            fields=logits.fields | {"k": sizes.top_k},
            make=partial(_make_logits, queries, entries, sizes, True),
            bytes_moved=keys + chosen,
        )
        for method in ("triton", "torch.topk"):
            yield Case(
                "topk_entries",
                method,
                fields | {"k": sizes.top_k, "dtype": "float32"},
                partial(_make_topk, queries, entries, sizes.top_k, method == "triton"),
                bytes_moved=scores + chosen,
            )


def _make_logits(queries: int, entries: int, sizes: Sizes, select: bool, device: torch.device) -> Call:
    from dsv4dist.kernels._triton.indexer_logits import indexer_logits
    from dsv4dist.kernels._triton.topk import topk_entries

    table, blocks = random_table(queries, entries, ENTRY_BLOCK, device, sizes.index_slots)
    cache = shared_cache(blocks, ENTRY_BLOCK, CacheFormat.FP8_INDEX, device)
    q = normal(queries, INDEX_HEADS, INDEX_DIM, device=device).to(arch_of(device).fp8_format.torch_dtype)
    weights = normal(queries, INDEX_HEADS, device=device, dtype=torch.float32)
    req = torch.arange(queries, device=device)
    lens = torch.full((queries,), entries, device=device)

    def call() -> torch.Tensor:
        logits = indexer_logits(q, weights, cache, table, req, lens, max_entries=entries)
        return topk_entries(logits, lens, sizes.top_k) if select else logits

    return call


def _make_topk(queries: int, entries: int, top_k: int, ours: bool, device: torch.device) -> Call:
    from dsv4dist.kernels._triton.topk import topk_entries

    logits = normal(queries, entries, device=device, dtype=torch.float32)
    if not ours:
        return lambda: torch.topk(logits, top_k).indices
    return partial(topk_entries, logits, torch.full((queries,), entries, device=device), top_k)
