"""One decode step of a model's attention layers as one rank runs them: random weights and caches of the released sizes.

Norms and residuals between layers are there; embedding, hyper-connections, experts, head and the all-reduce are not.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dsv4dist.arch import arch_of
from dsv4dist.bench.device_time import captured, measure_ceilings, time_graph
from dsv4dist.bench.report import time_calls
from dsv4dist.cache.groups import GROUP_NAMES, CacheGroup, cache_groups
from dsv4dist.cache.pool import LayerCaches, allocate_caches
from dsv4dist.checkpoint.load import local_shape
from dsv4dist.checkpoint.parameters import Parameter, Role, model_parameters
from dsv4dist.config.model import LayerKind, ModelConfig
from dsv4dist.config.runtime import FP8_DS_MLA
from dsv4dist.distributed.comm import SingleProcess
from dsv4dist.distributed.tp import TpInfo
from dsv4dist.kernels.ops import Ops
from dsv4dist.kernels.paged_cache import (
    INDEX_DIM,
    INDEX_SCALE_BYTES,
    TOKEN_BYTES,
    TOKEN_SCALE_BYTES,
    CacheFormat,
    Fp8Format,
    PagedCache,
)
from dsv4dist.layers.attention import Attention
from dsv4dist.layers.overlap import Overlap
from dsv4dist.layers.rotary import rotary_table
from dsv4dist.layers.weights import below
from dsv4dist.step.buffers import StepBuffers, decode_widths
from dsv4dist.step.builder import build_metadata
from dsv4dist.workers.packet import Int32Array, RowKind

SPARE_TOKENS = 8
"""Tokens that a sequence could still grow by: max_model_len is that much beyond the context."""


class AttentionStack:
    """The attention layers of one rank with random weights, the replicated and the split ones at their true sizes."""

    def __init__(
        self, config: ModelConfig, shard_of: int, ops: Ops, device: torch.device, overlap: Overlap, max_context: int
    ) -> None:
        self.config, self.ops, self.device, self.overlap = config, ops, device, overlap
        tp = TpInfo(0, shard_of)
        weights: dict[str, torch.Tensor] = {}
        generator = torch.Generator(device).manual_seed(0)
        fp8_format = arch_of(device).fp8_format
        for parameter in model_parameters(config):
            if ".attn" in parameter.name:
                weights |= _random_parameter(parameter, tp, fp8_format, generator)
        self.weight_bytes = sum(one.numel() * one.element_size() for one in weights.values())
        positions = max_context + SPARE_TOKENS
        tables = {rope: rotary_table(rope, config.rope_head_dim, positions, device) for rope in config.used_ropes()}
        self.norms = [weights[f"layers.{index}.attn_norm.weight"] for index in range(config.num_hidden_layers)]
        self.layers = [
            Attention(
                config,
                kind,
                below(weights, f"layers.{index}.attn."),
                tables[config.rope_of(kind)],
                ops,
                SingleProcess(),
                overlap,
            )
            for index, kind in enumerate(config.layer_kinds)
        ]


class StackStep:
    """A decode step of `tokens` requests over caches full of random entries; the first has `context` tokens.

    Requests stand one token apart, as a server's stand anywhere: where ratios divide the context, the first completes
    an entry of every compressed layer, and from there every fourth one of a CSA layer, every 128th of an HCA layer.
    """

    def __init__(self, stack: AttentionStack, tokens: int, context: int) -> None:
        config, device = stack.config, stack.device
        groups = cache_groups(config, FP8_DS_MLA)
        self.stack, self.max_len = stack, context + SPARE_TOKENS
        widths = decode_widths(groups, self.max_len, tokens_per_request=1)
        buffers = StepBuffers([tokens], tokens, widths, device, poison=False)
        lengths = context - np.arange(tokens) % min(128, context // 2)
        sections, num_blocks = _sections(groups, lengths)
        self.sections = buffers.stage(sections, tokens)
        self.caches = allocate_caches(config, num_blocks, FP8_DS_MLA, arch_of(device).fp8_format, device, poison=False)
        for layer in self.caches:
            _fill(layer)
        self.x = torch.randn(tokens, config.hidden_size, device=device, dtype=torch.bfloat16)
        self.cache_bytes = sum(
            _bytes_read(config, kind, length) for length in lengths.tolist() for kind in config.layer_kinds
        )

    def run(self) -> torch.Tensor:
        """All layers; returns what leaves the last one."""
        stack, x = self.stack, self.x
        step = build_metadata(stack.config, stack.ops, self.sections, self.max_len)
        for layer, norm, caches in zip(stack.layers, stack.norms, self.caches, strict=True):
            x = x + layer(stack.ops.rms_norm(x, norm, stack.config.rms_norm_eps), step, caches)
        return x

    def run_layer(self, kind: LayerKind) -> torch.Tensor:
        """The last layer of a kind alone, metadata included."""
        stack = self.stack
        index = max(i for i, one in enumerate(stack.config.layer_kinds) if one is kind)
        step = build_metadata(stack.config, stack.ops, self.sections, self.max_len)
        normed = stack.ops.rms_norm(self.x, stack.norms[index], stack.config.rms_norm_eps)
        return stack.layers[index](normed, step, self.caches[index])


@torch.inference_mode()
def bench_decode(
    name: str,
    config: ModelConfig,
    ops: Ops,
    device: torch.device,
    shards: list[int],
    tokens: list[int],
    contexts: list[int],
    replays: int,
    by_kernel: bool,
) -> Iterator[dict[str, Any]]:
    """Rows of the attention layers' decode step on this machine's GPU, per rank of a group of each of `shards`.

    method  `graph`: captured, compressors beside the queries; `graph_one_stream`: captured in sequence; `eager`, for
            the smallest number of tokens; `kernel`, with by_kernel: one kernel's share of one layer of a kind
    The floor is the bytes of all weights and of what is read of the caches, over the rate of a copy in the same run.
    """
    ceilings, _ = measure_ceilings(device, replays)
    for shard_of in shards:
        overlap = Overlap.on(device, arch_of(device).main_first_tokens)
        stack = AttentionStack(config, shard_of, ops, device, overlap, max(contexts))
        for context in contexts:
            for count in tokens:
                shape = {"bench": "decode", "model": name, "shard_of": shard_of, "context": context, "tokens": count}
                step = StackStep(stack, count, context)
                floor = (stack.weight_bytes + step.cache_bytes) / ceilings.copy_bytes
                spreads = {"graph": time_graph([step.run], replays)}
                overlap.enabled = False
                spreads["graph_one_stream"] = time_graph([step.run], replays)
                overlap.enabled = True
                if count == min(tokens):
                    spreads["eager"] = time_calls(partial(_eagerly, step), max(5, replays // 2))
                for method, spread in spreads.items():
                    ratio = {"floor_us": floor, "ratio_to_floor": spread.median_us / floor}
                    yield {**shape, "method": method, **asdict(spread), **ratio}
                if by_kernel and context == contexts[0]:
                    yield from _kernel_rows(step, shape)
                del step
                torch.cuda.empty_cache()
        del stack


def _eagerly(step: StackStep) -> None:
    step.run()
    torch.cuda.synchronize()


def _kernel_rows(step: StackStep, shape: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What each kernel adds to one layer of each kind, captured in sequence; mean of 5 replays.

    Kernels are launched before those ahead of them end, so a kernel counts from the end of the one before it to its own
    end; the first one, in full.
    """
    replays = 5
    step.stack.overlap.enabled = False
    for kind in dict.fromkeys(step.stack.config.layer_kinds):
        added, calls = defaultdict[str, float](float), Counter[str]()
        for spans in _replayed_spans(partial(step.run_layer, kind), replays):
            ends = [spans[0][0], *(end for _, end, _ in spans)]
            for before, (_, end, name) in zip(ends, spans, strict=False):
                added[name] += max(0.0, end - before) / replays
                calls[name] += 1
        for name, microseconds in sorted(added.items(), key=lambda one: -one[1]):
            row = {"kernel": name[:80], "calls": calls[name] / replays, "median_us": microseconds}
            yield {**shape, "method": "kernel", "layer": kind.name.lower(), **row}
    step.stack.overlap.enabled = True


