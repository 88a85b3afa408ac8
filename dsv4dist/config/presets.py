"""The configurations of the released models, for planning and measuring without their files (checkpoint spec 1)."""

from __future__ import annotations

from typing import Any

from dsv4dist.config.model import ModelConfig, parse_model_config

_COMMON: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "vocab_size": 129280,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "num_hash_layers": 3,
    "num_experts_per_tok": 6,
    "max_position_embeddings": 1048576,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
    "bos_token_id": 0,
    "eos_token_id": 1,
}

_RELEASES: dict[str, dict[str, Any]] = {
    "flash": {
        "hidden_size": 4096,
        "num_hidden_layers": 43,
        "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0],
        "num_attention_heads": 64,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "index_topk": 512,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "routed_scaling_factor": 1.5,
    },
    "pro": {
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "compress_ratios": [128, 128] + [4, 128] * 29 + [4, 0],
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "o_groups": 16,
        "index_topk": 1024,
        "moe_intermediate_size": 3072,
        "n_routed_experts": 384,
        "routed_scaling_factor": 2.5,
    },
}

RELEASE_NAMES = tuple(_RELEASES)


def preset_config(name: str) -> ModelConfig:
    """The configuration of DeepSeek-V4-Flash (`flash`) or DeepSeek-V4-Pro (`pro`)."""
    return parse_model_config(_COMMON | _RELEASES[name], where=name)
