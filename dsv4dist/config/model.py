"""config.json, in either spelling, as one frozen ModelConfig.

Releases write `compress_ratios`, `num_hash_layers` and a flat `rope_scaling`; directories saved by transformers write
`layer_types`, `compress_rates`, `mlp_layer_types` and nested `rope_parameters`. Both give the same ModelConfig.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from dsv4dist.errors import ConfigError, one_error

MODEL_TYPE = "deepseek_v4"


_COMPRESS_RATIO = {"swa": 1, "csa": 4, "hca": 128}


class LayerKind(Enum):
    """What an attention layer sees beside its sliding window."""

    SWA = "swa"  # nothing
    CSA = "csa"  # the selected entries of a compression by 4
    HCA = "hca"  # all entries of a compression by 128

    @property
    def compress_ratio(self) -> int:
        """Tokens per compressed entry; 1 where there are none."""
        return _COMPRESS_RATIO[self.value]

    @property
    def overlap(self) -> int:
        """Windows that one compressed entry pools: 2 for CSA (the previous and its own), else 1."""
        return 2 if self is LayerKind.CSA else 1

    @classmethod
    def from_ratio(cls, ratio: int) -> LayerKind | None:
        return {0: cls.SWA, 1: cls.SWA, 4: cls.CSA, 128: cls.HCA}.get(ratio)


@dataclass(frozen=True)
class RotaryConfig:
    """Rotary frequencies of one kind of layer (attention spec 1.3). `factor` is None without YaRN."""

    theta: float
    factor: float | None = None
    original_max_position: int = 65536
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of one DeepSeek-V4 model. Names follow config.json where it has one."""

    vocab_size: int
    hidden_size: int
    layer_kinds: tuple[LayerKind, ...]
    num_attention_heads: int
    head_dim: int
    rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    sliding_window: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    num_hash_layers: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    swiglu_limit: float
    main_rope: RotaryConfig
    compress_rope: RotaryConfig
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_kinds)

    @property
    def softmax_scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def group_input_size(self) -> int:
        """Input width of one output group: its heads times head_dim."""
        return self.num_attention_heads // self.o_groups * self.head_dim

    def rope_of(self, kind: LayerKind) -> RotaryConfig:
        return self.main_rope if kind is LayerKind.SWA else self.compress_rope

    def used_ropes(self, draft_kinds: tuple[LayerKind, ...] = ()) -> set[RotaryConfig]:
        """The rotary frequencies that any layer uses, draft layers of `draft_kinds` among them."""
        return {self.rope_of(kind) for kind in (*self.layer_kinds, *draft_kinds)}

    def has(self, kind: LayerKind) -> bool:
        return kind in self.layer_kinds


def load_model_config(directory: Path) -> ModelConfig:
    """Read `directory`/config.json.  Raises: ConfigError naming the file and every problem found in it."""
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no such directory; give the folder that holds config.json and the weights")
    path = directory / "config.json"
    if not path.is_file():
        raise ConfigError(f"{directory}: there is no config.json in it")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable as JSON ({error})") from None
    except RecursionError:
        raise ConfigError(f"{path}: not readable as JSON (nested too deeply)") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: holds {type(raw).__name__}, not an object")
    return parse_model_config(raw, where=str(path))


