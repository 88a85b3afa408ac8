"""The measured decode step of attention layers runs at small sizes on a CPU, and its floor is counted right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4dist.bench.decode import AttentionStack, StackStep
from dsv4dist.config.model import LayerKind
from dsv4dist.config.presets import preset_config
from dsv4dist.kernels.ops import reference_ops
from dsv4dist.layers.overlap import Overlap

TOKEN, INDEX_KEY = 584, 132


@pytest.mark.parametrize("shard_of", [1, 8])
def test_a_small_stack(shard_of: int) -> None:
    kinds = (LayerKind.SWA, LayerKind.CSA, LayerKind.HCA)
    flash = preset_config("flash")
    config = replace(flash, layer_kinds=kinds, hidden_size=256, q_lora_rank=128, index_topk=64)
    context, tokens = 640, 2
    device = torch.device("cpu")
    stack = AttentionStack(config, shard_of, reference_ops(), device, Overlap(), context)
    step = StackStep(stack, tokens, context)
    out = step.run()
    assert out.shape == (tokens, 256)
    assert out.isfinite().all()
    assert (out - step.x).float().std() > 0.1, "layers add nothing"
    for kind in kinds:
        assert step.run_layer(kind).isfinite().all()
    lengths = (640, 639)  # one token apart
    read = [3 * 128 * TOKEN + 64 * TOKEN + n // 4 * INDEX_KEY + n // 128 * TOKEN for n in lengths]
    assert step.cache_bytes == sum(read)
    heads, groups = 64 // shard_of, 8 // shard_of
    fp8 = 3 * ((128 + 512) * 256 + heads * 512 * 128 + groups * 1024 * 4096 + 256 * groups * 1024) + 8192 * 128
    assert fp8 < stack.weight_bytes < 1.2 * fp8 + 4e6
