"""Names: every parameter is found under all its spellings, and nothing else is taken for one."""

from __future__ import annotations

import pytest

from dsv4dist.checkpoint.names import (
    is_draft_name,
    other_names,
    release_name,
    release_scale_name,
    save_pretrained_name,
    stacked_name,
)
from dsv4dist.checkpoint.parameters import model_parameters
from dsv4dist.checkpoint.presets import PRESETS, release_config
from dsv4dist.config.model import parse_model_config

NAMES = [p.name for p in model_parameters(parse_model_config(release_config(PRESETS["tiny"], quant=False)))]


def test_every_spelling_leads_back() -> None:
    for name in NAMES:
        for spelling in (name, save_pretrained_name(name), *other_names(name)):
            assert release_name(spelling) == name
            assert release_name(spelling.removeprefix("model.")) == name


def test_spellings_do_not_collide() -> None:
    spellings = [other for name in NAMES for other in {name, *other_names(name)}]
    assert len(set(spellings)) == len(spellings)


@pytest.mark.parametrize(
    ("stored", "release"),
    [
        ("model.embed_tokens.weight", "embed.weight"),
        ("lm_head.weight", "head.weight"),
        ("model.hc_head.hc_scale", "hc_head_scale"),
        ("model.layers.11.attn.norm.weight", "layers.11.attn.kv_norm.weight"),
        ("model.layers.3.self_attn.compressor.kv_norm.weight", "layers.3.attn.compressor.norm.weight"),
        (
            "model.layers.3.self_attn.compressor.indexer.kv_norm.weight",
            "layers.3.attn.indexer.compressor.norm.weight",
        ),
        ("model.layers.0.mlp.experts.17.up_proj.weight", "layers.0.ffn.experts.17.w3.weight"),
        ("model.layers.0.mlp.experts.gate_up_proj", "layers.0.ffn.experts.gate_up_proj"),
        ("model.layers.0.attn_hc.scale", "layers.0.hc_attn_scale"),
    ],
)
def test_known_spellings(stored: str, release: str) -> None:
    assert release_name(stored) == release


@pytest.mark.parametrize(
    "name",
    ["layers.0.attn.wq_c.weight", "layers.x.attn.wq_a.weight", "embed", "model.rotary_emb.inv_freq", "", "model."],
)
def test_unknown_names(name: str) -> None:
    assert release_name(name) is None
    assert release_scale_name(name) is None


@pytest.mark.parametrize("suffix", ["scale", "weight_scale_inv", "weight_scale"])
def test_scales_belong_to_their_weight(suffix: str) -> None:
    assert release_scale_name(f"layers.4.attn.wq_a.{suffix}") == "layers.4.attn.wq_a.weight"
    assert release_scale_name(f"model.layers.4.self_attn.q_a_proj.{suffix}") == "layers.4.attn.wq_a.weight"
    assert release_scale_name(f"layers.4.ffn.experts.5.w2.{suffix}") == "layers.4.ffn.experts.5.w2.weight"


def test_parameters_that_end_like_scales_are_none() -> None:
    for name in NAMES:
        assert release_scale_name(name) is None


def test_draft_names() -> None:
    assert is_draft_name("mtp.0.attn.wq_a.weight")
    assert is_draft_name("model.mtp.1.enorm.weight")
    assert not is_draft_name("layers.0.attn.wq_a.weight")


def test_stacked_names() -> None:
    place = stacked_name("layers.2.ffn.experts.5.w2.weight")
    assert place is not None
    assert (place.key, place.expert) == ("layers.2.ffn.experts.w2.weight", 5)
    assert stacked_name("layers.2.ffn.shared_experts.w2.weight") is None
