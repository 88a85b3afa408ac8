"""Options + config.json + machine -> the one configuration that every rank gets."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from dsv4dist.config.model import LayerKind, ModelConfig, load_model_config
from dsv4dist.config.runtime import DEFAULT_MAX_MODEL_LEN, FP8_DS_MLA, EngineConfig
from dsv4dist.errors import ConfigError, UnsupportedError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunConfig:
    """What a rank needs to build its share: plain values only, so that it can be sent to another machine."""

    directory: Path
    model: ModelConfig
    tp_size: int
    device: str
    """`cpu` or `cuda`; `cuda` is torch's name for AMD GPUs too."""
    dtype: str
    kv_cache_dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool
    speculative_tokens: int
    run_ahead: int
    enforce_eager: bool
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    kernels: str
    poison_memory: bool

    @property
    def num_draft_layers(self) -> int:
        """Draft layers of the checkpoint that are loaded."""
        return 1 if self.speculative_tokens else 0


def resolve(options: EngineConfig, gpu_available: bool) -> RunConfig:
    """Fill in every `auto`.  Raises: ConfigError, UnsupportedError; logs the choices in one line."""
    options.check()
    directory = Path(options.model)
    model = load_model_config(directory)
    device = _device(options.device, gpu_available)
    dtype = options.dtype if options.dtype != "auto" else ("float32" if device == "cpu" else "bfloat16")
    kv_cache_dtype = options.kv_cache_dtype
    if kv_cache_dtype == "auto":
        kv_cache_dtype = FP8_DS_MLA if device == "cuda" and not _fp8_misfits(model) else dtype
    if kv_cache_dtype == FP8_DS_MLA:
        check_fp8_cache(model)
    max_model_len = options.max_model_len or min(model.max_position_embeddings, DEFAULT_MAX_MODEL_LEN)
    if max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len is {max_model_len}; the model's max_position_embeddings is "
            f"{model.max_position_embeddings}"
        )
    log.info("device %s, dtype %s, cache %s, max_model_len %d", device, dtype, kv_cache_dtype, max_model_len)
    return RunConfig(
        directory=directory.resolve(),
        model=model,
        tp_size=options.tensor_parallel_size,
        device=device,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        enable_prefix_caching=options.enable_prefix_caching,
        speculative_tokens=options.speculative_tokens,
        run_ahead=1 if options.speculative_tokens else options.run_ahead,
        enforce_eager=options.enforce_eager,
        gpu_memory_utilization=options.gpu_memory_utilization,
        kv_cache_memory_bytes=options.kv_cache_memory_bytes,
        kernels=options.kernels,
        poison_memory=options.poison_memory,
    )


def check_fp8_cache(model: ModelConfig) -> None:
    """Refuse models whose rows do not fit fp8_ds_mla.  Raises: UnsupportedError naming the widths."""
    misfits = _fp8_misfits(model)
    if misfits:
        raise UnsupportedError(
            f"--kv-cache-dtype fp8_ds_mla needs {', '.join(misfits)}; use bfloat16 or float32 for this model"
        )


def _fp8_misfits(model: ModelConfig) -> list[str]:
    """The widths of a token and of an index key that fp8_ds_mla fixes and this model has not (spec 2.3, 2.5)."""
    expected = {"head_dim": 512, "qk_rope_head_dim": 64} | ({"index_head_dim": 128} if model.has(LayerKind.CSA) else {})
    found = {
        "head_dim": model.head_dim,
        "qk_rope_head_dim": model.rope_head_dim,
        "index_head_dim": model.index_head_dim,
    }
    return [f"{name} = {size} (the model has {found[name]})" for name, size in expected.items() if found[name] != size]


def _device(wanted: str, gpu_available: bool) -> str:
    if wanted == "auto":
        return "cuda" if gpu_available else "cpu"
    return "cpu" if wanted == "cpu" else "cuda"