def _replayed_spans(call: Callable[[], object], replays: int) -> list[list[tuple[float, float, str]]]:
    """(start, end, name) of every kernel of `call` in a graph, in microseconds, by their ends, for each replay."""
    found = []
    with captured([call]) as graph:
        graph.replay()
        for _ in range(replays):
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
                graph.replay()
                torch.cuda.synchronize()
            events = [event for event in profile.events() or () if str(event.device_type).endswith("CUDA")]
            spans = [(event.time_range.start, event.time_range.end, event.name) for event in events]
            found.append(sorted(spans, key=lambda span: span[1]))
    return found


def _random_parameter(
    parameter: Parameter, tp: TpInfo, fp8_format: Fp8Format, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """A parameter's share with values that keep activations near 1; projections of whole blocks in fp8."""
    shape, device = local_shape(parameter, tp), generator.device
    if parameter.role is Role.LINEAR and all(size % 128 == 0 for size in shape):
        data = torch.randint(0x28, 0x40, shape, dtype=torch.uint8, device=device, generator=generator)
        data |= torch.randint(0, 2, shape, dtype=torch.uint8, device=device, generator=generator) << 7
        scale = torch.full([size // 128 for size in shape], shape[1] ** -0.5, device=device)
        return {parameter.name: data.view(fp8_format.torch_dtype), parameter.name.replace(".weight", ".scale"): scale}
    if len(shape) == 1:
        return {parameter.name: torch.ones(shape, device=device)}
    dtype = torch.float32 if parameter.role is Role.EXACT else torch.bfloat16
    return {parameter.name: torch.randn(shape, device=device, generator=generator).to(dtype) * shape[1] ** -0.5}


def _sections(
    groups: tuple[CacheGroup, ...], lengths: npt.NDArray[np.int64]
) -> tuple[dict[str, Int32Array], dict[str, int]]:
    """The packet's sections for requests of these lengths, and how many blocks of each group there are, scattered."""
    rng = np.random.default_rng(0)
    tokens = len(lengths)
    zeros = np.zeros(tokens, np.int32)
    sections: dict[str, Int32Array] = {
        "query_start_loc": np.arange(tokens + 1, dtype=np.int32),
        "seq_lens": lengths.astype(np.int32),
        "row_kind": np.full(tokens, RowKind.SAMPLE, np.int32),
        **dict.fromkeys(("num_drafts", "temperature", "top_p", "top_k", "token_ids"), zeros),
        "seed": np.zeros((tokens, 2), np.int32),
        "targets": zeros - 1,
    }
    for name in GROUP_NAMES:
        sections[f"{name}.first_block"], sections[f"{name}.blocks"] = zeros, np.zeros((tokens, 0), np.int32)
    num_blocks = {}
    for group in groups:
        last = (lengths - 1) // group.block_tokens
        first = np.array([group.first_needed(length - 1) // group.block_tokens for length in lengths.tolist()])
        width = int((last - first).max()) + 1
        num_blocks[group.name] = tokens * width
        blocks = rng.permutation(tokens * width).astype(np.int32)
        sections[f"{group.name}.first_block"] = first.astype(np.int32)
        sections[f"{group.name}.blocks"] = blocks.reshape(tokens, width)
    return sections, num_blocks


def _fill(layer: LayerCaches) -> None:
    """Entries near 1 with unit scales, so that index scores differ and nothing overflows; states of zeros."""
    for cache in (layer.window, layer.entries, layer.index_keys):
        if cache is not None:
            _fill_pages(cache)
    for state in (layer.state, layer.index_state):
        if state is not None:
            state.data.zero_()


def _fill_pages(cache: PagedCache) -> None:
    index = cache.format is CacheFormat.FP8_INDEX
    data_bytes = cache.block_size * (INDEX_DIM if index else TOKEN_BYTES)
    pages = cache.data
    for part in pages.split(1 << 14):  # bounded temporary memory
        part[:, :data_bytes] = torch.randint(
            0x20, 0x40, (len(part), data_bytes), dtype=torch.uint8, device=pages.device
        )
    scales = pages[:, data_bytes : data_bytes + cache.block_size * (INDEX_SCALE_BYTES if index else TOKEN_SCALE_BYTES)]
    if index:
        one = torch.ones(1, dtype=torch.float32, device=pages.device).view(torch.uint8)
        scales.copy_(one.repeat(cache.block_size))
    else:
        scales.fill_(127)


def _bytes_read(config: ModelConfig, kind: LayerKind, context: int) -> int:
    """Cache bytes that one query of a layer reads: its window, and the entries that it attends to or scores."""
    token = TOKEN_BYTES + TOKEN_SCALE_BYTES
    size = min(config.sliding_window, context) * token
    if kind is LayerKind.SWA:
        return size
    visible = context // kind.compress_ratio
    if kind is LayerKind.HCA:
        return size + visible * token
    return size + min(visible, config.index_topk) * token + visible * (INDEX_DIM + INDEX_SCALE_BYTES)
