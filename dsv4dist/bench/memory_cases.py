"""Cases that wait for memory: norms, insertion, the compressor, the index query, key lists, gathering."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dsv4dist.arch import arch_of
from dsv4dist.bench.attention_cases import ENTRY_BLOCK, ENTRY_BYTES, INDEX_HEADS
from dsv4dist.bench.cases import HEAD_DIM, Batch, Case, Sizes, normal, random_table, rotary, shared_cache
from dsv4dist.bench.device_time import Call
from dsv4dist.cache.groups import COMPRESSED_BLOCK_TOKENS, STATE_BLOCK_TOKENS, WINDOW_BLOCK_TOKENS
from dsv4dist.config.model import LayerKind
from dsv4dist.kernels.paged_cache import INDEX_DIM, INDEX_SCALE_BYTES, ROPE_DIM, CacheFormat, PagedCache

BF16 = 2
EPS = 1e-6


@dataclass(frozen=True)
class _Compressor:
    """One of the three: its layer kind, the width of its entries, and the bytes of one in its cache."""

    name: str
    kind: LayerKind
    dim: int
    entry_bytes: int
    format: CacheFormat

    @property
    def state_width(self) -> int:
        return 2 * self.kind.overlap * self.dim

    @property
    def block_size(self) -> int:
        return COMPRESSED_BLOCK_TOKENS // self.kind.compress_ratio


_COMPRESSORS = (
    _Compressor("csa", LayerKind.CSA, HEAD_DIM, ENTRY_BYTES, CacheFormat.FP8_DS_MLA),
    _Compressor("index", LayerKind.CSA, INDEX_DIM, INDEX_DIM + INDEX_SCALE_BYTES, CacheFormat.FP8_INDEX),
    _Compressor("hca", LayerKind.HCA, HEAD_DIM, ENTRY_BYTES, CacheFormat.FP8_DS_MLA),
)


def memory_cases(sizes: Sizes) -> Iterator[Case]:
    """Everything at each of `sizes.tokens`, and gathering."""
    for one in (_norms, _with_heads, _index_queries, _compressor_states, _compressor_entries, _key_lists, _combining):
        for tokens in sizes.tokens:
            yield from one(sizes, tokens)
    for num_requests, rows in sizes.gather:
        yield _gather_case(num_requests, rows, sizes.cache_slots)


def _case(op: str, tokens: int, make: Callable[[torch.device], Call], bytes_moved: int, **fields: Any) -> Case:
    return Case(op, fields.pop("method", "triton"), {"tokens": tokens, **fields}, make, bytes_moved)


def _norms(sizes: Sizes, tokens: int) -> Iterator[Case]:
    hidden, rank = sizes.hidden, sizes.q_rank
    both = rank + HEAD_DIM

    def weight(device: torch.device, width: int) -> torch.Tensor:
        return normal(width, device=device, dtype=torch.float32)

    def norm(device: torch.device) -> Call:
        from dsv4dist.kernels._triton.norm import rms_norm

        return partial(rms_norm, normal(tokens, hidden, device=device), weight(device, hidden), EPS)

    def torch_norm(device: torch.device) -> Call:
        x = normal(tokens, hidden, device=device)
        return partial(torch.nn.functional.rms_norm, x, (hidden,), normal(hidden, device=device), EPS)

    def two_norms(device: torch.device) -> Call:
        from dsv4dist.kernels._triton.norm import qr_kv_norm

        x = normal(tokens, both, device=device)
        return partial(qr_kv_norm, x, weight(device, rank), weight(device, HEAD_DIM), EPS)

    def quantised(device: torch.device) -> Call:
        from dsv4dist.kernels._triton.norm import qr_kv_norm_quantised

        x, encoding = normal(tokens, both, device=device), arch_of(device).fp8_format
        return partial(qr_kv_norm_quantised, x, weight(device, rank), weight(device, HEAD_DIM), EPS, encoding)

    through = tokens * hidden * 2 * BF16 + hidden * 4
    yield _case("rms_norm", tokens, norm, through, width=hidden, dtype="bfloat16")
    yield _case("rms_norm", tokens, torch_norm, through, width=hidden, dtype="bfloat16", method="torch")
    through = tokens * both * 2 * BF16 + both * 4
    yield _case("qr_kv_norm", tokens, two_norms, through, width=both, dtype="bfloat16")
    through += tokens * (rank // 128 * 4 - rank)
    yield _case("qr_kv_norm_quantised", tokens, quantised, through, width=both, dtype="fp8")


def _with_heads(sizes: Sizes, tokens: int) -> Iterator[Case]:
    def insert(heads: int, device: torch.device) -> Call:
        from dsv4dist.kernels._triton.q_rope_kv_insert import q_rope_kv_insert

        batch = Batch.of(tokens, sizes.context, device)
        table, blocks = random_table(batch.num_requests, sizes.context, WINDOW_BLOCK_TOKENS, device)
        cache = shared_cache(blocks, WINDOW_BLOCK_TOKENS, CacheFormat.FP8_DS_MLA, device)
        slots = table.slots(batch.token_to_req, batch.positions)
        q, kv = normal(tokens, heads, HEAD_DIM, device=device), normal(tokens, HEAD_DIM, device=device)
        return partial(q_rope_kv_insert, q, kv, batch.positions, rotary(sizes.context, device), cache, slots, EPS)

    def rotate_back(heads: int, device: torch.device) -> Call:
        from dsv4dist.kernels._triton.inverse_rope import inverse_rope

        batch = Batch.of(tokens, sizes.context, device)
        x = normal(tokens, heads, HEAD_DIM, device=device)

        def call() -> torch.Tensor:
            inverse_rope(x, batch.positions, rotary(sizes.context, device))
            return x

        return call

    for heads in sizes.heads:
        through = tokens * (heads * HEAD_DIM * 2 * BF16 + HEAD_DIM * BF16 + ENTRY_BYTES + 16)
        yield _case("q_rope_kv_insert", tokens, partial(insert, heads), through, heads=heads, dtype="fp8_ds_mla")
    for heads in sizes.heads:
        through = tokens * (heads * ROPE_DIM * 2 * BF16 + 8)
        yield _case("inverse_rope", tokens, partial(rotate_back, heads), through, heads=heads, dtype="bfloat16")


def _index_queries(sizes: Sizes, tokens: int) -> Iterator[Case]:
    def make(device: torch.device) -> Call:
        from dsv4dist.kernels._triton.indexer_query import indexer_query

        batch = Batch.of(tokens, sizes.context, device)
        q, weights = normal(tokens, INDEX_HEADS, INDEX_DIM, device=device), normal(tokens, INDEX_HEADS, device=device)
        encoding = arch_of(device).fp8_format
        return partial(indexer_query, q, weights, batch.positions, rotary(sizes.context, device), encoding)

    through = tokens * INDEX_HEADS * (INDEX_DIM * (BF16 + 1) + BF16 + 4)
    yield _case("indexer_query", tokens, make, through, index_heads=INDEX_HEADS, dtype="fp8")


def _states(one: _Compressor, batch: Batch, context: int, device: torch.device) -> tuple[PagedCache, Any, torch.Tensor]:
    """State pages with numbers in them, their table, and each token's slot."""
    size = STATE_BLOCK_TOKENS[one.kind]
    table, blocks = random_table(batch.num_requests, context, size, device)
    state = PagedCache(normal(blocks, size, one.state_width, device=device, dtype=torch.float32), size)
    return state, table, table.slots(batch.token_to_req, batch.positions)


