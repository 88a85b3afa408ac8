"""config.json in both spellings, and what is refused."""

from __future__ import annotations

import json

import pytest

from dsv4dist.config.model import LayerKind, load_model_config, parse_model_config
from dsv4dist.errors import ConfigError

FLASH = {
    "model_type": "deepseek_v4",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "compress_ratios": [0, 0] + [4, 128] * 20 + [4] + [0],
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "index_topk": 512,
    "num_hash_layers": 3,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 1.5,
    "max_position_embeddings": 1048576,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
    "eos_token_id": 1,
}
PRO = FLASH | {
    "num_hidden_layers": 61,
    "compress_ratios": [128, 128] + [4, 128] * 29 + [4] + [0],
    "num_attention_heads": 128,
    "o_groups": 16,
    "hidden_size": 7168,
    "moe_intermediate_size": 3072,
    "n_routed_experts": 384,
}


def test_flash_layers_are_read_from_the_ratios() -> None:
    config = parse_model_config(FLASH)
    kinds = config.layer_kinds
    assert [kinds.count(kind) for kind in (LayerKind.SWA, LayerKind.CSA, LayerKind.HCA)] == [2, 21, 20]
    assert config.compress_rope.theta == 160000
    assert config.compress_rope.factor == 16
    assert config.main_rope.factor is None
    assert config.group_input_size == 4096
    assert config.eos_token_ids == (1,)


def test_pro_has_no_sliding_only_layer() -> None:
    assert not parse_model_config(PRO).has(LayerKind.SWA)


def test_both_spellings_mean_the_same() -> None:
    names = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    moved = ("compress_ratios", "num_hash_layers", "qk_rope_head_dim", "rope_scaling")
    other = {key: value for key, value in FLASH.items() if key not in moved} | {
        "layer_types": [names[ratio] for ratio in FLASH["compress_ratios"][:43]],
        "compress_rates": {names[4]: 4, names[128]: 128},
        "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 40,
        "partial_rotary_factor": 0.125,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 10000.0},
            "compress": {
                "rope_type": "yarn",
                "rope_theta": 160000.0,
                "factor": 16,
                "original_max_position_embeddings": 65536,
                "attention_factor": 1.0,
            },
        },
    }
    assert parse_model_config(other) == parse_model_config(FLASH)


def test_ratio_one_is_ratio_zero() -> None:
    ratios = [1 if ratio == 0 else ratio for ratio in FLASH["compress_ratios"]]
    assert parse_model_config(FLASH | {"compress_ratios": ratios}) == parse_model_config(FLASH)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "llama"}, ["model_type", "llama"]),
        ({"compress_ratios": [0] * 42}, ["42 entries", "43"]),
        ({"compress_ratios": [0, 64] + [4] * 42}, ["layer 1", "64"]),
        ({"hidden_size": "x"}, ["hidden_size", "'x'"]),
        ({"num_attention_heads": 60}, ["num_attention_heads = 60", "o_groups = 8"]),
        ({"scoring_func": "sigmoid"}, ["scoring_func", "sigmoid"]),
        ({"rope_scaling": {"type": "linear"}}, ["linear"]),
        ({"num_experts_per_tok": 300}, ["num_experts_per_tok"]),
        ({"rope_theta": "abc"}, ["rope_theta is 'abc'", "a number above 1"]),
        ({"rope_theta": None}, ["rope_theta is None"]),
        ({"rope_theta": 1}, ["rope_theta is 1;"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps is 0;", "above 0"]),
        ({"swiglu_limit": float("nan")}, ["swiglu_limit is nan"]),
        ({"routed_scaling_factor": 10**400}, ["routed_scaling_factor is 1000"]),
        ({"compress_rope_theta": float("inf")}, ["compress_rope_theta is inf"]),
        ({"rope_scaling": {"type": "yarn", "factor": 0}}, ["rope_scaling.factor is 0"]),
        ({"rope_scaling": {"type": "yarn", "beta_fast": 0}}, ["rope_scaling.beta_fast is 0"]),
        ({"rope_scaling": "yarn"}, ["rope_scaling is 'yarn'", "an object"]),
        ({"rope_parameters": {"main": 3}}, ["rope_parameters.main is 3"]),
        (
            {"rope_parameters": {"main": {"rope_theta": "x"}, "compress": {"rope_theta": [], "rope_type": "default"}}},
            ["rope_parameters.main.rope_theta is 'x'", "rope_parameters.compress.rope_theta is []"],
        ),
        ({"qk_rope_head_dim": None, "partial_rotary_factor": -0.125}, ["qk_rope_head_dim is None"]),
        ({"bos_token_id": "<s>"}, ["bos_token_id is '<s>'"]),
    ],
)
def test_what_cannot_be_used_is_named(change: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_model_config(FLASH | change)
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)


def test_layer_names_and_rotary_shares_of_the_wrong_kind() -> None:
    saved = {key: value for key, value in FLASH.items() if key not in ("compress_ratios", "qk_rope_head_dim")}
    saved |= {"layer_types": [["sliding_attention"]] * 43, "compress_rates": [4]}
    with pytest.raises(ConfigError, match="compress_rates is \\[4\\]; expected an object"):
        parse_model_config(saved)
    for share in (-0.125, 0, 1e-9, 2):
        with pytest.raises(ConfigError, match=r"partial_rotary_factor is|rotary width"):
            parse_model_config(saved | {"compress_rates": {}, "partial_rotary_factor": share})


def test_all_problems_are_told_at_once() -> None:
    broken = {key: value for key, value in FLASH.items() if key not in ("hidden_size", "q_lora_rank")}
    with pytest.raises(ConfigError, match=r"hidden_size is missing.*q_lora_rank is missing"):
        parse_model_config(broken)


def test_directories_without_a_usable_file(tmp_path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        load_model_config(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not readable as JSON"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="nested too deeply"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ConfigError, match="holds list"):
        load_model_config(tmp_path)
