"""One model over 1, 2 and 4 Ray actors: the same logits, the same greedy and the same sampled tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from dsv4dist import Engine, SamplingParams
from dsv4dist.checkpoint.random_checkpoint import dequantise_checkpoint
from tests.conftest import cpu_config
from tests.support.compare import SelectionGaps, assert_logits_close, random_tokens

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

PROMPTS = [random_tokens(length) for length in (1, 4, 5, 127, 128, 130, 300)]
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
SAMPLED = [
    SamplingParams(max_tokens=16, temperature=1.0, seed=17, ignore_eos=True),
    SamplingParams(max_tokens=16, temperature=0.8, top_p=0.9, seed=17, ignore_eos=True),
    SamplingParams(max_tokens=16, temperature=1.2, top_k=20, seed=17, ignore_eos=True),
]


@dataclass(frozen=True)
class Result:
    logits: list[np.ndarray]
    greedy: list[list[int]]
    sampled: list[list[int]]


def run(directory: Path, **options: object) -> Result:
    # A budget below the longest prompts: several chunks, mixed with decode.
    with Engine(cpu_config(directory, max_num_batched_tokens=160, **options)) as engine:
        scored = engine.score(PROMPTS, return_logits=True)
        greedy = engine.generate(PROMPTS, GREEDY)
        sampled = engine.generate(PROMPTS[-3:], SAMPLED)
        # Ray's metric objects exist exactly where Ray runs, and take the numbers without complaint.
        assert bool(engine.metrics._exported) == (options.get("distributed_executor_backend") == "ray")
    return Result(
        logits=[one.logits for one in scored],
        greedy=[one.token_ids for one in greedy],
        sampled=[one.token_ids for one in sampled],
    )


@pytest.fixture(scope="module")
def directory(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("tiny", quant=True)  # shares of 2 and 4 ranks begin inside a scale block


@pytest.fixture(scope="module")
def in_process(directory: Path) -> Result:
    return run(directory)


@pytest.fixture(scope="module", params=[1, 2, 4], ids=lambda ranks: f"tp{ranks}")
def over_ray(request: pytest.FixtureRequest, directory: Path) -> Result:
    return run(directory, tensor_parallel_size=request.param, distributed_executor_backend="ray", address="local")


def test_logits_do_not_depend_on_the_number_of_ranks(
    over_ray: Result, in_process: Result, directory: Path, tmp_path: Path
) -> None:
    gaps = SelectionGaps(dequantise_checkpoint(directory, tmp_path))
    for prompt, got, expected in zip(PROMPTS, over_ray.logits, in_process.logits, strict=True):
        assert_logits_close(got, expected, lambda prompt=prompt: gaps.of(prompt), 1e-4, f"{len(prompt)} tokens")


def test_greedy_tokens_do_not_depend_on_the_number_of_ranks(over_ray: Result, in_process: Result) -> None:
    assert over_ray.greedy == in_process.greedy


def test_sampled_tokens_do_not_depend_on_the_number_of_ranks(over_ray: Result, in_process: Result) -> None:
    assert over_ray.sampled == in_process.sampled
    assert len({tuple(one) for one in over_ray.sampled}) == len(over_ray.sampled)
