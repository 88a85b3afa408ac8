"""The same tokens on different ways through one engine: chunks, batch mates, decode, reused and poisoned memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsv4dist import Engine, SamplingParams
from dsv4dist.cache.groups import cache_groups
from dsv4dist.config.model import load_model_config
from dsv4dist.errors import RequestError
from tests.conftest import cpu_config
from tests.support.compare import SelectionGaps, assert_logits_close, random_tokens
from tests.support.poison import uninitialised_memory_poisoned

CLOSE = 1e-4


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)


def sampled(count: int, seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=1.0, seed=seed, ignore_eos=True)


def logits(engine: Any, prompts: list[list[int]]) -> list[np.ndarray]:
    return [one.logits for one in engine.score(prompts, return_logits=True)]


@pytest.fixture(scope="module")
def tiny(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("tiny")


@pytest.fixture(scope="module")
def assert_close(tiny: Path) -> Callable[..., None]:
    gaps = SelectionGaps(tiny)

    def check(prompts: list[list[int]], got: list[np.ndarray], expected: list[np.ndarray]) -> None:
        for prompt, one, other in zip(prompts, got, expected, strict=True):
            assert_logits_close(one, other, lambda prompt=prompt: gaps.of(prompt), CLOSE, f"{len(prompt)} tokens")

    return check


@pytest.fixture(scope="module")
def whole(tiny: Path, engine: Callable[..., Any]) -> Any:
    """The engine that takes every prompt here in one step."""
    return engine(tiny, max_num_batched_tokens=2048)


@pytest.mark.parametrize("budget", [1, 7, 64, 128, 1000])
def test_chunked_prefill_equals_one_shot(
    budget: int, tiny: Path, whole: Any, engine: Callable[..., Any], assert_close: Callable[..., None]
) -> None:
    prompts = [random_tokens(length) for length in ((131, 5) if budget == 1 else (300, 5, 131))]
    expected = [logits(whole, [prompt])[0] for prompt in prompts]
    chunked = engine(tiny, max_num_batched_tokens=budget, max_num_seqs=min(budget, 4))
    assert_close(prompts, logits(chunked, prompts), expected)


def test_batch_mates_do_not_matter(whole: Any, assert_close: Callable[..., None]) -> None:
    mates = [random_tokens(length, seed=3) for length in (1, 2, 3, 4, 17, 127, 128, 129, 260)]
    own = random_tokens(200)
    (alone,) = logits(whole, [own])
    for place in (0, 4, len(mates)):
        among = logits(whole, [*mates[:place], own, *mates[place:]])
        assert_close([own], [among[place]], [alone])

    (expected,) = whole.generate([own], greedy(12))
    outputs = whole.generate([*mates[:4], own, *mates[4:]], greedy(12))
    assert outputs[4].token_ids == expected.token_ids


# Where prefill ends and decode begins: every residue of 4, the window's edge, and both sides of 128 and 256.
SPLITS = [*range(1, 25), 31, 32, 33, *range(123, 134), 255, 256, 257]


def test_decode_continues_any_prefill(whole: Any) -> None:
    """Tokens drawn one at a time are the ones that a prefill of everything would rank first."""
    prompts = [random_tokens(300)[:split] for split in SPLITS]
    outputs = whole.generate(prompts, greedy(24))
    sequences = [prompt + output.token_ids for prompt, output in zip(prompts, outputs, strict=True)]
    for split, output, scored in zip(SPLITS, outputs, logits(whole, sequences), strict=True):
        best = np.argmax(scored[split - 1 : -1], axis=-1)
        assert output.token_ids == best.tolist(), f"prefill of {split} tokens"


def test_a_sample_is_the_same_wherever_prefill_ends(whole: Any) -> None:
    """Random numbers are keyed by seed and position, so moving tokens from decode to the prompt changes nothing."""
    for length in (1, 120):
        prompt = random_tokens(length, seed=8)
        (output,) = whole.generate([prompt], sampled(24, seed=5))
        moved = [prompt + output.token_ids[:count] for count in range(1, 24)]
        rest = whole.generate(moved, [sampled(24 - count, seed=5) for count in range(1, 24)])
        for count, one in enumerate(rest, start=1):
            assert one.token_ids == output.token_ids[count:], f"{length} prompt tokens and {count} of the sample"


def test_reused_blocks_hide_their_previous_owner(tiny: Path, whole: Any, assert_close: Callable[..., None]) -> None:
    long, short = random_tokens(500), random_tokens(5)
    (expected,) = whole.generate([short], greedy(40))
    with Engine(cpu_config(tiny, max_num_seqs=1, max_model_len=576)) as engine:
        for _ in range(2):
            engine.generate([long], greedy(30))
            (output,) = engine.generate([short], greedy(40))
            assert output.token_ids == expected.token_ids
        both = [short + expected.token_ids]
        assert_close(both, logits(engine, both), logits(whole, both))


def test_more_requests_than_places(tiny: Path, whole: Any, engine: Callable[..., Any]) -> None:
    """Requests wait, join and leave at different steps; each ends as it would alone."""
    prompts = [random_tokens(length, seed=4) for length in (3, 140, 33, 1, 128, 64, 9, 250)]
    lengths = [20, 3, 11, 30, 7, 1, 16, 5]
    narrow = engine(tiny, max_num_seqs=3, max_num_batched_tokens=48)
    outputs = narrow.generate(prompts, [greedy(count) for count in lengths])
    for prompt, count, output in zip(prompts, lengths, outputs, strict=True):
        (alone,) = whole.generate([prompt], greedy(count))
        assert output.token_ids == alone.token_ids
        assert output.finish_reason == "length"


def test_little_memory_makes_requests_wait(tiny: Path, whole: Any) -> None:
    """With compressed blocks for 512 tokens, longer requests are refused and the others take turns."""
    prompts = [random_tokens(length, seed=9) for length in (400, 250, 10, 300)]
    roomy = cpu_config(tiny, max_num_seqs=4, max_model_len=1024)
    model = load_model_config(tiny)
    limits = (roomy.max_num_seqs, roomy.max_num_batched_tokens, 1024)
    memory = 0
    for group in cache_groups(model, "float32"):
        blocks = 2 if group.window is None else group.live_blocks(*limits)
        memory += blocks * group.block_bytes
    with Engine(replace(roomy, kv_cache_memory_bytes=memory)) as engine:
        with pytest.raises(RequestError, match="512 fit"):
            engine.generate([random_tokens(500)], greedy(30))
        outputs = engine.generate(prompts, greedy(12))
    for prompt, output in zip(prompts, outputs, strict=True):
        (alone,) = whole.generate([prompt], greedy(12))
        assert output.token_ids == alone.token_ids


@pytest.mark.parametrize("preset", ["tiny-swa", "tiny-csa", "tiny-hca", "tiny"])
def test_poisoned_memory_changes_nothing(preset: str, checkpoint: Callable[..., Path], engine: Any) -> None:
    directory = checkpoint(preset)
    prompts = [random_tokens(length, seed=6) for length in (1, 4, 127, 130, 270)]
    options = {"max_num_batched_tokens": 96, "max_num_seqs": 4}
    clean = engine(directory, **options)
    expected_logits = logits(clean, prompts)
    expected_outputs = clean.generate(prompts, sampled(20, seed=1))
    with uninitialised_memory_poisoned():  # what a step allocates for itself, beside the caches
        poisoned = engine(directory, **options, poison_memory=True)
        got_logits = logits(poisoned, prompts)
        got_outputs = poisoned.generate(prompts, sampled(20, seed=1))
    for got, expected in zip(got_logits, expected_logits, strict=True):
        np.testing.assert_array_equal(got, expected)
    assert [one.token_ids for one in got_outputs] == [one.token_ids for one in expected_outputs]


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 0.05), ("bfloat16", 0.2)], ids=["cache", "all"])
def test_bf16_is_close_to_fp32(dtype: str, bound: float, tiny: Path, whole: Any, engine: Callable[..., Any]) -> None:
    prompts = [random_tokens(300), random_tokens(40)]
    rounded = engine(tiny, dtype=dtype, kv_cache_dtype="bfloat16")
    for got, expected in zip(logits(rounded, prompts), logits(whole, prompts), strict=True):
        assert np.isfinite(got).all()
        # A router or indexer choice may flip at single positions, so the bound is on the mean.
        assert 0 < np.mean(np.abs(got - expected)) < bound
        assert np.mean(np.argmax(got, axis=-1) == np.argmax(expected, axis=-1)) > 0.85


def test_fp8_caches_are_close_to_fp32_ones(checkpoint: Callable[..., Path], engine: Callable[..., Any]) -> None:
    """With the released models' head sizes; rounding is all that differs, and it does not depend on the chunks."""
    directory = checkpoint("flash-layer")
    prompts = [random_tokens(270), random_tokens(40)]
    exact = logits(engine(directory), prompts)
    rounded = logits(engine(directory, kv_cache_dtype="fp8_ds_mla"), prompts)
    chunked = logits(engine(directory, kv_cache_dtype="fp8_ds_mla", max_num_batched_tokens=50), prompts)
    for one, other, expected in zip(rounded, chunked, exact, strict=True):
        assert np.isfinite(one).all()
        assert 0 < np.mean(np.abs(one - expected)) < 0.15
        assert np.mean(np.argmax(one, axis=-1) == np.argmax(expected, axis=-1)) > 0.75
        # A value at the border of two fp8 codes may fall either way, so a few entries may differ by a whole code.
        assert np.mean(np.abs(one - other)) < 0.02
