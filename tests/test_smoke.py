"""The first file to read: a tiny model on a CPU, in this process, from text to tokens and from tokens to scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from dsv4dist import Engine, EngineConfig, SamplingParams


@pytest.fixture(scope="module")
def running(checkpoint: Callable[..., Path]) -> Iterator[Engine]:
    config = EngineConfig(
        model=checkpoint("tiny"),
        distributed_executor_backend="local",
        device="cpu",
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=64,
    )
    with Engine(config) as engine:
        yield engine


def test_greedy_tokens_are_the_best_scored_ones(running: Engine) -> None:
    prompts = [[5, 6, 7], list(range(2, 150))]
    outputs = running.generate(prompts, SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))
    assert [len(output.token_ids) for output in outputs] == [6, 6]
    assert [output.finish_reason for output in outputs] == ["length", "length"]

    whole = [prompt + output.token_ids for prompt, output in zip(prompts, outputs, strict=True)]
    for prompt, output, scored in zip(prompts, outputs, running.score(whole, return_logits=True), strict=True):
        best = np.argmax(scored.logits[len(prompt) - 1 : -1], axis=-1)
        assert output.token_ids == best.tolist()
        assert np.isfinite(scored.logits).all()


def test_scores_are_log_probabilities_of_the_next_token(running: Engine) -> None:
    token_ids = [9, 8, 7, 6, 5]
    (scored,) = running.score([token_ids], return_logits=True)
    logits = scored.logits.astype(np.float64)
    expected = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    assert scored.token_logprobs[0] is None
    np.testing.assert_allclose(
        scored.token_logprobs[1:], [expected[i, token] for i, token in enumerate(token_ids[1:])], atol=1e-5
    )


def test_a_text_prompt_gives_text(running: Engine) -> None:
    (output,) = running.generate(["hello"], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    assert output.prompt_token_ids
    assert isinstance(output.text, str)


def test_a_seed_repeats_a_sample_and_streaming_gives_the_same(running: Engine) -> None:
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=3, ignore_eos=True)
    (first,) = running.generate([[4, 5, 6]], params)
    (again,) = running.generate([[4, 5, 6]], params)
    assert first.token_ids == again.token_ids
    *_, last = running.stream([[4, 5, 6]], params)
    assert last.token_ids == first.token_ids
