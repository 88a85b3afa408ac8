"""What a kernel measurement is made of: one case per operation and shape, and the inputs that cases share.

Nothing here times anything. Every case also runs on a CPU, in Triton's interpreter, at the sizes that tests give.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dsv4dist.arch import arch_of
from dsv4dist.bench.device_time import Call
from dsv4dist.cache.layout import index_page_bytes, page_bytes
from dsv4dist.config.presets import RELEASE_NAMES, preset_config
from dsv4dist.config.runtime import FP8_DS_MLA
from dsv4dist.kernels.block_table import BlockTable
from dsv4dist.kernels.paged_cache import INDEX_DIM, NOPE_DIM, ROPE_DIM, CacheFormat, PagedCache
from dsv4dist.kernels.reference.pages import write_entries
from dsv4dist.layers.rotary import rotary_table

HEAD_DIM = NOPE_DIM + ROPE_DIM
FILL_ROWS = 1 << 14
"""Cache entries that are filled at a time: a bound on scratch memory."""


class CaseSkippedError(Exception):
    """Raised by a case's `make` where the machine has no such operation; the text says what is missing."""


@dataclass(frozen=True)
class Case:
    """One operation at one shape.

    op, method   what is measured, and whose implementation; `fields` are the shape, one by one
    make         a new set of inputs on a device and the call on it; raises CaseSkippedError
    bytes_moved  fewest bytes through device memory: each input read once, each output written once
    flops        floating-point operations of the matrix unit; fp8: at its rate for fp8
    about        more fields that only the device knows
    """

    op: str
    method: str
    fields: dict[str, Any]
    make: Callable[[torch.device], Call]
    bytes_moved: int
    flops: int = 0
    fp8: bool = False
    about: Callable[[torch.device], dict[str, Any]] = field(default=lambda device: {})


@dataclass(frozen=True)
class Linear:
    """A projection as one rank of `tp` holds it: [n, k], or [groups, n, k] where wo_a has one matrix per group."""

    model: str
    layer: str
    tp: int
    n: int
    k: int
    groups: int = 1


def model_linears(tp_sizes: tuple[int, ...]) -> tuple[Linear, ...]:
    """The projections of attention of both releases: wq_a+wkv is whole on every rank, the others are shared out."""
    found = []
    for model, tp in itertools.product(RELEASE_NAMES, tp_sizes):
        config = preset_config(model)
        heads = config.num_attention_heads * config.head_dim // tp
        groups = config.o_groups // tp
        if tp == tp_sizes[0]:
            found.append(Linear(model, "wq_a_wkv", 1, config.q_lora_rank + config.head_dim, config.hidden_size))
        found.append(Linear(model, "wq_b", tp, heads, config.q_lora_rank))
        found.append(Linear(model, "wo_b", tp, config.hidden_size, groups * config.o_lora_rank))
        found.append(Linear(model, "wo_a", tp, config.o_lora_rank, config.group_input_size, groups))
    return tuple(found)


@dataclass(frozen=True)
class Sizes:
    """Shapes to measure.

    heads                 local heads; decode takes all, prefill those in prefill_heads, rotation and insertion the rest
    decode                (selected keys, queries), each query with `window` keys more
    cache_slots           entries of the caches that are read at random: more than a cache of the device holds
    index_slots           the same of index keys
    prefill               (tokens, selected keys) of one request whose compressed cache has prefill_entries
    indexer               (queries, entries of each), top_k of them selected
    tokens, context       tokens of a step for everything else, and tokens of each request up to the last of them
    key_list_widths       selected entries of Flash and Pro
    gather                (requests, rows of each)
    linear_rows, linears  rows of x; projections
    """

    heads: tuple[int, ...] = (8, 16, 32, 64, 128)
    decode: tuple[tuple[int, int], ...] = (
        *itertools.product((512, 1024), (1, 8, 32, 128, 512)),
        (8192, 8),
        (8192, 32),
    )
    window: int = 128
    cache_slots: int = 1 << 18
    index_slots: int = 1 << 20
    prefill_heads: tuple[int, ...] = (8, 16, 64)
    prefill: tuple[tuple[int, int], ...] = ((4096, 512),)
    prefill_entries: int = 8192
    indexer: tuple[tuple[int, int], ...] = ((1, 32768), (16, 32768))
    top_k: int = 512
    tokens: tuple[int, ...] = (1, 4096)
    context: int = 1280
    key_list_widths: tuple[int, ...] = (512, 1024)
    hidden: int = 4096
    q_rank: int = 1024
    gather: tuple[tuple[int, int], ...] = ((8, 4096),)
    linear_rows: tuple[int, ...] = (1, 8, 32, 128, 4096)
    linears: tuple[Linear, ...] = model_linears((1, 8))

    def with_heads(self, heads: tuple[int, ...]) -> Sizes:
        return replace(self, heads=heads, prefill_heads=heads)


@dataclass(frozen=True)
class Batch:
    """A step of T tokens whose requests each end at position context - 1."""

    num_requests: int
    positions: torch.Tensor
    token_to_req: torch.Tensor

    @classmethod
    def of(cls, tokens: int, context: int, device: torch.device) -> Batch:
        num_requests = -(-tokens // context)
        each = -(-tokens // num_requests)
        row = torch.arange(tokens, device=device)
        return cls(num_requests, row % each + (context - each), row // each)


def random_table(
    num_requests: int, entries: int, block_size: int, device: torch.device, pool_slots: int = 0
) -> tuple[BlockTable, int]:
    """Blocks in random order for requests of `entries` entries, out of as many as `pool_slots` needs, and how many.

    With a pool larger than a cache of the device, several tables rarely name the same blocks.
    """
    width = -(-entries // block_size)
    num_blocks = max(num_requests * width, -(-pool_slots // block_size))
    blocks = torch.randperm(num_blocks, device=device)[: num_requests * width].view(num_requests, width).int()
    return BlockTable(blocks, torch.zeros(num_requests, dtype=torch.int32, device=device), block_size), num_blocks


@functools.lru_cache(maxsize=4)
def shared_cache(num_blocks: int, block_size: int, kind: CacheFormat, device: torch.device) -> PagedCache:
    """An fp8 cache in the device's own encoding, full of normal numbers; cases share it and may overwrite entries."""
    page = page_bytes if kind is CacheFormat.FP8_DS_MLA else index_page_bytes
    width = HEAD_DIM if kind is CacheFormat.FP8_DS_MLA else INDEX_DIM
    data = torch.zeros(num_blocks, page(FP8_DS_MLA, block_size, width), dtype=torch.uint8, device=device)
    cache = PagedCache(data, block_size, kind, arch_of(device).fp8_format)
    for slots in torch.arange(cache.num_slots, device=device).split(FILL_ROWS):
        write_entries(cache, slots, torch.randn(len(slots), width, device=device))
    return cache


@functools.lru_cache(maxsize=4)
def rotary(num_positions: int, device: torch.device) -> torch.Tensor:
    """fp32 [num_positions, 64] of compressed layers."""
    return rotary_table(preset_config("flash").compress_rope, ROPE_DIM, num_positions, device)


def normal(*shape: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal numbers, each time others."""
    return torch.randn(shape, dtype=dtype, device=device)