def _compressor_states(sizes: Sizes, tokens: int) -> Iterator[Case]:
    def make(one: _Compressor, device: torch.device) -> Call:
        from dsv4dist.kernels._triton.compress import compress_state

        batch = Batch.of(tokens, sizes.context, device)
        state, _, slots = _states(one, batch, sizes.context, device)
        kv_score = normal(tokens, one.state_width, device=device, dtype=torch.float32)
        ape = normal(one.kind.compress_ratio, one.state_width // 2, device=device, dtype=torch.float32)
        return partial(compress_state, kv_score, ape, batch.positions, state, slots)

    for one in _COMPRESSORS:
        through = tokens * one.state_width * 2 * 4
        yield _case("compress_state", tokens, partial(make, one), through, compressor=one.name, dtype="float32")


def _compressor_entries(sizes: Sizes, tokens: int) -> Iterator[Case]:
    def make(one: _Compressor, device: torch.device) -> Call:
        from dsv4dist.kernels._triton.compress import compress_store

        ratio, batch = one.kind.compress_ratio, Batch.of(tokens, sizes.context, device)
        state, state_table, state_slots = _states(one, batch, sizes.context, device)
        entries, blocks = random_table(batch.num_requests, -(-sizes.context // ratio), one.block_size, device)
        cache = shared_cache(blocks, one.block_size, one.format, device)
        ends = (batch.positions + 1) % ratio == 0
        slots = torch.where(ends, entries.slots(batch.token_to_req, batch.positions // ratio), -1)
        weight, table = normal(one.dim, device=device, dtype=torch.float32), rotary(sizes.context, device)
        return partial(
            compress_store, state, state_table, batch.token_to_req, batch.positions, state_slots, weight, table,
            cache, slots, ratio, one.kind.overlap, EPS,
        )  # fmt: skip

    for one in _COMPRESSORS:
        entries = max(1, tokens // one.kind.compress_ratio)
        taps = one.kind.overlap * one.kind.compress_ratio
        through = entries * (taps * 2 * one.dim * 4 + one.entry_bytes) + tokens * 8
        yield _case(
            "compress_store", tokens, partial(make, one), through, compressor=one.name, entries=entries, dtype="float32"
        )


def _key_lists(sizes: Sizes, tokens: int) -> Iterator[Case]:
    def window(device: torch.device) -> Call:
        from dsv4dist.kernels._triton.key_lists import window_key_list

        batch = Batch.of(tokens, sizes.context, device)
        table, _ = random_table(batch.num_requests, sizes.context, WINDOW_BLOCK_TOKENS, device)
        return partial(window_key_list, table, batch.token_to_req, batch.positions, sizes.window)

    def listed(width: int, device: torch.device) -> Call:
        from dsv4dist.kernels._triton.key_lists import entry_key_list

        batch = Batch.of(tokens, sizes.context, device)
        table, _ = random_table(batch.num_requests, 4 * width, ENTRY_BLOCK, device)
        entries = torch.randint(0, 4 * width, (tokens, width), dtype=torch.int32, device=device)
        return partial(entry_key_list, table, batch.token_to_req, entries)

    def visible(width: int, device: torch.device) -> Call:
        from dsv4dist.kernels._triton.key_lists import visible_key_list

        batch = Batch.of(tokens, sizes.context, device)
        table, _ = random_table(batch.num_requests, width, 2, device)
        lens = torch.full((tokens,), width, device=device)
        return partial(visible_key_list, table, batch.token_to_req, lens, width)

    yield _case("window_key_list", tokens, window, tokens * sizes.window * 4, width=sizes.window)
    for width in sizes.key_list_widths:
        yield _case("entry_key_list", tokens, partial(listed, width), tokens * width * 8, width=width)
    for width in sizes.key_list_widths:
        yield _case("visible_key_list", tokens, partial(visible, width), tokens * width * 4, width=width)


def _combining(sizes: Sizes, tokens: int) -> Iterator[Case]:
    width = sizes.key_list_widths[0]

    def make(device: torch.device) -> Call:
        from dsv4dist.kernels._triton.combine_indices import combine_indices

        batch = Batch.of(tokens, sizes.context, device)
        entries = 4 * width
        selected = torch.randint(0, entries, (tokens, width), dtype=torch.int32, device=device)
        lens = torch.full((batch.num_requests,), sizes.context, device=device)
        visible = torch.full((tokens,), width, device=device)
        return partial(
            combine_indices, selected, batch.token_to_req, batch.positions, visible, lens, lens, width, sizes.window,
            entries, entries + sizes.context,
        )  # fmt: skip

    through = tokens * (width + -(-(width + sizes.window) // 128) * 128) * 4
    yield _case("combine_indices", tokens, make, through, width=width + sizes.window)


def _gather_case(num_requests: int, rows: int, pool_slots: int) -> Case:
    def make(device: torch.device) -> Call:
        from dsv4dist.kernels._triton.gather_dequant import gather_dequant

        table, blocks = random_table(num_requests, rows, ENTRY_BLOCK, device, pool_slots)
        cache = shared_cache(blocks, ENTRY_BLOCK, CacheFormat.FP8_DS_MLA, device)
        lens = torch.full((num_requests,), rows, device=device)
        out = torch.empty(num_requests, rows, HEAD_DIM, dtype=torch.bfloat16, device=device)

        def call() -> torch.Tensor:
            gather_dequant(cache, table, lens, None, out, 0)
            return out

        return call

    total = num_requests * rows
    fields = {"requests": num_requests, "rows": total, "dtype": "fp8_ds_mla"}
    return Case("gather_dequant", "triton", fields, make, total * (ENTRY_BYTES + HEAD_DIM * BF16))
