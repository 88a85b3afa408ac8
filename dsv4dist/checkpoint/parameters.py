"""Every parameter of the model: name, full shape, how releases store it, how ranks share it (checkpoint spec 2).

This table is the only place that lists parameters: loading, checkpoint making and memory planning all walk it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from dsv4dist.config.model import LayerKind, ModelConfig
from dsv4dist.distributed.shard import Shard


class Storage(Enum):
    """How the releases store a parameter; any floating-point storage is accepted where a float is meant."""

    FP8 = "fp8"  # e4m3 with one scale per 128x128 block
    FP4 = "fp4"  # e2m1 pairs with one scale per 32 columns (e4m3 in some releases)
    BF16 = "bf16"
    FP32 = "fp32"
    INT64 = "int64"


class Role(Enum):
    """What precision a parameter is computed in, whatever it is stored as (attention spec 1.7)."""

    MATRIX = "matrix"  # the run's dtype
    LINEAR = "linear"  # the run's dtype, or fp8 with its block scales as stored: attention's projections
    EXACT = "exact"  # fp32: norms, sinks, biases, position biases, router, hyper-connections, head
    INDEX = "index"  # int64


@dataclass(frozen=True)
class Parameter:
    """One parameter under its release name, with its full shape."""

    name: str
    shape: tuple[int, ...]
    storage: Storage
    role: Role
    shard: Shard = Shard.REPLICATED


def model_parameters(config: ModelConfig) -> Iterator[Parameter]:
    """All parameters of the main model, in release order; draft layers (`mtp.*`) are not part of it."""
    vocab, hidden = config.vocab_size, config.hidden_size
    yield Parameter("embed.weight", (vocab, hidden), Storage.BF16, Role.MATRIX, Shard.ROWS)
    for layer, kind in enumerate(config.layer_kinds):
        yield from _layer_parameters(config, f"layers.{layer}.", kind, hashed=layer < config.num_hash_layers)
    yield _exact("norm.weight", (hidden,), Storage.BF16)
    yield Parameter("head.weight", (vocab, hidden), Storage.BF16, Role.EXACT, Shard.ROWS)
    yield from _head_mix_parameters(config, "")


def draft_parameters(config: ModelConfig, draft: int = 0) -> Iterator[Parameter]:
    """The parameters of draft layer `mtp.<draft>` in the first releases: one window-only layer and its projections."""
    prefix, hidden = f"mtp.{draft}.", config.hidden_size
    yield from _layer_parameters(config, prefix, LayerKind.SWA, hashed=False)
    for name in ("e_proj", "h_proj"):
        yield _matrix(f"{prefix}{name}.weight", (hidden, hidden))
    for name in ("enorm", "hnorm", "norm"):
        yield _exact(f"{prefix}{name}.weight", (hidden,), Storage.BF16)
    yield from _head_mix_parameters(config, prefix)


def _head_mix_parameters(config: ModelConfig, prefix: str) -> Iterator[Parameter]:
    hc = config.hc_mult
    yield _exact(f"{prefix}hc_head_fn", (hc, hc * config.hidden_size))
    yield _exact(f"{prefix}hc_head_base", (hc,))
    yield _exact(f"{prefix}hc_head_scale", (1,))


def _layer_parameters(config: ModelConfig, prefix: str, kind: LayerKind, hashed: bool) -> Iterator[Parameter]:
    hidden, hc = config.hidden_size, config.hc_mult
    for block in ("attn", "ffn"):
        yield _exact(f"{prefix}{block}_norm.weight", (hidden,), Storage.BF16)
        yield _exact(f"{prefix}hc_{block}_fn", ((2 + hc) * hc, hc * hidden))
        yield _exact(f"{prefix}hc_{block}_base", ((2 + hc) * hc,))
        yield _exact(f"{prefix}hc_{block}_scale", (3,))
    yield from _attention_parameters(config, f"{prefix}attn.", kind)
    yield from _moe_parameters(config, f"{prefix}ffn.", hashed)


def _attention_parameters(config: ModelConfig, prefix: str, kind: LayerKind) -> Iterator[Parameter]:
    hidden, heads, dim, q_rank = config.hidden_size, config.num_attention_heads, config.head_dim, config.q_lora_rank
    grouped = config.o_groups * config.o_lora_rank
    yield Parameter(f"{prefix}attn_sink", (heads,), Storage.FP32, Role.EXACT, Shard.ROWS)
    yield _linear(f"{prefix}wq_a.weight", (q_rank, hidden))
    yield _exact(f"{prefix}q_norm.weight", (q_rank,), Storage.BF16)
    yield _linear(f"{prefix}wq_b.weight", (heads * dim, q_rank), shard=Shard.ROWS)
    yield _linear(f"{prefix}wkv.weight", (dim, hidden))
    yield _exact(f"{prefix}kv_norm.weight", (dim,), Storage.BF16)
    yield _linear(f"{prefix}wo_a.weight", (grouped, config.group_input_size), shard=Shard.ROWS)
    yield _linear(f"{prefix}wo_b.weight", (hidden, grouped), shard=Shard.COLUMNS)
    if kind is not LayerKind.SWA:
        yield from _compressor_parameters(config, f"{prefix}compressor.", kind, dim)
    if kind is LayerKind.CSA:
        index_heads, index_dim = config.index_n_heads, config.index_head_dim
        yield _linear(f"{prefix}indexer.wq_b.weight", (index_heads * index_dim, q_rank))
        yield _matrix(f"{prefix}indexer.weights_proj.weight", (index_heads, hidden), Storage.BF16)
        yield from _compressor_parameters(config, f"{prefix}indexer.compressor.", kind, index_dim)


def _compressor_parameters(config: ModelConfig, prefix: str, kind: LayerKind, dim: int) -> Iterator[Parameter]:
    width = kind.overlap * dim
    yield _exact(f"{prefix}ape", (kind.compress_ratio, width))
    yield _matrix(f"{prefix}wkv.weight", (width, config.hidden_size), Storage.BF16)
    yield _matrix(f"{prefix}wgate.weight", (width, config.hidden_size), Storage.BF16)
    yield _exact(f"{prefix}norm.weight", (dim,), Storage.BF16)


def _moe_parameters(config: ModelConfig, prefix: str, hashed: bool) -> Iterator[Parameter]:
    hidden, inner, experts = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    yield _exact(f"{prefix}gate.weight", (experts, hidden), Storage.BF16)
    if hashed:
        shape = (config.vocab_size, config.num_experts_per_tok)
        yield Parameter(f"{prefix}gate.tid2eid", shape, Storage.INT64, Role.INDEX)
    else:
        yield _exact(f"{prefix}gate.bias", (experts,))
    names = [("shared_experts", Storage.FP8)] + [(f"experts.{one}", Storage.FP4) for one in range(experts)]
    for name, storage in names:
        yield _matrix(f"{prefix}{name}.w1.weight", (inner, hidden), storage, Shard.ROWS)
        yield _matrix(f"{prefix}{name}.w2.weight", (hidden, inner), storage, Shard.COLUMNS)
        yield _matrix(f"{prefix}{name}.w3.weight", (inner, hidden), storage, Shard.ROWS)


def _exact(name: str, shape: tuple[int, ...], storage: Storage = Storage.FP32) -> Parameter:
    return Parameter(name, shape, storage, Role.EXACT)


def _matrix(
    name: str, shape: tuple[int, ...], storage: Storage = Storage.FP8, shard: Shard = Shard.REPLICATED
) -> Parameter:
    return Parameter(name, shape, storage, Role.MATRIX, shard)


def _linear(name: str, shape: tuple[int, ...], shard: Shard = Shard.REPLICATED) -> Parameter:
    return Parameter(name, shape, Storage.FP8, Role.LINEAR, shard)
