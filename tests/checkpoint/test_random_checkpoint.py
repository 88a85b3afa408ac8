"""Random checkpoints: nothing in them is trivial, the same seed gives the same bytes, and no other file is harmed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from dsv4dist.checkpoint.index import INDEX_FILE, open_index
from dsv4dist.checkpoint.load import check_checkpoint, load_parameters
from dsv4dist.checkpoint.presets import PRESETS
from dsv4dist.checkpoint.random_checkpoint import dequantise_checkpoint, make_checkpoint
from dsv4dist.config.model import LayerKind, load_model_config
from dsv4dist.distributed.tp import TpInfo, allowed_tp_sizes
from dsv4dist.errors import CheckpointError, ConfigError
from tests.checkpoint.rewrite import read_all

Checkpoint = Callable[..., Path]


SMALL = [preset for preset in PRESETS if preset.startswith("tiny")]
FORMS: list[dict[str, Any]] = [{}, {"quant": True}, {"format": "transformers"}]


@pytest.mark.parametrize(
    ("preset", "options"), [*((preset, form) for preset in SMALL for form in FORMS), ("flash-layer", {})]
)
def test_every_preset_is_complete(checkpoint: Checkpoint, preset: str, options: dict[str, Any]) -> None:
    directory = checkpoint(preset, **options)
    config = load_model_config(directory)
    summary = check_checkpoint(directory, config)
    assert summary.unknown_names == ()
    assert summary.num_bytes < 200e6
    assert {1, 2} <= set(allowed_tp_sizes(config))
    assert (config.bos_token_id, config.eos_token_ids) == (0, (1,))


def test_what_the_presets_cover(checkpoint: Checkpoint) -> None:
    config = load_model_config(checkpoint("tiny"))
    assert all(config.has(kind) for kind in LayerKind)
    assert 0 < config.num_hash_layers < config.num_hidden_layers
    assert {1, 2, 4} <= set(allowed_tp_sizes(config))
    assert config.index_n_heads >= 16
    for kind in ("swa", "csa", "hca"):
        only = load_model_config(checkpoint(f"tiny-{kind}"))
        assert set(only.layer_kinds) == {LayerKind(kind)}
    real = load_model_config(checkpoint("flash-layer"))
    assert (real.head_dim, real.rope_head_dim, real.index_n_heads, real.index_head_dim) == (512, 64, 64, 128)


def test_release_config_has_the_draft_layer_entry(checkpoint: Checkpoint) -> None:
    raw = json.loads((checkpoint("tiny", quant=True) / "config.json").read_text())
    assert len(raw["compress_ratios"]) == raw["num_hidden_layers"] + 1
    assert raw["compress_ratios"][-1] == 0
    assert raw["expert_dtype"] == "fp4"
    assert raw["quantization_config"]["weight_block_size"] == [128, 128]
    assert "layer_types" not in raw


def test_both_formats_hold_the_same_model(checkpoint: Checkpoint) -> None:
    loaded = []
    for format in ("release", "transformers"):
        directory = checkpoint("tiny", format=format)
        config = load_model_config(directory)
        loaded.append((config, load_parameters(directory, config, TpInfo(), torch.float32, torch.device("cpu"))))
    (first, one), (second, other) = loaded
    assert first == second
    assert one.tensors.keys() == other.tensors.keys()
    assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)


def test_no_parameter_is_trivial(checkpoint: Checkpoint) -> None:
    directory = checkpoint("tiny")
    config = load_model_config(directory)
    for name, tensor in read_all(directory).items():
        values = tensor.double()
        if name.endswith("tid2eid"):
            assert all(len(set(row)) == config.num_experts_per_tok for row in tensor.tolist())
            assert set(tensor.flatten().tolist()) == set(range(config.n_routed_experts))
            continue
        assert values.isfinite().all()
        assert len(values.unique()) > values.numel() * 0.01 + 0.5, name
        if values.numel() > 1:
            assert values.std() > 0.01, name
        if name.endswith("norm.weight"):
            assert 0.8 < values.mean() < 1.2


def test_scale_blocks_differ(checkpoint: Checkpoint) -> None:
    tensors = read_all(checkpoint("tiny", quant=True))
    assert tensors["layers.0.attn.wq_a.weight"].dtype == torch.float8_e4m3fn
    assert tensors["layers.0.attn.wq_a.scale"].dtype == torch.float8_e8m0fnu
    assert tensors["layers.0.ffn.experts.0.w1.weight"].dtype == torch.int8
    assert tensors["embed.weight"].dtype == torch.bfloat16
    scales = {name: tensor.view(torch.uint8) for name, tensor in tensors.items() if name.endswith(".scale")}
    several = [scale for scale in scales.values() if scale.numel() > 1]
    assert sum(len(scale.unique()) > 1 for scale in several) > 0.8 * len(several)


def test_the_seed_decides(tmp_path: Path) -> None:
    first, again, other = (
        read_all(make_checkpoint(tmp_path / name, "tiny-swa", seed=seed))
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_overrides(tmp_path: Path) -> None:
    sizes = {"compress_ratios": [4, 128, 0], "index_topk": 5, "rope_scaling": None, "n_routed_experts": 4}
    for format in ("release", "transformers"):
        directory = make_checkpoint(tmp_path / format, "tiny", format=format, overrides=sizes)
        config = load_model_config(directory)
        assert config.layer_kinds == (LayerKind.CSA, LayerKind.HCA, LayerKind.SWA)
        assert (config.index_topk, config.n_routed_experts, config.compress_rope.factor) == (5, 4, None)
        check_checkpoint(directory, config)


def test_bad_arguments_are_told_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        make_checkpoint(tmp_path / "x", "huge", seed=-1, format="gguf", overrides={"hidden": 3})
    for part in ("preset is 'huge'", "tiny-csa", "format is 'gguf'", "seed is -1", "override hidden", "hidden_size"):
        assert part in str(caught.value)
    with pytest.raises(ConfigError, match="format 'release'"):
        make_checkpoint(tmp_path / "x", format="transformers", quant=True)
    with pytest.raises(ConfigError, match="multiples of 32, not hidden_size = 72"):
        make_checkpoint(tmp_path / "x", quant=True, overrides={"hidden_size": 72})
    with pytest.raises(ConfigError, match="not a multiple of o_groups"):
        make_checkpoint(tmp_path / "x", overrides={"o_groups": 3})
    assert not (tmp_path / "x").exists()


def test_a_directory_of_someone_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"thesis\.tex"):
        make_checkpoint(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written to"):
        make_checkpoint(tmp_path / "file")


def test_our_own_directory_is_replaced_but_not_what_was_added(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "tiny-swa", max_shard_bytes=500_000)
    assert (tmp_path / INDEX_FILE).is_file()
    (tmp_path / "00007.partial").write_bytes(b"left by an interrupted run")
    make_checkpoint(tmp_path, "tiny-hca", seed=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "model.safetensors",
        "random_checkpoint.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    check_checkpoint(tmp_path, load_model_config(tmp_path))
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"notes\.txt"):
        make_checkpoint(tmp_path)
    check_checkpoint(tmp_path, load_model_config(tmp_path))


def test_dequantising_into_itself_is_refused(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "tiny-swa", quant=True)
    with pytest.raises(CheckpointError, match="own directory"):
        dequantise_checkpoint(directory, directory)
    open_index(directory)


def test_dequantised_is_fp32_with_a_plain_config(checkpoint: Checkpoint, tmp_path: Path) -> None:
    plain = dequantise_checkpoint(checkpoint("tiny-swa", quant=True), tmp_path / "plain")
    assert {tensor.dtype for tensor in read_all(plain).values()} == {torch.float32, torch.int64}
    raw = json.loads((plain / "config.json").read_text())
    assert "quantization_config" not in raw
    assert (plain / "tokenizer.json").is_file()


def test_tokenizer_round_trips_any_text(checkpoint: Checkpoint) -> None:
    directory = checkpoint("tiny")
    config = load_model_config(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == config.vocab_size
    assert tokenizer.token_to_id("<bos>") == config.bos_token_id
    assert (tokenizer.token_to_id("<eos>"),) == config.eos_token_ids
    for text in ("the weather is nice", "  Grüße, 世界 \U0001f600\n", ""):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode("there").ids) < 5
    assert all(tokenizer.id_to_token(token) for token in range(config.vocab_size))


def test_a_vocabulary_too_small_for_bytes_has_no_tokenizer(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "tiny-swa", overrides={"vocab_size": 64})
    assert not (tmp_path / "tokenizer.json").exists()
