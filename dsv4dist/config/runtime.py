"""The options of one run, with the names that vLLM users know, and the limits derived from them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from dsv4dist.errors import ConfigError, one_error

DEFAULT_MAX_MODEL_LEN = 32768
FP8_DS_MLA = "fp8_ds_mla"
MAX_SPECULATIVE_TOKENS = 15
MAX_RUN_AHEAD = 64
MAX_TIMEOUT_S = 365.0 * 24 * 3600

CHOICES: dict[str, tuple[str, ...]] = {
    "device": ("auto", "cpu", "cuda", "rocm"),
    "dtype": ("auto", "bfloat16", "float32"),
    "kv_cache_dtype": ("auto", FP8_DS_MLA, "bfloat16", "float32"),
    "kernels": ("auto", "reference", "triton", "aiter"),
    "distributed_executor_backend": ("ray", "local"),
}


@dataclass(frozen=True)
class EngineConfig:
    """What a user chooses. `check()` refuses values that no model could use; resolving against a model comes later."""

    model: str | Path
    tensor_parallel_size: int = 1
    device: str = "auto"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    """Tokens of prompt and output together; None = the model's maximum, at most DEFAULT_MAX_MODEL_LEN."""
    max_num_seqs: int = 64
    """Requests that run at once."""
    max_num_batched_tokens: int = 2048
    """Tokens of one step."""
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    """Bytes per rank for all caches; None = what max_num_seqs requests of max_model_len need, at most what fits."""
    enable_prefix_caching: bool = True
    """Requests that begin like an earlier one reuse what was computed for it."""
    speculative_tokens: int = 0
    """Tokens that the checkpoint's draft layer proposes per step; outputs are the same with any number."""
    enforce_eager: bool = False
    run_ahead: int = 4
    """Decode steps that the ranks run per packet while no request joins or must end; with drafts it is 1."""
    kernels: str = "auto"
    address: str = "auto"
    """Ray: `auto` joins the cluster that RAY_ADDRESS names and else starts a private one, `local`, or HOST:PORT."""
    seed: int = 0
    """Seed of requests that bring none; the i-th such request of an engine uses seed + i, modulo 2^64."""
    distributed_executor_backend: str = "ray"
    """`ray`: one actor per rank. `local`: one rank inside the calling process."""
    trace: str | Path | None = None
    """Where to write what every step spent its time on, in Chrome's trace format."""
    poison_memory: bool = False
    """Fill caches and buffers with NaN and out-of-range values when they are allocated; a check that none is read."""
    placement_timeout_s: float = 60.0
    step_timeout_s: float = 300.0
    max_recoveries: int = 3
    """How often in a run lost ranks are started again; then what is unfinished ends with an error."""

    def check(self) -> None:
        """Refuse impossible values.  Raises: ConfigError naming each option, the value found and what is allowed."""
        problems = [
            f"{_flag(name)} is {getattr(self, name)!r}; choose from {', '.join(choices)}"
            for name, choices in CHOICES.items()
            if getattr(self, name) not in choices
        ]
        for name in ("tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                problems.append(f"{_flag(name)} is {getattr(self, name)}; expected at least 1")
        if not 0 <= self.speculative_tokens <= MAX_SPECULATIVE_TOKENS:
            problems.append(
                f"--speculative-tokens is {self.speculative_tokens}; expected 0 to {MAX_SPECULATIVE_TOKENS}"
            )
        if not 1 <= self.run_ahead <= MAX_RUN_AHEAD:
            problems.append(f"--run-ahead is {self.run_ahead}; expected 1 to {MAX_RUN_AHEAD}")
        if not 0 <= self.seed < 2**64:
            problems.append(f"--seed is {self.seed}; expected 0 to 2^64 - 1")
        if self.max_recoveries < 0:
            problems.append(f"--max-recoveries is {self.max_recoveries}; expected 0 or more")
        for name in ("max_model_len", "kv_cache_memory_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                problems.append(f"{_flag(name)} is {value}; expected at least 1")
        for name in ("placement_timeout_s", "step_timeout_s"):
            if not 0 < getattr(self, name) <= MAX_TIMEOUT_S:
                problems.append(f"{_flag(name)} is {getattr(self, name)}; expected seconds above 0, at most a year")
        if not 0 < self.gpu_memory_utilization <= 1:
            problems.append(f"--gpu-memory-utilization is {self.gpu_memory_utilization}; expected above 0, at most 1")
        if self.distributed_executor_backend == "local" and self.tensor_parallel_size != 1:
            problems.append("the local executor holds one rank; use the ray executor for more")
        if problems:
            raise one_error(ConfigError, "options", problems)


def _flag(name: str) -> str:
    assert name in {field.name for field in fields(EngineConfig)}, name
    return "--" + name.replace("_", "-")
