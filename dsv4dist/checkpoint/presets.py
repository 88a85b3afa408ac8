"""Sizes of the random checkpoints, and their config.json in both spellings (checkpoint spec 1 and 4)."""

from __future__ import annotations

from typing import Any

_LAYER_TYPES = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}

_YARN = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 256, "beta_fast": 32, "beta_slow": 1}

# Widths are no multiples of 128, and their shares at 2 and 4 ranks neither, so that quantised checkpoints have ragged
# scale blocks and shards that begin inside one. swiglu_limit is low enough to clip some activations.
_TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 160,
    "compress_ratios": [0, 4, 128, 4],
    "num_attention_heads": 8,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 96,
    "o_lora_rank": 48,
    "o_groups": 4,
    "sliding_window": 32,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 16,
    "num_hash_layers": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 2.0,
    "max_position_embeddings": 4096,
    "rope_scaling": _YARN,
}

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _TINY,
    "tiny-swa": _TINY | {"compress_ratios": [0, 0]},
    "tiny-csa": _TINY | {"compress_ratios": [4, 4]},
    "tiny-hca": _TINY | {"compress_ratios": [128, 128]},
    "flash-layer": _TINY
    | {
        "vocab_size": 1024,
        "hidden_size": 512,
        "compress_ratios": [0, 4, 128],
        "num_attention_heads": 16,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 256,
        "o_lora_rank": 256,
        "o_groups": 2,
        "sliding_window": 128,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "moe_intermediate_size": 256,
        "swiglu_limit": 10.0,
        "max_position_embeddings": 16384,
        "rope_scaling": _YARN | {"original_max_position_embeddings": 1024},
    },
}
"""What each preset sets, by release names; `compress_ratios` has one entry per layer here."""

_COMMON: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "num_key_value_heads": 1,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "scoring_func": "sqrtsoftplus",
    "hidden_act": "silu",
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
}

_QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}


def release_config(sizes: dict[str, Any], quant: bool) -> dict[str, Any]:
    """config.json as the releases write it: `compress_ratios` carries one more entry, of the draft layer."""
    config = _COMMON | {"topk_method": "noaux_tc", "torch_dtype": "bfloat16"} | sizes
    ratios = list(sizes["compress_ratios"])
    config |= {"num_hidden_layers": len(ratios), "compress_ratios": [*ratios, 0]}
    if quant:
        config |= {"expert_dtype": "fp4", "quantization_config": dict(_QUANTIZATION)}
    return config


def transformers_config(sizes: dict[str, Any]) -> dict[str, Any]:
    """config.json as transformers writes it: layer types, compression rates and nested rotary parameters."""
    moved = ("compress_ratios", "num_hash_layers", "qk_rope_head_dim", "rope_scaling")
    config = _COMMON | {"dtype": "bfloat16"} | {key: value for key, value in sizes.items() if key not in moved}
    ratios, hashed = sizes["compress_ratios"], sizes["num_hash_layers"]
    partial = sizes["qk_rope_head_dim"] / sizes["head_dim"]
    scaling = dict(sizes["rope_scaling"] or {"type": "default"})
    main = {"rope_type": "default", "rope_theta": config["rope_theta"], "partial_rotary_factor": partial}
    compress = {
        "rope_type": scaling.pop("type"),
        **scaling,
        "rope_theta": config["compress_rope_theta"],
        "partial_rotary_factor": partial,
    }
    if compress["rope_type"] == "yarn":
        compress["attention_factor"] = 1.0
    config |= {
        "num_hidden_layers": len(ratios),
        "layer_types": [_LAYER_TYPES[ratio] for ratio in ratios],
        "mlp_layer_types": ["hash_moe" if layer < hashed else "moe" for layer in range(len(ratios))],
        "compress_rates": {_LAYER_TYPES[ratio]: ratio for ratio in (4, 128)},
        "partial_rotary_factor": partial,
        "rope_parameters": {"main": main, "compress": compress},
    }
    return config
