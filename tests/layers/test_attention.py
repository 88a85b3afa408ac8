"""One attention layer of each kind, alone, against float64 loops written from the specification."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dsv4dist.cache.blocks import BlockManager
from dsv4dist.cache.groups import cache_groups
from dsv4dist.config.model import LayerKind
from dsv4dist.engine.request import Request, SamplingParams
from dsv4dist.engine.scheduler import ScheduledRequest
from dsv4dist.engine.step_plan import build_step_plan
from dsv4dist.step.builder import build_metadata
from dsv4dist.step.sections import PacketShape, split_sections
from dsv4dist.workers.packet import read_header
from tests.support import oracle

LENGTH = 300
TOLERANCE = 1e-5
MIN_GAP = 1e-6  # below this two index scores are a toss-up in fp32


@pytest.mark.parametrize("kind", list(LayerKind), ids=lambda kind: kind.value)
@pytest.mark.parametrize("chunks", [[LENGTH], [127, 1, 100, 72]], ids=["whole", "chunked"])
def test_a_layer_alone(
    kind: LayerKind, chunks: list[int], checkpoint: Callable[..., Path], engine: Callable[..., Any]
) -> None:
    ratio = 0 if kind is LayerKind.SWA else kind.compress_ratio
    directory = checkpoint("tiny", seed=5, overrides={"compress_ratios": [ratio], "num_hash_layers": 0})
    started = engine(directory, poison_memory=True)
    runner, config = started._executor.runner, started.config.model
    x = np.random.default_rng(3).standard_normal((LENGTH, config.hidden_size))
    x /= np.sqrt(np.mean(x**2, axis=1, keepdims=True))  # as the layer's norm would leave it
    gaps = oracle.Gaps(LENGTH)
    params = oracle.below(oracle.read_parameters(directory), "layers.0.attn.")
    expected = oracle.attention_layer(x.astype(np.float32).astype(np.float64), params, config, kind, gaps)
    assert np.min(gaps.smallest) > MIN_GAP, "choose another seed: a selection here is a toss-up in fp32"
    assert np.std(expected) > 0.1, "outputs this small hide errors"

    request = Request("", [2] * LENGTH, SamplingParams(), 0, LENGTH)
    blocks = BlockManager(cache_groups(config, "float32"), started.report.num_cache_blocks)
    got = []
    for count in chunks:
        start = request.num_computed
        assert blocks.extend(request.tables, start + count)
        packet = build_step_plan([ScheduledRequest(request, count)], 0, 0).pack()
        sections = split_sections(torch.from_numpy(packet), read_header(packet, 16, 1024).shape)
        step = build_metadata(config, runner.ops, sections, start + count)
        rows = torch.from_numpy(x[start : start + count]).float()
        got.append(runner.model.layers[0].attention(rows, step, runner.caches[0]).numpy())
        request.num_computed += count
        blocks.release_passed(request.tables, request.num_computed)
    blocks.free(request.tables)
    assert np.abs(np.concatenate(got) - expected).max() < TOLERANCE


def test_a_layer_without_rows(checkpoint: Callable[..., Path], engine: Callable[..., Any]) -> None:
    """Drafting for a step in which nobody wants a token runs the draft layer on no rows at all."""
    started = engine(checkpoint("tiny"))
    runner, config = started._executor.runner, started.config.model
    sections = {
        name: torch.zeros(dims, dtype=torch.int32) for name, dims in PacketShape(1, 0, (1, 1, 1, 1)).sections().items()
    }
    step = build_metadata(config, runner.ops, sections, 8)
    for layer, caches in zip(runner.model.layers, runner.caches, strict=True):
        streams = torch.empty(0, config.hc_mult, config.hidden_size)
        assert layer(streams, step, caches).shape == streams.shape
