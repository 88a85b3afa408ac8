"""The float64 oracle itself: against transformers, layer by layer and as a whole, and against published constants."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dsv4dist.config.model import LayerKind, ModelConfig, RotaryConfig, parse_model_config
from tests.support import oracle
from tests.support import transformers_oracle as hf

KINDS = {LayerKind.SWA: hf.SLIDING, LayerKind.CSA: hf.CSA, LayerKind.HCA: hf.HCA}


def own_config(model: hf.DeepseekV4ForCausalLM) -> ModelConfig:
    return parse_model_config(model.config.to_dict())


def test_rotary_frequencies_match_the_published_values() -> None:
    yarn = RotaryConfig(theta=160000.0, factor=16.0, original_max_position=65536, beta_fast=32.0, beta_slow=1.0)
    freqs = oracle.rotary_frequencies(yarn, 64)
    expected = {
        0: 1.0,
        1: 0.687656022,
        15: 3.63553858e-3,
        16: 2.265625e-3,
        20: 2.96977778e-4,
        24: 1.953125e-5,
        25: 5.37231267e-6,
        31: 5.68052904e-7,
    }
    for i, value in expected.items():
        assert freqs[i] == pytest.approx(value, rel=1e-7), i
    plain = oracle.rotary_frequencies(RotaryConfig(theta=10000.0), 64)
    for i, value in {1: 0.749894209, 16: 0.01, 31: 1.33352143e-4}.items():
        assert plain[i] == pytest.approx(value, rel=1e-7), i


def test_rotation_turns_pairs_and_its_inverse_turns_back() -> None:
    x = np.arange(1.0, 9.0)
    freqs = np.array([0.5, 0.25])
    turned = oracle.rotate(x, 2, freqs)
    assert turned[:4].tolist() == x[:4].tolist()
    assert complex(turned[4], turned[5]) == pytest.approx(complex(5, 6) * np.exp(1j))
    assert complex(turned[6], turned[7]) == pytest.approx(complex(7, 8) * np.exp(0.5j))
    np.testing.assert_allclose(oracle.rotate(turned, 2, freqs, inverse=True), x, atol=1e-14)


def test_a_sink_only_widens_the_denominator() -> None:
    q, keys = np.array([[1.0, 0.0]]), np.array([[1.0, 2.0]])
    weight = math.e / (math.e + math.exp(0.25))
    np.testing.assert_allclose(oracle.attend(q, keys, np.array([0.25]), 1.0), weight * keys, rtol=1e-14)
    np.testing.assert_allclose(oracle.attend(q, keys, np.array([-math.inf]), 1.0), keys, rtol=1e-14)
    np.testing.assert_allclose(oracle.attend(q, keys, np.array([80.0]), 1.0), 0.0, atol=1e-30)


def test_equal_scores_go_to_the_lowest_index() -> None:
    assert oracle.first_largest(np.array([0.0, 1.0, 0.0, 1.0, -1.0]), 3).tolist() == [1, 3, 0]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.value)
def test_attention_layer_equals_transformers(kind: LayerKind) -> None:
    model = hf.random_model([KINDS[kind]], seed=11)
    config, params = own_config(model), hf.release_parameters(model)
    x = torch.randn(1, 300, config.hidden_size, generator=torch.Generator().manual_seed(5))
    seen = {}
    layer = model.model.layers[0]
    layer.self_attn.register_forward_hook(lambda _module, _args, result: seen.update(y=result[0][0]))
    layer.input_layernorm.register_forward_hook(lambda _module, _args, _result: x)
    hf.logits(model, list(range(100)) * 3)

    y = oracle.attention_layer(x[0].double().numpy(), oracle.below(params, "layers.0.attn."), config, kind)
    np.testing.assert_allclose(seen["y"].numpy(), y, atol=5e-5)
    assert np.std(y) > 0.1, "the layer must contribute"


@pytest.mark.parametrize(
    ("layer_types", "num_hash_layers", "length"),
    [
        ([hf.SLIDING], 1, 140),
        ([hf.CSA], 0, 140),
        ([hf.HCA], 0, 260),
        ([hf.SLIDING, hf.CSA, hf.HCA], 1, 260),
    ],
    ids=["swa", "csa", "hca", "mixed"],
)
def test_whole_model_equals_transformers(layer_types: list[str], num_hash_layers: int, length: int) -> None:
    model = hf.random_model(layer_types, seed=3, num_hash_layers=num_hash_layers)
    config, params = own_config(model), hf.release_parameters(model)
    token_ids = np.random.default_rng(1).integers(0, config.vocab_size, length).tolist()
    gaps = oracle.Gaps(length)
    ours = oracle.model_logits(token_ids, params, config, gaps)
    theirs = hf.logits(model, token_ids)
    assert 0.5 < np.std(ours) < 4.0
    assert np.min(gaps.smallest) > 1e-6, "choose another seed: a selection here is a toss-up in fp32"
    np.testing.assert_allclose(theirs, ours, atol=1e-3)


@pytest.mark.parametrize(
    ("layer_type", "num_hash_layers", "length", "only"),
    [(hf.CSA, 1, 21, ""), (hf.SLIDING, 0, 40, ".ffn."), (hf.HCA, 0, 129, ".compressor.")],
    ids=["csa and hash experts", "routed experts", "hca compressor"],
)
def test_every_parameter_matters_to_the_oracle(layer_type: str, num_hash_layers: int, length: int, only: str) -> None:
    """Changing any single parameter changes some logit, so no term can be missing unnoticed."""
    model = hf.random_model([layer_type], seed=4, num_hash_layers=num_hash_layers, index_topk=2)
    config, params = own_config(model), hf.release_parameters(model)
    token_ids = np.random.default_rng(2).integers(0, config.vocab_size, length).tolist()
    base = oracle.model_logits(token_ids, params, config)
    unused = []
    for name in params:
        changed = dict(params)
        if name.endswith("tid2eid"):
            changed[name] = (params[name] + 1) % config.n_routed_experts
        elif "indexer." in name or name.endswith("gate.bias"):  # only the order of scores matters
            changed[name] = np.flip(params[name]) * 1.7 - 0.3
        else:
            changed[name] = params[name] * 1.01 + 0.01
        if only in name and np.array_equal(oracle.model_logits(token_ids, changed, config), base):
            unused.append(name)
    assert not unused
