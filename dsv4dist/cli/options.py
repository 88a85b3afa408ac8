"""The options of a run, generated from EngineConfig, and the checks of them that need no engine."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from dsv4dist.config.model import ModelConfig, load_model_config
from dsv4dist.config.runtime import CHOICES, DEFAULT_MAX_MODEL_LEN, EngineConfig
from dsv4dist.distributed.tp import check_tp_size
from dsv4dist.errors import ConfigError

HELP: dict[str, str] = {
    "model": "Directory with config.json and *.safetensors.",
    "tensor_parallel_size": "Ranks that share the model; one GPU each, or one process each on CPUs.",
    "device": "Where the ranks compute.",
    "dtype": "Type of weights and activations; auto: bfloat16 on GPUs, float32 on CPUs.",
    "kv_cache_dtype": "Type of the caches; auto: fp8_ds_mla on GPUs, as --dtype on CPUs.",
    "max_model_len": f"Tokens of prompt and output at most (default: the model's, at most {DEFAULT_MAX_MODEL_LEN}).",
    "max_num_seqs": "Requests that run at once.",
    "max_num_batched_tokens": "Tokens of one step; longer prompts are split.",
    "gpu_memory_utilization": "Share of each GPU's memory that may be used.",
    "kv_cache_memory_bytes": "Bytes of cache per rank (default: what the requests need, at most what fits).",
    "enable_prefix_caching": "Reuse what was computed for an earlier request that begins alike.",
    "speculative_tokens": "Tokens that the checkpoint's draft layer proposes per step; outputs stay the same.",
    "enforce_eager": "Run decode steps without captured graphs.",
    "run_ahead": "Decode steps that the ranks run per message while no request joins or must end.",
    "kernels": "Implementation of the operations; `dsv4dist info` shows what auto takes.",
    "address": "Ray cluster: auto joins the one of RAY_ADDRESS or else starts a private one; local; HOST:PORT.",
    "seed": "Seed of requests that bring none; the i-th of them uses SEED + i.",
    "distributed_executor_backend": "ray: one actor per rank; local: one rank in this process.",
    "trace": "Write where each step's time goes to this file, in Chrome's trace format.",
    "placement_timeout_s": "Seconds to wait for the cluster to place the ranks.",
    "step_timeout_s": "Seconds after which a step that has not ended counts as stuck.",
    "max_recoveries": "How often in a run lost ranks are started again before unfinished requests end with an error.",
}
"""Help of each option. A field of EngineConfig without an entry is for Python only."""

NAMES: dict[str, tuple[str, ...]] = {"tensor_parallel_size": ("--tp", "--tensor-parallel-size")}
"""Options that have more than the name of their field."""


class OptionError(ConfigError):
    """An option that cannot be used as given: wrong usage, so the exit code is 2."""


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a command's parameter `config: EngineConfig` by one option per field that HELP describes."""
    types = get_type_hints(EngineConfig)
    options = [
        _option(field.name, types[field.name], field.default) for field in fields(EngineConfig) if field.name in HELP
    ]
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "config"]

    @functools.wraps(command)
    def with_config(**values: Any) -> Any:
        chosen = {option.name: values.pop(option.name) for option in options}
        return command(config=EngineConfig(**chosen), **values)

    with_config.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (*own, *options)]
    )
    return with_config


def _option(name: str, kind: Any, default: Any) -> inspect.Parameter:
    """One option as a parameter of the kind that typer reads."""
    own = "--" + name.replace("_", "-")
    flags = NAMES.get(name, (f"{own}/--no-{own[2:]}" if default is True else own,))
    if name == "model":
        kind = str  # messages then show what was typed
    if name == "trace":
        kind = Path | None
    metavar = "|".join(CHOICES[name]) if name in CHOICES else "DIR" if name == "model" else None
    info = typer.Option(*flags, help=HELP[name], metavar=metavar)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is MISSING else default,
        annotation=Annotated[kind, info],
    )


def check_options(config: EngineConfig) -> ModelConfig:
    """Refuse what can be refused before anything is started, and read the model's config.json.

    Raises: OptionError for values that no model, or not this one, allows; ConfigError for the directory's contents."""
    try:
        config.check()
    except ConfigError as error:
        raise OptionError(str(error)) from None
    model = load_model_config(Path(config.model))
    try:
        check_tp_size(model, config.tensor_parallel_size)
    except ConfigError as error:
        raise OptionError(f"--tp: {error}") from None
    return model