def parse_model_config(raw: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Turn the contents of a config.json into a ModelConfig.  Raises: ConfigError with all problems at once."""
    if raw.get("model_type") != MODEL_TYPE:
        raise ConfigError(f"{where}: model_type is {raw.get('model_type')!r}; only {MODEL_TYPE!r} is served")
    reader = _Reader(raw)
    num_layers = reader.integer("num_hidden_layers")
    head_dim = reader.integer("head_dim", 512)
    main_rope, compress_rope = _rotary(reader)
    values: dict[str, Any] = {
        "vocab_size": reader.integer("vocab_size"),
        "hidden_size": reader.integer("hidden_size"),
        "layer_kinds": _layer_kinds(reader, num_layers),
        "num_attention_heads": reader.integer("num_attention_heads"),
        "head_dim": head_dim,
        "rope_head_dim": _rope_head_dim(reader, head_dim),
        "q_lora_rank": reader.integer("q_lora_rank"),
        "o_lora_rank": reader.integer("o_lora_rank"),
        "o_groups": reader.integer("o_groups"),
        "sliding_window": reader.integer("sliding_window", 128),
        "index_n_heads": reader.integer("index_n_heads", 64),
        "index_head_dim": reader.integer("index_head_dim", 128),
        "index_topk": reader.integer("index_topk"),
        "hc_mult": reader.integer("hc_mult", 4),
        "hc_sinkhorn_iters": reader.integer("hc_sinkhorn_iters", 20),
        "hc_eps": reader.number("hc_eps", 1e-6),
        "rms_norm_eps": reader.number("rms_norm_eps", 1e-6),
        "num_hash_layers": _num_hash_layers(reader, num_layers),
        "n_routed_experts": reader.integer("n_routed_experts"),
        "num_experts_per_tok": reader.integer("num_experts_per_tok"),
        "moe_intermediate_size": reader.integer("moe_intermediate_size"),
        "routed_scaling_factor": reader.number("routed_scaling_factor", 1.0),
        "swiglu_limit": reader.number("swiglu_limit", 10.0),
        "main_rope": main_rope,
        "compress_rope": compress_rope,
        "max_position_embeddings": reader.integer("max_position_embeddings"),
        "bos_token_id": next(iter(_token_ids(reader, "bos_token_id")), None),
        "eos_token_ids": _token_ids(reader, "eos_token_id"),
    }
    for key, only in (
        ("num_key_value_heads", 1),
        ("n_shared_experts", 1),
        ("scoring_func", "sqrtsoftplus"),
        ("norm_topk_prob", True),
        ("hidden_act", "silu"),
        ("tie_word_embeddings", False),
        ("attention_bias", False),
    ):
        if raw.get(key, only) != only:
            reader.problems.append(f"{key} is {raw[key]!r}; only {only!r} is supported")
    if not reader.problems:
        _check_relations(values, reader.problems)
    if reader.problems:
        raise one_error(ConfigError, where, reader.problems)
    return ModelConfig(**values)


class _Reader:
    """Typed access to the keys of one object; collects problems instead of stopping at the first."""

    def __init__(self, raw: dict[str, Any], name: str = "", problems: list[str] | None = None) -> None:
        self.raw = raw
        self.problems: list[str] = [] if problems is None else problems
        self._prefix = f"{name}." if name else ""

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        value = self.raw.get(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            self._complain(key, f"an integer >= {minimum}")
            return minimum
        return value

    def number(self, key: str, default: float, above: float = 0.0) -> float:
        """A finite number larger than `above`."""
        value = self.raw.get(key, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not above < value <= sys.float_info.max:
            self._complain(key, f"a number above {above:g}")
            return default
        return float(value)

    def object(self, key: str) -> _Reader:
        """A reader of the object under a key, of an empty one where that is missing or null."""
        value = self.raw.get(key)
        if value is not None and not isinstance(value, dict):
            self._complain(key, "an object")
        return _Reader(value if isinstance(value, dict) else {}, self._prefix + key, self.problems)

    def _complain(self, key: str, expected: str) -> None:
        found = "missing" if key not in self.raw else repr(self.raw[key])
        self.problems.append(f"{self._prefix}{key} is {found}; expected {expected}")


def _layer_kinds(reader: _Reader, num_layers: int) -> tuple[LayerKind, ...]:
    raw = reader.raw
    if "compress_ratios" in raw:
        key, ratios = "compress_ratios", raw["compress_ratios"]
    elif "layer_types" in raw:
        key, rates = "layer_types", reader.object("compress_rates").raw
        names = raw["layer_types"]
        ratios = [rates.get(str(name), 0) for name in names] if isinstance(names, list) else names
    else:
        reader.problems.append("neither compress_ratios nor layer_types is there; one of them must name every layer")
        return ()
    if not isinstance(ratios, list) or len(ratios) < num_layers:
        found = f"{len(ratios)} entries" if isinstance(ratios, list) else repr(ratios)
        reader.problems.append(f"{key} is {found}; expected a list of at least num_hidden_layers = {num_layers}")
        return ()
    kinds = []
    for layer, ratio in enumerate(ratios[:num_layers]):  # what follows belongs to draft layers
        kind = LayerKind.from_ratio(ratio) if isinstance(ratio, int) else None
        if kind is None:
            reader.problems.append(f"{key}: layer {layer} has ratio {ratio!r}; expected 0, 1, 4 or 128")
        else:
            kinds.append(kind)
    return tuple(kinds)


def _num_hash_layers(reader: _Reader, num_layers: int) -> int:
    types = reader.raw.get("mlp_layer_types")
    if types is None:
        return min(reader.integer("num_hash_layers", 0, minimum=0), num_layers)
    if not isinstance(types, list) or len(types) < num_layers:
        reader.problems.append(f"mlp_layer_types is not a list of num_hidden_layers = {num_layers} names")
        return 0
    types = types[:num_layers]
    count = types.count("hash_moe")
    if types != ["hash_moe"] * count + ["moe"] * (num_layers - count):
        reader.problems.append("mlp_layer_types must be some 'hash_moe' followed by 'moe' only")
    return count


def _rope_head_dim(reader: _Reader, head_dim: int) -> int:
    if "qk_rope_head_dim" in reader.raw:
        return reader.integer("qk_rope_head_dim")
    return int(head_dim * reader.number("partial_rotary_factor", 64 / 512))


def _rotary(reader: _Reader) -> tuple[RotaryConfig, RotaryConfig]:
    # The frequencies' formula divides by the logarithm of theta.
    main_theta = reader.number("rope_theta", 10000.0, above=1.0)
    compress_theta = reader.number("compress_rope_theta", 160000.0, above=1.0)
    nested = reader.object("rope_parameters")
    main, compress = nested.object("main"), nested.object("compress")
    if main.raw and compress.raw:
        scaling = compress
        main_theta = main.number("rope_theta", main_theta, above=1.0)
        compress_theta = compress.number("rope_theta", compress_theta, above=1.0)
    else:
        scaling = reader.object("rope_scaling") if reader.raw.get("rope_scaling") else nested
    name = scaling.raw.get("rope_type", scaling.raw.get("type", "default"))
    if name == "default":
        return RotaryConfig(main_theta), RotaryConfig(compress_theta)
    if name not in ("yarn", "deepseek_yarn"):
        reader.problems.append(f"rope_scaling type is {name!r}; expected 'yarn' or 'default'")
        return RotaryConfig(main_theta), RotaryConfig(compress_theta)
    return RotaryConfig(main_theta), RotaryConfig(
        theta=compress_theta,
        factor=scaling.number("factor", 1.0),
        original_max_position=scaling.integer("original_max_position_embeddings", 65536),
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
    )


def _token_ids(reader: _Reader, key: str) -> tuple[int, ...]:
    value = reader.raw.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        reader.problems.append(f"{key} is {value!r}; expected an integer or a list of integers")
        return ()
    return tuple(ids)


def _check_relations(values: dict[str, Any], problems: list[str]) -> None:
    heads, groups = values["num_attention_heads"], values["o_groups"]
    if heads % groups:
        problems.append(f"num_attention_heads = {heads} is not a multiple of o_groups = {groups}")
    rope = values["rope_head_dim"]
    for key in ("head_dim", "index_head_dim"):
        if rope % 2 or not 0 < rope <= values[key]:
            problems.append(f"rotary width {rope} must be even, above 0 and at most {key} = {values[key]}")
    if values["num_experts_per_tok"] > values["n_routed_experts"]:
        problems.append("num_experts_per_tok is larger than n_routed_experts")


__all__ = ["LayerKind", "ModelConfig", "RotaryConfig", "load_model_config", "parse_model_config"]
