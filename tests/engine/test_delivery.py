"""What comes back from an engine: every request once, every state in order, whatever happens to it meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dsv4dist import SamplingParams
from dsv4dist.engine.async_engine import AsyncEngine
from dsv4dist.engine.core import EngineCore
from dsv4dist.errors import ConfigError, RequestError, WorkerError
from dsv4dist.workers.executor import NO_TOKEN
from tests.support.simulation import EOS, alone, simulated_engine


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def without_logits(engine: EngineCore, first: int, length: int) -> None:
    """No finite logits for contexts that begin with `first` once they have `length` tokens."""
    sample = engine._executor._sample  # type: ignore[attr-defined]

    def failing(context: np.ndarray, num_drafts: int) -> list[int]:
        words = list(sample(context, num_drafts))
        return [NO_TOKEN] * len(words) if context[0] == first and len(context) >= length else words

    engine._executor._sample = failing  # type: ignore[attr-defined]


@pytest.mark.parametrize("run_ahead", [1, 8])
def test_a_stream_ends_with_the_finished_state_of_every_request(run_ahead: int) -> None:
    engine = simulated_engine(run_ahead=run_ahead)
    without_logits(engine, first=7, length=5)
    without_logits(engine, first=8, length=9)
    states: dict[str, list[tuple[int, str | None]]] = {}
    for output in engine.stream([[7] * 5, [8] * 5, [3] * 5, [4] * 5], params(20)):
        states.setdefault(output.id, []).append((len(output.token_ids), output.finish_reason))
        if output.id == "3" and len(output.token_ids) == 6 and output.finish_reason is None:
            assert engine.abort("3")
    assert {name: one[-1] for name, one in states.items()} == {
        "0": (0, "error"),
        "1": (4, "error"),
        "2": (20, "length"),
        "3": (6, "abort"),
    }
    for one in states.values():
        assert len(set(one)) == len(one)
        assert [reason for _, reason in one[:-1]] == [None] * (len(one) - 1)
    assert not engine.take_finished()


def test_stream_all_may_be_left_between_requests_that_ended_together() -> None:
    engine = simulated_engine()
    for index in range(5):
        engine.submit([index], params(4), str(index))
    given = []
    while engine.has_unfinished or len(given) < 5:
        given.append(next(engine.stream_all()).id)
    assert sorted(given) == list("01234")


def test_streams_and_other_calls_share_steps_and_keep_their_own_requests() -> None:
    engine = simulated_engine()
    engine.submit([9], params(3), "queued")
    stream = engine.stream([[1], [2]], params(6))
    states = [next(stream)]
    (other,) = engine.generate([[3]], params(12))
    assert [output.id for output in engine.stream_all()] == ["queued"]
    states += list(stream)
    assert other.token_ids == alone([3], 12, True)
    ends = {output.id: output.token_ids for output in states if output.finish_reason is not None}
    assert ends == {"0": alone([1], 6, True), "1": alone([2], 6, True)}
    assert len([output for output in states if output.finish_reason is not None]) == 2
    assert not engine._awaited


def test_an_interrupted_generate_leaves_nothing_behind() -> None:
    engine = simulated_engine()
    collect, calls = engine._executor.collect, []

    def interrupted() -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return collect()

    engine._executor.collect = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1], [2]], params(30))
    assert not engine.has_unfinished
    assert list(engine.stream_all()) == []
    assert engine.generate([[1]], params(9))[0].token_ids == alone([1], 9, True)


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_an_engine_in_this_process_survives_an_interrupted_step(
    error: type[BaseException],
    checkpoint: Callable[..., Path],
    engine: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = engine(checkpoint("tiny"), max_recoveries=3)
    expected = started.generate([[1, 2, 3]], params(9))[0].token_ids
    decode, calls = started._executor.runner._decode, []

    def interrupted(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise error
        return decode(*arguments)

    monkeypatch.setattr(started._executor.runner, "_decode", interrupted)
    with pytest.raises(error):
        started.generate([[4, 5], [6]], params(9))
    assert started.generate([[1, 2, 3]], params(9))[0].token_ids == expected
    assert not started.has_unfinished


def test_blocks_for_steps_ahead_that_do_not_fit_are_not_taken() -> None:
    """Windows are sized for what runs; what a shortened packet had taken beyond it was missing in the next step."""
    count = 8
    engine = simulated_engine(
        max_num_seqs=count, max_num_batched_tokens=128, run_ahead=16, compressed_blocks=count, prefix_caching=False
    )
    for index in range(count - 1):
        engine.submit([index + 1] * 10, params(200), f"short {index}")
    engine.submit([40] * 255, params(200), "edge")
    for _ in range(300):
        engine.step()
        edge = [one for one in engine._scheduler.running if one.id == "edge"]
        if edge and edge[0].num_computed >= 256 and engine._sent is None:
            break
    engine.abort("edge")
    engine.submit([41] * 128, params(5), "new")
    given = {output.id: output.token_ids for output in engine.stream_all()}
    assert given.pop("new") == alone([41] * 128, 5, True)
    assert len(given) == count
    for index in range(count - 1):
        assert given[f"short {index}"] == alone([index + 1] * 10, 200, True)


def test_readers_may_change_what_they_get() -> None:
    for output in simulated_engine().stream([[1, 2, 3]], params(12)):
        output.prompt_token_ids.extend(output.token_ids)
        last = output
        output.token_ids[:] = output.token_ids[-1:]
    assert last.token_ids == alone([1, 2, 3], 12, True)[-1:]


def test_step_numbers_begin_again() -> None:
    engine = simulated_engine(run_ahead=8)
    engine._next_step = (1 << 30) - 3
    assert engine.generate([[1]], params(40))[0].token_ids == alone([1], 40, True)
    assert engine._next_step < 40


def test_prompts_of_another_form_are_refused() -> None:
    engine = simulated_engine()
    for prompts, message in (("hello", "prompts is a text"), ([1, 2], "prompts is a list of token ids")):
        with pytest.raises(RequestError, match=message):
            engine.generate(prompts)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="0 sampling parameters for 1 prompts"):
        engine.generate([[1]], [])
    with pytest.raises(RequestError, match="1 ids for 2 sequences"):
        engine.score([[1], [2]], request_ids=["a"])
    for prompt in (torch.tensor([1.7, 2.2]), np.array([1.5])):
        with pytest.raises(RequestError, match="is not an integer"):
            engine.generate([prompt])  # type: ignore[list-item]
    (output,) = engine.generate([np.array([1, 2])], SamplingParams(max_tokens=np.uint8(200), ignore_eos=True))  # type: ignore[arg-type, list-item]
    assert output.token_ids == alone([1, 2], 200, True)


def test_scores_of_an_aborted_sequence_are_an_error() -> None:
    engine = simulated_engine(max_num_batched_tokens=64)
    collect = engine._executor.collect

    def aborting() -> Any:
        engine.abort("second")
        return collect()

    engine._executor.collect = aborting  # type: ignore[method-assign]
    with pytest.raises(WorkerError, match="scores: sequence second was aborted"):
        engine.score([[1] * 100, [2] * 100], request_ids=["first", "second"])


def test_counts_are_of_every_row_and_states_of_now() -> None:
    engine = simulated_engine(run_ahead=16)
    for name in "ab":
        engine.submit([EOS + 1] * 5, params(100), name)
    for _ in range(4):
        engine.step()
    for name in "ab":
        engine.abort(name)
    engine.step()
    engine.step()
    values = engine.metrics.values
    assert values["running_requests"] == values["waiting_requests"] == 0
    assert not any(engine.metrics.block_use.values())
    engine.generate([[1]], params(3))
    assert values["computed_tokens"] == engine._executor.rows  # type: ignore[attr-defined]


def test_a_trace_without_a_place_ends_the_start_in_order(tmp_path: Path) -> None:
    given, ended = simulated_engine(), []
    given._executor.shutdown = lambda: ended.append(1)  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"--trace .*missing/t\.json: No such file"):
        EngineCore(given.config, given._executor, None, trace=tmp_path / "missing" / "t.json")
    assert ended == [1]


def test_texts_of_a_stream_grow(checkpoint: Callable[..., Path], engine: Callable[..., Any]) -> None:
    """Also where a character is spread over several tokens."""
    started = engine(checkpoint("tiny"))
    prompts = [[index] for index in range(1, 9)]
    texts: dict[str, list[str]] = {}
    options = SamplingParams(max_tokens=40, temperature=5.0, ignore_eos=True)
    for output in started.stream(prompts, options):
        texts.setdefault(output.id, []).append(output.text)
        last = started.tokenizer.decode(output.token_ids)
        assert last.startswith(output.text)
    for one in texts.values():
        assert all(later.startswith(earlier) for earlier, later in pairwise(one))
    assert any("\N{REPLACEMENT CHARACTER}" in one[-1] for one in texts.values()), "random bytes are not all characters"


def test_an_id_is_free_again_after_an_abort() -> None:
    async def main() -> None:
        engine = AsyncEngine(None, start=lambda _: simulated_engine())  # type: ignore[arg-type]
        for _ in range(20):
            outputs = await engine.submit([1], params(1000), "x")
            await engine.abort("x")
            again = await engine.submit([2], params(3), "x")
            assert [one.finish_reason async for one in outputs][-1] == "abort"
            assert [one.token_ids async for one in again][-1] == alone([2], 3, True)
        await engine.shutdown()

    asyncio.run(main())


def test_ranks_that_do_not_end_in_order_do_not_keep_callers_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("threading.excepthook", lambda arguments: None)

    async def main() -> None:
        core = simulated_engine()

        def fails() -> None:
            raise WorkerError("rank 1 does not end")

        core.shutdown = fails  # type: ignore[method-assign]
        engine = AsyncEngine(None, start=lambda _: core)  # type: ignore[arg-type]
        await engine.shutdown()
        with pytest.raises(WorkerError, match="shut down"):
            await asyncio.wait_for(engine.submit([1], params(1)), 5)

    asyncio.run(main())
