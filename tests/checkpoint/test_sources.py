"""What a checkpoint lacks, has too much of or has wrongly is told by name, all at once, without reading data."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dsv4dist.checkpoint.sources import check_checkpoint
from dsv4dist.config.model import load_model_config
from dsv4dist.errors import CheckpointError
from tests.checkpoint.rewrite import Tensors, rewrite

Checkpoint = Callable[..., Path]


def refused(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        check_checkpoint(directory, load_model_config(directory))
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_whole_checkpoint(checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    directory = checkpoint("tiny")
    summary = check_checkpoint(directory, load_model_config(directory))
    assert summary.num_files == 1
    assert summary.skipped_draft_tensors == 53
    assert len(summary.sources) + 53 == summary.num_tensors
    assert summary.unknown_names == ()
    assert not caplog.records


def test_all_problems_in_one_message(checkpoint: Checkpoint, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        del tensors["layers.1.attn.wq_a.weight"]
        del tensors["norm.weight"]
        tensors["layers.0.attn.wkv.weight"] = torch.zeros(3, 5)
        tensors["layers.0.ffn_norm.weight"] = torch.zeros(160, dtype=torch.int32)
        tensors["layers.9.attn.wkv.weight"] = torch.zeros(64, 160)
        tensors["layers.0.attn.compressor.ape"] = torch.zeros(4, 128)
        tensors["model.embed_tokens.weight"] = torch.zeros(512, 160)

    text = refused(rewrite(checkpoint("tiny"), tmp_path, change))
    for part in (
        "missing tensors (2): ",
        "layers.1.attn.wq_a.weight (also looked for model.layers.1.attn.wq_a.weight, "
        "model.layers.1.self_attn.q_a_proj.weight)",
        "norm.weight (also looked for model.norm.weight)",
        "layers.0.attn.wkv.weight is [3, 5], expected [64, 160]",
        "layers.0.ffn_norm.weight is I32, expected F32 or BF16 or F16",
        "tensors that this config.json has no place for (2): ",
        "layers.9.attn.wkv.weight",
        "layers.0.attn.compressor.ape",
        "tensors stored under two names (1): embed.weight and model.embed_tokens.weight",
    ):
        assert part in text, part


def test_drafts_of_a_checkpoint_without_a_draft_layer(checkpoint: Checkpoint) -> None:
    directory = checkpoint("tiny", format="transformers")
    with pytest.raises(CheckpointError, match=r"no draft layer \(mtp\.0\); leave --speculative-tokens out"):
        check_checkpoint(directory, load_model_config(directory), num_draft_layers=1)


def test_long_lists_are_cut(checkpoint: Checkpoint, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> Tensors:
        return {name: tensor for name, tensor in tensors.items() if ".experts." not in name}

    text = refused(rewrite(checkpoint("tiny"), tmp_path, change))
    assert "missing tensors (96): " in text
    assert "and 86 more" in text


def test_unknown_tensors_are_told_once_and_not_refused(
    checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def change(tensors: Tensors) -> None:
        tensors["value_head.weight"] = torch.zeros(4)
        tensors["layers.0.attn.wq_a.scale"] = torch.ones(1, 2)  # left over beside a bf16 weight

    directory = rewrite(checkpoint("tiny"), tmp_path, change)
    with caplog.at_level(logging.WARNING):
        summary = check_checkpoint(directory, load_model_config(directory))
    assert summary.unknown_names == ("layers.0.attn.wq_a.scale", "value_head.weight")
    assert len(caplog.records) == 1
    assert "value_head.weight" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int32, torch.float8_e4m3fn])
def test_a_sink_is_fp32_or_bf16(checkpoint: Checkpoint, tmp_path: Path, dtype: torch.dtype) -> None:
    def change(tensors: Tensors) -> None:
        tensors["layers.1.attn.attn_sink"] = torch.zeros(8).to(dtype)

    text = refused(rewrite(checkpoint("tiny"), tmp_path, change))
    assert "layers.1.attn.attn_sink is" in text
    assert "expected F32 or BF16" in text


def test_fp8_without_a_scale(checkpoint: Checkpoint, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        del tensors["layers.0.attn.wq_a.scale"]
        del tensors["layers.0.ffn.experts.3.w2.scale"]

    text = refused(rewrite(checkpoint("tiny", quant=True), tmp_path, change))
    assert "quantised tensors without their scale (2): " in text
    assert (
        "layers.0.attn.wq_a.weight (F8_E4M3, needs layers.0.attn.wq_a.scale or "
        "layers.0.attn.wq_a.weight_scale_inv or layers.0.attn.wq_a.weight_scale)" in text
    )
    assert "layers.0.ffn.experts.3.w2.weight (I8" in text


def test_wrong_scales_and_encodings(checkpoint: Checkpoint, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["layers.0.attn.wq_a.scale"] = torch.ones(2, 1)
        tensors["layers.0.attn.wkv.scale"] = torch.ones(1, 2, dtype=torch.float16)
        tensors["layers.0.attn.wo_a.weight"] = torch.zeros(192, 128, dtype=torch.int8)
        tensors["layers.0.attn.wo_b.weight"] = torch.zeros(160, 192).to(torch.float8_e4m3fnuz)
        tensors["layers.0.ffn.experts.0.w1.weight"] = torch.zeros(96, 160, dtype=torch.int8)

    text = refused(rewrite(checkpoint("tiny", quant=True), tmp_path, change))
    for part in (
        "layers.0.attn.wq_a.scale is [2, 1], expected [1, 2]",
        "layers.0.attn.wkv.scale is F16, expected F8_E8M0 or U8 or F32",
        "layers.0.attn.wo_a.weight is I8",
        "layers.0.attn.wo_b.weight is F8_E4M3FNUZ, expected F32 or BF16 or F16 or F8_E4M3 with a scale",
        "layers.0.ffn.experts.0.w1.weight is [96, 160], expected [96, 80]",
    ):
        assert part in text, part


def test_wrong_fused_experts(checkpoint: Checkpoint, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> Tensors:
        kept = {name: tensor for name, tensor in tensors.items() if "layers.1.ffn.experts." not in name}
        kept["model.layers.1.mlp.experts.gate_up_proj"] = torch.zeros(8, 96, 160)
        kept["model.layers.1.mlp.experts.down_proj"] = torch.zeros(8, 160, 96)
        return kept

    text = refused(rewrite(checkpoint("tiny"), tmp_path, change))
    assert "tensors of a wrong shape (1): " in text
    assert "model.layers.1.mlp.experts.gate_up_proj is [8, 96, 160], expected [8, 192, 160]" in text
    assert "missing" not in text


def test_damaged_file_is_found_without_reading_weights(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory = rewrite(checkpoint("tiny"), tmp_path, lambda tensors: None)
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "model.safetensors is truncated" in refused(directory)
