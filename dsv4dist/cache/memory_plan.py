"""What a rank's memory goes to, before anything starts: the allocator's own arithmetic, as rows. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dsv4dist.cache.groups import CacheGroup, cache_groups, plan_num_blocks
from dsv4dist.checkpoint.parameters import Role, model_parameters
from dsv4dist.config.model import ModelConfig
from dsv4dist.config.runtime import MAX_SPECULATIVE_TOKENS
from dsv4dist.distributed.shard import shard_shape
from dsv4dist.distributed.tp import TpInfo, check_tp_size

GPU_BYTES = {
    "mi300x": 192 * 10**9,
    "mi325x": 256 * 10**9,
    "mi350x": 288 * 10**9,
    "mi355x": 288 * 10**9,
    "h100": 80 * 10**9,
    "h200": 141 * 10**9,
    "b200": 180 * 10**9,
}
"""Memory of one GPU, by its vendor's data sheet."""


@dataclass(frozen=True)
class MemoryOptions:
    """The options that decide what memory goes to, named as in EngineConfig; `gpu` is a key of GPU_BYTES."""

    gpu: str
    dtype: str
    kv_cache_dtype: str
    context: int
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float


def plan_memory(config: ModelConfig, tp_size: int, options: MemoryOptions) -> list[dict[str, Any]]:
    """Rows `item`, `bytes` and `per`, then counts as `item`, `count` and `per`.  Raises: ConfigError.

    Weights count in the types that this version computes in, since it dequantises on load; rotary tables and caches as
    the runner allocates them. What activations need on top is left to what gpu_memory_utilization leaves free.
    """
    check_tp_size(config, tp_size)
    weights, rotary = weight_bytes(config, tp_size, options.dtype), rotary_bytes(config, options.context)
    budget = int(GPU_BYTES[options.gpu] * options.gpu_memory_utilization)
    groups = cache_groups(config, options.kv_cache_dtype)
    cache_budget = budget - weights - rotary
    rows: list[dict[str, Any]] = [
        {"item": "weights", "bytes": weights, "per": "rank"},
        {"item": "rotary tables", "bytes": rotary, "per": "rank"},
        {"item": "memory to use", "bytes": budget, "per": "rank"},
        {"item": "left for caches", "bytes": cache_budget, "per": "rank"},
    ]
    for group in groups:
        rows += _group_rows(group, options.context)
    return rows + _fit_rows(groups, cache_budget, options)


def weight_bytes(config: ModelConfig, tp_size: int, dtype: str) -> int:
    """Bytes of one rank's parameters in the types that they are computed in; less where fp8 projections stay fp8."""
    matrix = {"float32": 4, "bfloat16": 2}[dtype]
    size = {Role.MATRIX: matrix, Role.LINEAR: matrix, Role.EXACT: 4, Role.INDEX: 8}
    tp = TpInfo(0, tp_size)
    return sum(math.prod(shard_shape(p.shape, p.shard, tp)) * size[p.role] for p in model_parameters(config))


def rotary_bytes(config: ModelConfig, max_model_len: int) -> int:
    """Bytes of the rotary tables, one for each set of frequencies in use; drafts may look further than the model."""
    return len(config.used_ropes()) * (max_model_len + MAX_SPECULATIVE_TOKENS) * config.rope_head_dim * 4


def _group_rows(group: CacheGroup, context: int) -> list[dict[str, Any]]:
    if group.window is None:
        per_token = group.block_bytes / group.block_tokens
        blocks = -(-context // group.block_tokens)
        return [
            {"item": f"{group.name} cache", "bytes": per_token, "per": "token"},
            {"item": f"{group.name} cache", "bytes": blocks * group.block_bytes, "per": f"request of {context} tokens"},
        ]
    blocks = group.live_blocks(1, 1, context)
    return [{"item": f"{group.name} cache", "bytes": blocks * group.block_bytes, "per": "decoding request"}]


def _fit_rows(groups: tuple[CacheGroup, ...], cache_budget: int, options: MemoryOptions) -> list[dict[str, Any]]:
    """How the allocator would divide the rest, and how many requests of the given context run in it at once."""
    planned = plan_num_blocks(
        groups, cache_budget, options.max_num_seqs, options.max_num_batched_tokens, options.context, retain=True
    )
    num_blocks = {name: max(0, count) for name, count in planned.items()}  # negative: not even the windows fit
    rows: list[dict[str, Any]] = [
        {
            "item": f"{group.name} blocks",
            "count": num_blocks[group.name],
            "bytes": num_blocks[group.name] * group.block_bytes,
            "per": "rank",
        }
        for group in groups
    ]
    if min(num_blocks.values()) < 1:
        fitting = 0
    else:
        unbounded = [group for group in groups if group.window is None]
        limits = [num_blocks[group.name] // -(-options.context // group.block_tokens) for group in unbounded]
        fitting = min([options.max_num_seqs, *limits])
    return [*rows, {"item": "requests that fit", "count": fitting, "per": f"context of {options.context} tokens"}]
