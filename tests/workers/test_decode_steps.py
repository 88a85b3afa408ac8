"""Decode steps over the step buffer: padded, several per packet, and on a GPU replayed from captured graphs.

On a CPU the same runner runs the same padded steps eagerly, so all of this but the graphs themselves runs there too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4dist import SamplingParams
from dsv4dist.cache.pool import cache_tensors
from dsv4dist.layers.overlap import Overlap
from dsv4dist.workers.runner import ModelRunner
from tests.support.compare import random_tokens
from tests.support.stepping import Decoder

GPU = {"device": "cuda", "dtype": "bfloat16", "kv_cache_dtype": "fp8_ds_mla"}
PLACES = [
    pytest.param("tiny", {}, id="cpu"),
    pytest.param("flash-layer", GPU, id="gpu", marks=pytest.mark.gpu),
]
LENGTHS = [40, 2047, 2048, 2052, 5000, 1, 3, 127]
"""Below, at and behind the context from which the indexer has to choose, where graphs were captured at length 0."""
VISIBLE = [3, 60, 1, 17, 0, 64, 2, 9]


def draws(count: int) -> list[SamplingParams]:
    """Half of the requests draw, so that tokens show small differences in logits."""
    return [SamplingParams(max_tokens=8, temperature=float(i % 2), seed=i + 1, ignore_eos=True) for i in range(count)]


def decoder(engine: Any, lengths: list[int]) -> Decoder:
    prompts = [random_tokens(length, seed=i) for i, length in enumerate(lengths)]
    made = Decoder(engine, prompts, draws(len(lengths)))
    made.prefill()
    return made


def mixed_steps(one: Decoder) -> None:
    """Steps of 8, then 5 in the same bucket, 1, 3, all with one packet for several steps, and back to fewer."""
    for which, num_steps in ((range(8), 1), (range(3, 8), 1), ([4], 2), ([0, 2, 6], 1), (range(8), 4), ([7, 1], 1)):
        one.step(list(which), num_steps)


@pytest.mark.parametrize(("preset", "options"), PLACES)
def test_several_steps_per_packet_are_those_steps(
    preset: str, options: dict[str, Any], checkpoint: Callable[..., Path], engine: Callable[..., Any]
) -> None:
    started = engine(checkpoint(preset), run_ahead=8, **options)
    outputs, caches = [], []
    for packets in ([1] * 9, [8, 1], [3, 4, 2]):
        one = decoder(started, [5, 130, 64])
        for num_steps in packets:
            one.step([0, 1, 2], num_steps)
        outputs.append(one.outputs)
        caches.append(one)
    assert outputs[0] == outputs[1] == outputs[2]
    assert len(outputs[0][0]) == 10


@pytest.mark.parametrize(("preset", "options"), PLACES)
def test_only_the_rows_of_real_tokens_change(
    preset: str, options: dict[str, Any], checkpoint: Callable[..., Path], engine: Callable[..., Any]
) -> None:
    """5 requests in a bucket of 8, after a step of 8: all caches keep every byte that is not of the 5 tokens' own."""
    started = engine(checkpoint(preset), poison_memory=True, **options)
    one = decoder(started, [(count + 1) * 4 - 1 for count in VISIBLE])
    one.step(list(range(8)))
    before = one.caches()
    one.step([0, 2, 3, 6, 7])
    tensors = list(cache_tensors(started._executor.runner.caches))
    layers = started.config.model.layer_kinds
    windows = [layer.window for layer in started._executor.runner.caches[: len(layers)]]
    for cache, old, new in zip(tensors, before, one.caches(), strict=True):
        changed = torch.nonzero((old != new).flatten(1).any(dim=1)).numel()
        is_window = any(cache is window.data for window in windows)
        assert 0 < changed <= 5 if is_window else changed <= 5, f"{changed} blocks of {list(cache.shape)} changed"
        if is_window and old.dim() == 3:  # rows can be told apart
            assert (old != new).any(dim=2).sum() == 5


@pytest.mark.gpu
@pytest.mark.parametrize("streams", [False, True], ids=["sequential", "forked"])
@pytest.mark.parametrize(
    "dtypes",
    [{"dtype": "bfloat16", "kv_cache_dtype": "fp8_ds_mla"}, {"dtype": "float32", "kv_cache_dtype": "float32"}],
    ids=["bf16", "fp32"],
)
def test_replay_equals_eager(
    streams: bool, dtypes: dict[str, Any], checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit in tokens and in all cache bytes where both run the same kernels.

    Side by side, the two compressors of a CSA layer have a product each instead of one for both, which may round
    differently in the library: there the tokens are compared, and the caches must agree closely.
    """
    from dsv4dist import Engine
    from tests.conftest import cpu_config

    if not streams:
        monkeypatch.setattr(ModelRunner, "_overlap", lambda self: Overlap())
    options = {"device": "cuda", "max_model_len": 8192, "run_ahead": 4, "poison_memory": True, **dtypes}
    directory = checkpoint("flash-layer")
    results = []
    for enforce_eager in (True, False):
        with Engine(cpu_config(directory, enforce_eager=enforce_eager, **options)) as started:
            runner = started._executor.runner
            assert (runner.graphs is None) == enforce_eager
            one = decoder(started, LENGTHS)
            mixed_steps(one)
            # A larger eager batch in between must leave the buffers of graphs alone.
            started.generate([random_tokens(1000, seed=9)], SamplingParams(max_tokens=1))
            mixed_steps(one)
            results.append((one.outputs, one.caches() if not streams else []))
    (eager, eager_caches), (replayed, replayed_caches) = results
    assert [len(tokens) for tokens in eager] == [len(tokens) for tokens in replayed]
    if streams:
        same = sum(a == b for a, b in zip(eager, replayed, strict=True))
        assert same >= len(LENGTHS) - 2, f"only {same} of {len(LENGTHS)} requests went the same way"
        return
    assert eager == replayed
    for one, other in zip(eager_caches, replayed_caches, strict=True):
        assert torch.equal(one, other)
