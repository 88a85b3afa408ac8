"""Random loads on the tiny model: every output is that of the request alone, whatever else runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4dist import SamplingParams
from tests.cache.test_blocks import check_ownership
from tests.support.compare import random_tokens

STEM = random_tokens(620)


@pytest.fixture(scope="module")
def alone(engine: Callable[..., Any], checkpoint: Callable[..., Path]) -> Callable[..., list[int]]:
    """What a request generates with nothing else running and nothing cached."""
    plain = engine(checkpoint("tiny"), enable_prefix_caching=False, max_num_seqs=1)

    def run(prompt: list[int], params: SamplingParams) -> list[int]:
        (output,) = plain.generate([prompt], params)
        return list(output.token_ids)

    return run


@pytest.mark.parametrize("drafts", [0, 2])
def test_any_load_gives_what_each_request_gives_alone(
    engine: Callable[..., Any], checkpoint: Callable[..., Path], alone: Callable[..., list[int]], drafts: int
) -> None:
    model_options = {"speculative_tokens": drafts, "poison_memory": True, "max_model_len": 768}

    @settings(max_examples=6, deadline=None)
    @given(
        seed=st.integers(0, 2**32),
        max_num_seqs=st.integers(1, 5),
        budget=st.sampled_from([7, 64, 130, 400]),
        memory=st.sampled_from([12, 24, 1000]),
    )
    def run(seed: int, max_num_seqs: int, budget: int, memory: int) -> None:
        rng = random.Random(seed)
        served = engine(checkpoint("tiny"), max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, **model_options)
        pool = served._scheduler.blocks.pools["compressed"]
        held = [pool.take() for _ in range(max(0, pool.num_available - memory))]  # little memory: preemption
        expected: dict[str, tuple[list[int], SamplingParams]] = {}
        outputs: dict[str, Any] = {}
        aborted: set[str] = set()
        for turn in range(30):
            for _ in range(rng.choice([0, 1, 2]) if turn < 4 else 0):
                length = rng.randint(1, 40 if budget < 64 else 600)
                shared = rng.choice([0, length, length * 3 // 4])
                prompt = STEM[:shared] + [rng.randrange(2, 512) for _ in range(length - shared)]
                sampled = {"temperature": 0.9, "seed": 3} if rng.random() < 0.3 else {}
                params = SamplingParams(max_tokens=rng.randint(1, 12), ignore_eos=True, **sampled)
                request_id = str(len(expected))
                expected[request_id] = (prompt, params)
                served.submit(prompt, params, request_id)
            if expected and rng.random() < 0.05 and served.abort(victim := rng.choice(list(expected))):
                aborted.add(victim)
            outputs |= {output.id: output for output in served.step()}
            check_held(served, held)
        outputs |= {output.id: output for output in served.stream_all()}
        assert outputs.keys() == expected.keys()
        for request_id, (prompt, params) in expected.items():
            whole = alone(prompt, params)
            got = outputs[request_id].token_ids
            assert got == (whole[: len(got)] if request_id in aborted else whole)
        for block in held:
            pool.release(block)
        check_held(served, [])

    run()


def check_held(served: Any, held: list[int]) -> None:
    """Ownership holds, for the blocks that the test keeps for itself too."""
    scheduler = served._scheduler
    pool = scheduler.blocks.pools["compressed"]
    assert all(pool.num_users(block) == 1 for block in held)
    for block in held:
        pool.release(block)
    try:
        check_ownership(scheduler.blocks, [request.tables for request in scheduler.running])
    finally:
        for block in held:
            pool._free.remove(block)
            pool._num_users[block] = 1
