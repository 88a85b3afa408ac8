"""The tiny model that runs end to end: its checkpoint, its prompt, and the tokens that it must give everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dsv4dist.config.runtime import EngineConfig
from dsv4dist.engine.engine import Engine
from dsv4dist.engine.request import SamplingParams
from dsv4dist.workers.executor import RankInfo

NEW_TOKENS = 2
"""A prompt's step and one decode step."""
LIMITS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 2, "max_num_batched_tokens": 256}
TP_SIZES = (1, 2, 4, 8, 16)
"""What the checkpoints below divide by."""

_SHARED = {"num_attention_heads": 16, "o_groups": 16}
# On GPUs the widths of the releases, which are those that kernels know, and fp8 weights; all three kinds of layers.
RECIPES: dict[str, dict[str, Any]] = {
    "cpu": {"preset": "tiny", "overrides": _SHARED},
    "cuda": {
        "preset": "flash-layer",
        "quant": True,
        "overrides": _SHARED
        | {
            "vocab_size": 512,
            "hidden_size": 256,
            "q_lora_rank": 128,
            "o_lora_rank": 128,
            "index_n_heads": 16,
            "index_topk": 16,
            "n_routed_experts": 4,
            "moe_intermediate_size": 512,
        },
    },
}
PROMPT_TOKENS = 140
"""Beyond the window, and one entry of the heaviest compression."""
# The first choice leads by more than 1 at both steps: rounding to bf16 and fp8 caches cannot change it.
_PROMPT_SEED = {"cpu": 13, "cuda": 2}


def prompt(kind: str) -> list[int]:
    """The prompt for devices of a kind, `cpu` or `cuda`."""
    drawn: list[int] = np.random.default_rng(_PROMPT_SEED[kind]).integers(2, 512, PROMPT_TOKENS).tolist()
    return drawn


def generate(
    model: Path, kind: str, tp_size: int, address: str, timeout_s: float
) -> tuple[list[int], list[RankInfo], str]:
    """The new tokens over `tp_size` ranks, where these ran, and what went wrong with the request, if anything did."""
    options = EngineConfig(
        model,
        tp_size,
        device=kind,
        address=address,
        placement_timeout_s=timeout_s,
        step_timeout_s=timeout_s,
        max_recoveries=0,
        **LIMITS,
    )
    return _run(options, kind)


def expected_tokens(model: Path, kind: str) -> list[int]:
    """The same by the references, in fp32 and in this process."""
    options = EngineConfig(
        model, device="cpu", dtype="float32", kernels="reference", distributed_executor_backend="local", **LIMITS
    )
    return _run(options, kind)[0]


def _run(options: EngineConfig, kind: str) -> tuple[list[int], list[RankInfo], str]:
    with Engine(options) as engine:
        (output,) = engine.generate([prompt(kind)], SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
        return output.token_ids, engine.report.ranks, output.error or ""
