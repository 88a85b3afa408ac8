"""The scheduler, block manager and prefix cache on a simulated model: any load gives what each request gives alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4dist.engine.core import EngineCore
from dsv4dist.engine.request import Request, SamplingParams
from dsv4dist.errors import RequestError
from dsv4dist.workers.executor import NO_TOKEN
from tests.cache.test_blocks import check_ownership
from tests.support.simulation import VOCAB, alone, simulated_engine


def check_invariants(engine: EngineCore) -> None:
    scheduler = engine._scheduler
    check_ownership(scheduler.blocks, [request.tables for request in scheduler.running])
    assert len(scheduler.running) <= engine.config.max_num_seqs


def prompt_of(rng: random.Random, length: int, stems: list[list[int]]) -> list[int]:
    stem = rng.choice(stems)[: rng.randint(0, length)] if stems and rng.random() < 0.7 else []
    return stem + [rng.randrange(VOCAB) for _ in range(length - len(stem))]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    max_num_seqs=st.integers(1, 6),
    budget=st.sampled_from([1, 3, 64, 130, 300, 1000]),
    blocks=st.integers(3, 12),
    retained=st.integers(0, 4),
    prefix_caching=st.booleans(),
    drafts=st.sampled_from([0, 0, 1, 3, 11]),
    run_ahead=st.sampled_from([1, 4, 16]),
)
def test_any_load_gives_what_each_request_gives_alone(
    seed: int,
    max_num_seqs: int,
    budget: int,
    blocks: int,
    retained: int,
    prefix_caching: bool,
    drafts: int,
    run_ahead: int,
) -> None:
    rng = random.Random(seed)
    engine = simulated_engine(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        compressed_blocks=blocks,
        retained_points=retained,
        prefix_caching=prefix_caching,
        speculative_tokens=drafts,
        run_ahead=run_ahead,
        max_model_len=700,
    )
    stems = [[rng.randrange(VOCAB) for _ in range(600)] for _ in range(2)]
    expected: dict[str, list[int]] = {}
    outputs: dict[str, Any] = {}
    aborted: set[str] = set()
    length_limit = 40 if budget < 64 else 600
    for turn in range(400):
        for _ in range(rng.choice([0, 0, 1, 3]) if turn < 25 else 0):
            prompt = prompt_of(rng, rng.randint(1, length_limit), stems)
            params = SamplingParams(max_tokens=rng.randint(1, 60), ignore_eos=rng.random() < 0.7)
            request_id = str(len(expected))
            expected[request_id] = alone(prompt, min(params.max_tokens, 700 - len(prompt)), params.ignore_eos)
            engine.submit(prompt, params, request_id)
        if expected and rng.random() < 0.05:
            victim = rng.choice(list(expected))
            if engine.abort(victim):
                aborted.add(victim)
        before = engine._executor.rows  # type: ignore[attr-defined]
        for output in engine.step():
            assert output.id not in outputs, "a request was given twice"
            outputs[output.id] = output
        assert engine._executor.rows - before <= budget  # type: ignore[attr-defined]
        check_invariants(engine)
    for output in engine.stream_all():
        assert output.id not in outputs, "a request was given twice"
        outputs[output.id] = output
    assert outputs.keys() == expected.keys()
    for request_id, output in outputs.items():
        whole = expected[request_id]
        if request_id in aborted:
            assert output.finish_reason == "abort"
            assert output.token_ids == whole[: len(output.token_ids)]
        else:
            assert output.token_ids == whole
            assert output.finish_reason in ("stop", "length")
    check_invariants(engine)
    assert not engine._scheduler.running
    done, total = engine.progress()
    assert done == total


def test_steps_run_ahead_until_a_request_joins_or_must_end() -> None:
    engine = simulated_engine(max_num_seqs=4, run_ahead=8)
    packets: list[int] = []
    submit = engine._executor.submit

    def counted(packet: Any, num_steps: int = 1) -> None:
        packets.append(num_steps)
        submit(packet, num_steps)

    engine._executor.submit = counted  # type: ignore[method-assign]
    engine.submit([1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True), "a")
    for _ in range(4):  # the prompt, then three of eight steps
        engine.step()
    assert packets == [1, 8]
    engine.submit([4, 5], SamplingParams(max_tokens=6, ignore_eos=True), "b")
    outputs = {output.id: output.token_ids for output in engine.stream_all()}
    # b joins behind the packet under way; 5 more steps end it, and 6 tokens of a are left then.
    assert packets == [1, 8, 1, 5, 5]
    assert outputs == {"a": alone([1, 2, 3], 20, True), "b": alone([4, 5], 6, True)}


def test_what_comes_behind_a_stop_is_dropped() -> None:
    """Requests that stop or are aborted amid a packet: its other results go nowhere, and the next request is right."""
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCAB) for _ in range(5)] for _ in range(400)]
    stops = next(prompt for prompt in prompts if 3 <= len(alone(prompt, 30)) <= 6)
    engine = simulated_engine(max_num_seqs=4, run_ahead=16)
    (output,) = engine.generate([stops], SamplingParams(max_tokens=30))
    assert (output.token_ids, output.finish_reason) == (alone(stops, 30), "stop")
    engine.submit([7, 8], SamplingParams(max_tokens=30, ignore_eos=True), "aborted")
    engine.step()
    engine.step()
    assert engine.abort("aborted")
    (other,) = engine.generate([[9, 9, 9]], SamplingParams(max_tokens=20, ignore_eos=True))
    assert other.token_ids == alone([9, 9, 9], 20, True)


def test_requests_that_end_within_a_packet_are_given_once() -> None:
    engine = simulated_engine(run_ahead=16)
    for index in range(8):  # of these some stop early, while the others go on
        engine.submit([index + 2] * 9, SamplingParams(max_tokens=200), str(index))
    given = [output.id for _ in range(5) for output in engine.step()]
    assert engine.abort("1")
    given += [output.id for output in engine.stream_all()]
    assert sorted(given) == [str(index) for index in range(8)]
    assert engine.metrics.values["generated_tokens"] < 8 * 200
    assert engine.progress()[0] == engine.progress()[1]


def test_ten_thousand_short_requests() -> None:
    rng = random.Random(0)
    engine = simulated_engine(max_num_seqs=64, max_num_batched_tokens=512, compressed_blocks=80, max_model_len=256)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 24))] for _ in range(10_000)]
    for index, prompt in enumerate(prompts):
        engine.submit(prompt, SamplingParams(max_tokens=1 + index % 4, ignore_eos=True), str(index))
    seen = {output.id: output.token_ids for output in engine.stream_all()}
    assert len(seen) == 10_000
    for index in range(0, 10_000, 97):
        assert seen[str(index)] == alone(prompts[index], 1 + index % 4, ignore_eos=True)
    check_invariants(engine)


def test_a_request_that_can_never_fit_is_refused_with_what_fits() -> None:
    engine = simulated_engine(compressed_blocks=2)
    with pytest.raises(RequestError, match=r"need 600 tokens of cache; 512 fit"):
        engine.submit([0] * 590, SamplingParams(max_tokens=10), "a")
    engine.submit([0] * 500, SamplingParams(max_tokens=12), "b")
    assert [output.id for output in engine.stream_all()] == ["b"]


def test_the_youngest_is_preempted_and_ends_the_same() -> None:
    engine = simulated_engine(compressed_blocks=4, max_num_batched_tokens=1024, prefix_caching=False)
    prompts = [[i] * 250 for i in range(4)]
    outputs = engine.generate(prompts, SamplingParams(max_tokens=300, ignore_eos=True))
    assert [output.token_ids for output in outputs] == [alone(prompt, 300, True) for prompt in prompts]
    preempted = [output.metrics["preemptions"] for output in outputs]
    assert preempted[0] == 0
    assert sum(preempted) > 0


def test_queued_requests_are_small() -> None:
    request = Request("id", [1, 2, 3], SamplingParams(), 0, 10)
    assert not hasattr(request, "__dict__")
    assert not request.tables
    assert request.digests is None


@pytest.mark.parametrize("budget", [300, 16384, 100])
def test_no_slivers(budget: int) -> None:
    """A chunk under the alignment ends a prompt, or nothing else could run."""
    rng = random.Random(1)
    engine = simulated_engine(max_num_batched_tokens=budget, max_model_len=8192, max_num_seqs=16)
    for index in range(40):
        engine.submit([rng.randrange(VOCAB)] * rng.randint(1, 5000), SamplingParams(max_tokens=4), str(index))
    while engine._scheduler.has_unfinished:
        plan, chosen = engine._scheduler.plan, []

        def spy() -> list[Any]:
            chosen.extend(plan())  # noqa: B023
            return list(chosen)  # noqa: B023

        engine._scheduler.plan = spy  # type: ignore[method-assign]
        engine.step()
        engine._scheduler.plan = plan  # type: ignore[method-assign]
        cut = [one for one in chosen if one.request.num_prompt_left and not one.request.output_token_ids]
        small = [one for one in cut if one.num_tokens < 128]
        assert len(small) <= 1
        assert not small or cut[0] is small[0]


class TestPrefixReuse:
    def run(self, engine: EngineCore, prompt: list[int], max_tokens: int = 9) -> int:
        (output,) = engine.generate([prompt], SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        assert output.token_ids == alone(prompt, max_tokens, True)
        return int(output.metrics["cached_tokens"])

    def test_a_prompt_again_and_one_that_shares_most_of_it(self) -> None:
        rng = random.Random(2)
        engine = simulated_engine()
        prompt = [rng.randrange(VOCAB) for _ in range(700)]
        assert self.run(engine, prompt) == 0
        assert self.run(engine, prompt) == 512
        assert self.run(engine, prompt[:640] + [3] * 60) == 512
        stats = engine._scheduler.prefix_cache.stats  # type: ignore[union-attr]
        assert (stats.hits, stats.reused_tokens) == (2, 1024)

    def test_after_an_eviction_it_is_computed_again(self) -> None:
        rng = random.Random(3)
        engine = simulated_engine(compressed_blocks=4, max_model_len=1024)
        prompt = [rng.randrange(VOCAB) for _ in range(700)]
        self.run(engine, prompt)
        self.run(engine, [rng.randrange(VOCAB) for _ in range(900)])
        assert self.run(engine, prompt) < 512
        assert engine._scheduler.prefix_cache.evictions > 0  # type: ignore[union-attr]

    @pytest.mark.parametrize("shared", [127, 128, 129, 256, 257, 258, 259, 383, 384, 512, 513])
    def test_every_boundary(self, shared: int) -> None:
        rng = random.Random(shared)
        engine = simulated_engine()
        stem = [rng.randrange(VOCAB) for _ in range(shared)]
        self.run(engine, stem + [1] * 9)
        assert self.run(engine, stem + [2] * 9) == shared // 256 * 256

    def test_two_thousand_tokens_reuse_most_of_what_they_share(self) -> None:
        rng = random.Random(4)
        engine = simulated_engine(max_model_len=4096)
        stem = [rng.randrange(VOCAB) for _ in range(1900)]
        self.run(engine, stem + [rng.randrange(VOCAB) for _ in range(148)])
        assert self.run(engine, stem + [rng.randrange(VOCAB) for _ in range(148)]) >= 1792

    def test_generated_tokens_are_reused_too(self) -> None:
        engine = simulated_engine()
        prompt = [5] * 200
        (output,) = engine.generate([prompt], SamplingParams(max_tokens=120, ignore_eos=True))
        assert self.run(engine, prompt + output.token_ids + [7]) == 256

    def test_a_whole_prompt_in_the_cache_still_computes_one_token(self) -> None:
        engine = simulated_engine()
        self.run(engine, [6] * 512)
        assert self.run(engine, [6] * 512) == 256

    def test_requests_at_the_same_time_share_blocks(self) -> None:
        engine = simulated_engine(compressed_blocks=12)
        stem = list(range(VOCAB)) * 12
        self.run(engine, stem)
        prompts = [[*stem, i] for i in range(6)]
        outputs = engine.generate(prompts, SamplingParams(max_tokens=5, ignore_eos=True))
        assert all(output.metrics["cached_tokens"] == 512 for output in outputs)
        assert [output.token_ids for output in outputs] == [alone(prompt, 5, True) for prompt in prompts]

    def test_switched_off(self) -> None:
        engine = simulated_engine(prefix_caching=False)
        assert self.run(engine, [1] * 600) == 0
        assert self.run(engine, [1] * 600) == 0


def test_streaming_yields_every_token_once() -> None:
    engine = simulated_engine(speculative_tokens=3)
    lengths: dict[str, list[int]] = {"0": [], "1": []}
    for output in engine.stream([[1, 2], [3] * 300], SamplingParams(max_tokens=20, ignore_eos=True)):
        lengths[output.id].append(len(output.token_ids))
        if output.finish_reason:
            assert output.token_ids == alone([1, 2] if output.id == "0" else [3] * 300, 20, True)
    assert all(one == sorted(set(one)) and one[-1] == 20 for one in lengths.values())


def test_right_drafts_save_steps() -> None:
    steps = {}
    for luck in (0.0, 1.0):
        engine = simulated_engine(speculative_tokens=3, draft_luck=luck)
        engine.generate([[4] * 10], SamplingParams(max_tokens=40, ignore_eos=True))
        steps[luck] = engine._executor.steps  # type: ignore[attr-defined]
    assert steps[1.0] <= steps[0.0] / 3


def test_an_abandoned_stream_leaves_nothing_running() -> None:
    engine = simulated_engine()
    stream = engine.stream([[1], [2]], SamplingParams(max_tokens=500, ignore_eos=True))
    next(stream)
    stream.close()
    assert not engine.has_unfinished
    engine.generate([[3]], SamplingParams(max_tokens=5))
    assert engine.progress()[0] == engine.progress()[1]
    check_invariants(engine)


@pytest.mark.parametrize("prompt", [[1.5], ["a"], [True], [1, None]])
def test_token_ids_that_are_no_integers_are_refused(prompt: list[Any]) -> None:
    with pytest.raises(RequestError, match="is not an integer"):
        simulated_engine().generate([prompt])


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"top_k": 2**31}, "top_k is 2147483648"),
        ({"temperature": 1e39}, r"temperature is 1e\+39"),
        ({"temperature": 10**400}, "temperature is 1000"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": 2.0, "seed": 1.0}, "top_k is 2.0.*seed is 1.0"),
        ({"max_tokens": 2.5, "temperature": "hot"}, "max_tokens is 2.5.*temperature is 'hot'"),
        ({"seed": 2**64}, "seed is"),
    ],
)
def test_parameters_that_no_packet_holds_are_refused_and_others_served(values: dict[str, Any], found: str) -> None:
    engine = simulated_engine()
    engine.submit([1], SamplingParams(max_tokens=5, ignore_eos=True), "good")
    with pytest.raises(RequestError, match=f"(?s){found}"):
        engine.submit([2], SamplingParams(**values), "bad")
    (output,) = engine.stream_all()
    assert output.token_ids == alone([1], 5, True)


def test_the_largest_parameters_are_served_and_default_seeds_wrap() -> None:
    params = SamplingParams(max_tokens=3, temperature=3e38, top_k=2**31 - 1, seed=2**64 - 1)
    simulated = simulated_engine()
    engine = EngineCore(simulated.config, simulated._executor, None, seed=2**64 - 1)
    outputs = engine.generate([[1], [2], [3]], [params, SamplingParams(max_tokens=3), SamplingParams(max_tokens=3)])
    assert all(output.error is None for output in outputs)


def test_refused_batches_and_scores_use_up_no_default_seed() -> None:
    engine = simulated_engine()
    with pytest.raises(RequestError):
        engine.generate([[1], [VOCAB]], SamplingParams(temperature=1.0))
    engine.score([[1, 2]])
    engine.queue_request([1], SamplingParams(seed=9), "own")
    assert [engine.queue_request([1], SamplingParams(), name).seed for name in "ab"] == [0, 1]


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_request_without_finite_logits_ends_with_an_error_and_others_go_on(drafts: int) -> None:
    """Rank 0 says NO_TOKEN for a choice that it cannot make."""
    engine = simulated_engine(speculative_tokens=drafts)
    sample, prompt, fails_at = engine._executor._sample, [7] * 5, 9  # type: ignore[attr-defined]

    def failing(context: np.ndarray, num_drafts: int) -> list[int]:
        words = sample(context, num_drafts)
        first = max(0, fails_at - (len(context) - num_drafts))  # of the choices in this step
        if context[0] == prompt[0] and first <= drafts:
            words[first : 1 + drafts] = [NO_TOKEN] * (1 + drafts - first)
        return list(words)

    engine._executor._sample = failing  # type: ignore[attr-defined]
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    bad, good = engine.generate([prompt, [3] * 40], params)
    assert bad.finish_reason == "error"
    assert bad.error is not None
    assert "not finite" in bad.error
    assert bad.token_ids == alone(prompt, fails_at - len(prompt), True)
    assert good.token_ids == alone([3] * 40, 30, True)
    assert engine.progress()[0] == engine.progress()[1]
    check_invariants(engine)


def test_drafts_leave_room_for_prompts() -> None:
    engine = simulated_engine(max_num_seqs=8, max_num_batched_tokens=32, speculative_tokens=15, draft_luck=0.0)
    for token in range(2):
        engine.submit([token], SamplingParams(max_tokens=500, ignore_eos=True), f"long {token}")
    engine.step()
    engine.step()
    engine.submit([5] * 10, SamplingParams(max_tokens=2, ignore_eos=True), "short")
    ended = [output.id for _ in range(10) for output in engine.step()]
    assert ended == ["short"]


def test_outputs_of_other_requests_are_kept() -> None:
    engine = simulated_engine()
    engine.submit([7], SamplingParams(max_tokens=2, ignore_eos=True), "queued")
    (output,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=20, ignore_eos=True))
    assert output.token_ids == alone([1, 2, 3], 20, True)
    assert [(one.id, one.token_ids) for one in engine.stream_all()] == [("queued", alone([7], 2, True))]
    assert list(engine.stream_all()) == []
