"""Say what a model needs of each rank's memory and how many requests fit, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dsv4dist.cli.options import OptionError
from dsv4dist.cli.output import JsonOption, complain
from dsv4dist.config.model import load_model_config
from dsv4dist.config.presets import RELEASE_NAMES, preset_config
from dsv4dist.config.resolve import check_fp8_cache
from dsv4dist.config.runtime import FP8_DS_MLA, EngineConfig
from dsv4dist.distributed.tp import check_tp_size
from dsv4dist.errors import ConfigError


def command(
    *,
    model: Annotated[str, typer.Option(help="Directory with config.json, flash or pro.", metavar="DIR|flash|pro")],
    tp: Annotated[int, typer.Option("--tp", "--tensor-parallel-size", help="Ranks that share the model.")] = 1,
    gpu: Annotated[str, typer.Option(help="GPU of each rank: mi300x, mi325x, mi350x, mi355x, h100, h200 or b200.")] = (
        "mi300x"
    ),
    context: Annotated[int, typer.Option(help="Tokens of one request.", min=1)] = 8192,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    kv_cache_dtype: Annotated[str, typer.Option(help="fp8_ds_mla, bfloat16 or float32.")] = "fp8_ds_mla",
    max_num_seqs: Annotated[int, typer.Option(help="Requests that run at once.", min=1)] = EngineConfig.max_num_seqs,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens of one step.", min=1)] = (
        EngineConfig.max_num_batched_tokens
    ),
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of each GPU's memory that may be used.")] = (
        EngineConfig.gpu_memory_utilization
    ),
    as_json: JsonOption = False,
) -> None:
    """Print rows of bytes and counts."""
    from dsv4dist.cache.groups import cache_groups
    from dsv4dist.cache.memory_plan import GPU_BYTES, MemoryOptions, plan_memory
    from dsv4dist.step.buffers import bucket_sizes, decode_widths, step_buffer_bytes

    _choice("--gpu", gpu, tuple(GPU_BYTES))
    _choice("--dtype", dtype, ("bfloat16", "float32"))
    _choice("--kv-cache-dtype", kv_cache_dtype, (FP8_DS_MLA, "bfloat16", "float32"))
    if not 0 < gpu_memory_utilization <= 1:
        raise OptionError(f"--gpu-memory-utilization is {gpu_memory_utilization}; expected above 0, at most 1")
    config = preset_config(model) if model in RELEASE_NAMES else load_model_config(Path(model))
    if kv_cache_dtype == FP8_DS_MLA:
        check_fp8_cache(config)
    if context > config.max_position_embeddings:
        raise OptionError(
            f"--context is {context}; the model's max_position_embeddings is {config.max_position_embeddings}"
        )
    try:
        check_tp_size(config, tp)
    except ConfigError as error:
        raise OptionError(f"--tp: {error}") from None
    options = MemoryOptions(
        gpu, dtype, kv_cache_dtype, context, max_num_seqs, max_num_batched_tokens, gpu_memory_utilization
    )
    rows = plan_memory(config, tp, options)
    widths = decode_widths(cache_groups(config, kv_cache_dtype), context, tokens_per_request=1)
    buckets = bucket_sizes(min(max_num_seqs, max_num_batched_tokens))
    buffer_bytes = step_buffer_bytes(buckets, max_num_seqs, widths)
    rows.insert(2, {"item": "step buffers", "bytes": buffer_bytes, "per": "rank"})
    for row in rows:
        print(json.dumps(row) if as_json else _readable(row))
    if not rows[-1]["count"]:
        complain("not one request fits; take more ranks (--tp), a larger --gpu or a shorter --context")


def _choice(flag: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise OptionError(f"{flag} is {value!r}; choose from {', '.join(choices)}")


def _readable(row: dict[str, Any]) -> str:
    count = f"{row['count']:>12,}" if "count" in row else " " * 12
    size = _bytes(row["bytes"]) if "bytes" in row else ""
    return f"{row['item']:<20} {count} {size:>12}  per {row['per']}"


def _bytes(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 1000 or unit == "TB":
            return f"{value:.4g} {unit}"
        value /= 1000
    raise AssertionError("the last unit holds everything")
