"""Lost ranks on a simulated model: requests go on as if nothing had been, as often as losses are allowed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from dsv4dist import EngineConfig, SamplingParams
from dsv4dist.cache.groups import COMPRESSED
from dsv4dist.engine import async_engine
from dsv4dist.engine.core import EngineCore
from dsv4dist.engine.request import RequestOutput
from dsv4dist.errors import PlacementError, WorkerError
from dsv4dist.workers.failure import FailureKind, RankFailure, first_cause
from tests.support.simulation import VOCAB, alone, simulated_engine

RECOVERABLE = [kind for kind in FailureKind if kind is not FailureKind.RAISED]
LONG = SamplingParams(max_tokens=30, ignore_eos=True)


def failure(kind: FailureKind = FailureKind.DIED) -> RankFailure:
    return RankFailure(1, kind, "its process died (pid 7 on host)", 0.0)


class Fragile:
    """An executor whose ranks are lost when `loss` has an error for a call; then only a restart brings them back."""

    def __init__(self, inner: Any, loss: Callable[[str], Exception | None]) -> None:
        self.inner, self.loss, self.lost = inner, loss, False
        self.losses = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)
        if name not in ("start", "restart", "check", "execute", "submit", "collect"):
            return method

        def fragile(*args: Any) -> Any:
            if self.lost and name == "check":
                return None
            assert not self.lost or name == "restart", f"{name} of lost ranks"
            self.lost = False
            error = self.loss(name)
            # Half of the losses come when the step was computed and only its result is missing.
            result = method(*args) if error is None or self.losses % 2 else None
            if error is None:
                return result
            self.lost = True
            self.losses += 1
            raise error

        return fragile


def fragile_engine(loss: Callable[[str], Exception | None], max_recoveries: int = 3, **options: Any) -> EngineCore:
    core = simulated_engine(**options)
    executor: Any = Fragile(core._executor, loss)
    return EngineCore(core.config, executor, None, max_recoveries=max_recoveries)


def serve(engine: EngineCore) -> tuple[dict[str, RequestOutput], WorkerError | None]:
    """The outputs of everything submitted, and what ended the run early."""
    outputs = {}
    try:
        for output in engine.stream_all():
            assert output.id not in outputs
            outputs[output.id] = output
    except WorkerError as error:
        return outputs, error
    return outputs, None


def lost_at(*calls: int, name: str = "collect", kind: FailureKind = FailureKind.DIED) -> Callable[[str], Any]:
    """A loss at these calls of a method, counted from 0."""
    seen = -1

    def loss(called: str) -> RankFailure | None:
        nonlocal seen
        seen += called == name
        return failure(kind) if called == name and seen in calls else None

    return loss


@pytest.mark.parametrize("seed", range(12))
def test_any_load_with_any_losses_gives_what_each_request_gives_alone(seed: int) -> None:
    rng = random.Random(seed)

    def loss(name: str) -> RankFailure | None:
        return failure(rng.choice(RECOVERABLE)) if rng.random() < 0.06 else None

    engine = fragile_engine(
        loss,
        max_recoveries=10_000,
        max_num_seqs=5,
        max_num_batched_tokens=rng.choice([60, 300]),
        compressed_blocks=rng.randint(4, 12),
        speculative_tokens=rng.choice([0, 3]),
        prefix_caching=rng.random() < 0.7,
        max_model_len=700,
    )
    stem = [rng.randrange(VOCAB) for _ in range(400)]
    prompts = [[*stem[: rng.randint(1, 400)], i] for i in range(20)]
    given: dict[str, list[list[int]]] = {str(i): [] for i in range(20)}
    for output in engine.stream(prompts, LONG):
        given[output.id].append(output.token_ids)
    for prompt, states in zip(prompts, given.values(), strict=True):
        lengths = [len(state) for state in states]
        assert lengths == sorted(set(lengths)), "a token was given twice"
        assert states[-1] == alone(prompt, 30, True)
    values = engine.metrics.values
    assert values["recoveries"] == engine._executor.losses > 0  # type: ignore[attr-defined]
    assert values["generated_tokens"] == 20 * 30
    done, total = engine.progress()
    assert done == total
    assert engine._executor.generation > 0


def test_counts_go_on_after_a_loss() -> None:
    engine = fragile_engine(lost_at(40), compressed_blocks=4, max_num_batched_tokens=1024)
    engine.generate([[i] * 250 for i in range(4)], SamplingParams(max_tokens=300, ignore_eos=True))
    before = dict(engine.metrics.values)
    assert before["preemptions"] > 0
    engine._executor.loss = lost_at(0)  # type: ignore[attr-defined]
    engine.generate([[5]], LONG)
    for name in ("preemptions", "prefix_queries", "prefix_evictions", "generated_tokens"):
        assert engine.metrics.values[name] >= before[name], name


@pytest.mark.parametrize("kind", FailureKind)
def test_only_what_a_rank_raises_itself_ends_the_run(kind: FailureKind) -> None:
    engine = fragile_engine(lost_at(3, kind=kind))
    engine.submit([1], SamplingParams(max_tokens=2, ignore_eos=True), "done")
    engine.submit([2], LONG, "long")
    outputs, error = serve(engine)
    expected = "error" if kind is FailureKind.RAISED else "length"
    assert {name: output.finish_reason for name, output in outputs.items()} == {"done": "length", "long": expected}
    assert (str(error) if error else None) == outputs["long"].error
    assert engine.metrics.values["recoveries"] == (kind is not FailureKind.RAISED)


def test_when_no_recovery_is_left_finished_requests_are_kept_and_the_others_end_with_an_error() -> None:
    engine = fragile_engine(lost_at(4, 6, 8), max_recoveries=2)
    engine.submit([1], SamplingParams(max_tokens=3, ignore_eos=True), "short")
    engine.submit([2], LONG, "long")
    outputs, error = serve(engine)
    assert str(error).endswith("(pid 7 on host); no recovery of 2 is left")
    assert outputs["short"].token_ids == alone([1], 3, True)
    assert outputs["long"].finish_reason == "error"
    assert outputs["long"].error == str(error)
    whole = alone([2], 30, True)
    assert outputs["long"].token_ids == whole[: len(outputs["long"].token_ids)] != []
    assert not engine.has_unfinished


@pytest.mark.parametrize("again", [0, 2])
def test_a_loss_during_the_start_and_during_a_recovery(again: int) -> None:
    losses = {"start": lost_at(0, name="start"), "restart": lost_at(*range(again), name="restart")}
    engine = fragile_engine(lambda name: losses[name](name) if name in losses else None)
    assert engine.generate([[3]], LONG)[0].token_ids == alone([3], 30, True)
    assert engine.metrics.values["recoveries"] == 1 + again


def test_a_start_that_never_succeeds_ends() -> None:
    with pytest.raises(WorkerError, match="no recovery of 3 is left"):
        fragile_engine(lambda name: failure())


def test_no_place_any_more() -> None:
    def loss(name: str) -> Exception | None:
        if name == "restart":
            return PlacementError("placement of 2 ranks: too small; see `ray status`")
        return lost_at_third(name)

    lost_at_third = lost_at(2)
    engine = fragile_engine(loss)
    with pytest.raises(WorkerError, match=r"rank 1: .* no place for the ranks any more: placement of 2 ranks"):
        engine.generate([[3]], LONG)
    assert not engine.has_unfinished


def test_requests_that_do_not_fit_the_new_caches_end_and_the_others_go_on() -> None:
    def loss(name: str) -> Exception | None:
        if name == "restart":
            core._executor.num_blocks[COMPRESSED] = 1  # type: ignore[attr-defined]
        return at(name)

    at = lost_at(4)
    core = simulated_engine(compressed_blocks=8)
    executor: Any = Fragile(core._executor, loss)
    engine = EngineCore(core.config, executor, None, max_recoveries=3)
    engine.submit([1] * 400, LONG, "large")
    engine.submit([2], LONG, "small")
    outputs = {output.id: output for output in engine.stream_all()}
    assert outputs["small"].token_ids == alone([2], 30, True)
    assert outputs["large"].finish_reason == "error"
    assert outputs["large"].error == "needs 430 tokens of cache; after a recovery 256 fit"


@pytest.mark.parametrize("return_logits", [False, True])
def test_scores_that_no_longer_fit_are_refused(return_logits: bool) -> None:
    def loss(name: str) -> Exception | None:
        if name == "restart":
            core._executor.num_blocks[COMPRESSED] = 1  # type: ignore[attr-defined]
        return at(name)

    at = lost_at(2)
    core = simulated_engine(compressed_blocks=8, max_num_batched_tokens=256)
    executor: Any = Fragile(core._executor, loss)
    engine = EngineCore(core.config, executor, None, max_recoveries=3)
    with pytest.raises(WorkerError, match="sequence 0 needs 700 tokens of cache; after a recovery 256 fit"):
        engine.score([[1] * 700], return_logits)
    assert not engine.has_unfinished


def test_scores_are_counted_once() -> None:
    """What was scored before a loss is scored again, and not kept twice."""
    engine = fragile_engine(lost_at(1))
    request = engine.queue_request([1] * 600, LONG, "a")
    request.logprobs = [0.0] * 7
    engine.step()
    engine.step()
    assert request.logprobs == []


def test_idle_ranks_are_looked_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a request to run, the thread of the asyncio engine meets the loss, and the next request none."""
    monkeypatch.setattr(async_engine, "IDLE_POLL_S", 0.01)
    core = fragile_engine(lost_at(5, name="check"))

    async def main() -> None:
        engine = async_engine.AsyncEngine(EngineConfig(model="simulated"), start=lambda config: core)
        while not core.metrics.values["recoveries"]:
            await asyncio.sleep(0.01)
        outputs = [output async for output in await engine.submit([1], LONG)]
        assert outputs[-1].token_ids == alone([1], 30, True)
        await engine.shutdown()

    asyncio.run(asyncio.wait_for(main(), 60))
    assert core._executor.generation == 1


def test_the_log_says_what_was_lost_how_long_it_took_and_what_is_left(caplog: pytest.LogCaptureFixture) -> None:
    engine = fragile_engine(lost_at(2))
    engine.generate([[1]], LONG)
    begun, done = [record.getMessage() for record in caplog.records if record.name == "dsv4dist.engine.recovery"]
    lost = "rank 1: its process died (pid 7 on host); noticed 0.0 s after the last sign of life of all ranks"
    assert begun == f"lost {lost}; recovery 1 of 3 begins"
    assert done.startswith(f"recovered from {lost}; ")
    assert done.endswith(" s; 2 recoveries left")


def test_the_cause_comes_before_its_consequences() -> None:
    kinds = [FailureKind.COLLECTIVE, FailureKind.LOST, FailureKind.STUCK, FailureKind.DIED]
    failures = [RankFailure(rank, kind, "", float(rank)) for rank, kind in enumerate(kinds)]
    assert first_cause(failures).rank == 3
    assert first_cause(failures[:3]).rank == 2
