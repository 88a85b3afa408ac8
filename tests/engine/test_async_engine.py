"""The asyncio engine on a simulated model: streams, cancellation, errors, shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from dsv4dist import EngineConfig, SamplingParams
from dsv4dist.engine.async_engine import AsyncEngine
from dsv4dist.engine.request import RequestOutput
from dsv4dist.errors import RequestError, WorkerError
from tests.support.simulation import alone, simulated_engine

PARAMS = SamplingParams(max_tokens=30, ignore_eos=True)


def run(body: Callable[[AsyncEngine], Awaitable[None]], break_at: int | None = None) -> AsyncEngine:
    def start(config: EngineConfig) -> object:
        core = simulated_engine(max_num_seqs=4)
        if break_at is not None:
            collect = core._executor.collect

            def failing() -> object:
                if core._executor.steps >= break_at:  # type: ignore[attr-defined]
                    raise WorkerError("rank 1: lost")
                return collect()

            core._executor.collect = failing  # type: ignore[method-assign,assignment]
        return core

    async def main() -> AsyncEngine:
        engine = AsyncEngine(EngineConfig(model="simulated"), start=start)  # type: ignore[arg-type]
        try:
            await asyncio.wait_for(body(engine), 60)
        finally:
            await asyncio.wait_for(engine.shutdown(), 20)
        assert not engine._thread.is_alive()
        return engine

    return asyncio.run(main())


async def collect(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


def test_many_at_once_each_as_alone() -> None:
    prompts = [[i] * (1 + 40 * i) for i in range(9)]

    async def body(engine: AsyncEngine) -> None:
        streams = [await engine.submit(prompt, PARAMS) for prompt in prompts]
        results = await asyncio.gather(*map(collect, streams))
        for prompt, outputs in zip(prompts, results, strict=True):
            assert outputs[-1].token_ids == alone(prompt, 30, True)
            assert outputs[-1].finish_reason == "length"
            lengths = [len(output.token_ids) for output in outputs]
            assert lengths == sorted(lengths)

    run(body)


def test_a_cancelled_consumer_aborts_its_request() -> None:
    async def body(engine: AsyncEngine) -> None:
        endless = SamplingParams(max_tokens=2000, ignore_eos=True)
        stream = await engine.submit([1], endless, "long")
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        other = await collect(await engine.submit([2], PARAMS))
        assert other[-1].token_ids == alone([2], 30, True)

    engine = run(body)
    assert not engine._engine.has_unfinished


def test_abort_ends_the_stream() -> None:
    async def body(engine: AsyncEngine) -> None:
        stream = await engine.submit([1], SamplingParams(max_tokens=2000, ignore_eos=True), "x")
        reading = asyncio.create_task(collect(stream))
        await asyncio.sleep(0.05)
        await engine.abort("x")
        outputs = await reading
        assert outputs[-1].finish_reason == "abort"

    run(body)


def test_a_bad_request_is_refused_and_the_others_go_on() -> None:
    async def body(engine: AsyncEngine) -> None:
        with pytest.raises(RequestError, match="empty"):
            await engine.submit([], PARAMS)
        assert (await collect(await engine.submit([3], PARAMS)))[-1].token_ids == alone([3], 30, True)

    run(body)


def test_lost_ranks_reach_every_consumer() -> None:
    async def serve(engine: AsyncEngine, token: int) -> list[RequestOutput]:
        return await collect(await engine.submit([token], PARAMS))

    async def body(engine: AsyncEngine) -> None:
        # The ranks may be lost while some are still submitting: then the submission raises.
        results = await asyncio.gather(*(serve(engine, i) for i in range(3)), return_exceptions=True)
        assert all(isinstance(result, WorkerError) for result in results)
        with pytest.raises(WorkerError, match="rank 1: lost"):
            await engine.submit([1], PARAMS)

    run(body, break_at=3)


def test_shutdown_ends_what_runs() -> None:
    seen: list[RequestOutput] = []

    async def body(engine: AsyncEngine) -> None:
        stream = await engine.submit([1], SamplingParams(max_tokens=2000, ignore_eos=True))
        reading = asyncio.create_task(collect(stream))
        await asyncio.sleep(0.05)
        await engine.shutdown()
        seen.extend(await reading)

    run(body)
    assert seen[-1].finish_reason == "abort"


def test_an_id_is_one_running_request() -> None:
    async def body(engine: AsyncEngine) -> None:
        first = await engine.submit([1], PARAMS, "x")
        with pytest.raises(RequestError, match="'x' is running"):
            await engine.submit([2], PARAMS, "x")
        assert (await collect(first))[-1].token_ids == alone([1], 30, True)
        again = await collect(await engine.submit([2], PARAMS, "x"))
        assert again[-1].token_ids == alone([2], 30, True)

    run(body)


def test_dropping_what_has_ended_leaves_the_next_of_its_id_alone() -> None:
    async def body(engine: AsyncEngine) -> None:
        unread = await engine.submit([1], SamplingParams(max_tokens=1), "x")
        await collect(await engine.submit([3], PARAMS))
        second = await engine.submit([2], PARAMS, "x")
        del unread
        outputs = await collect(second)
        assert outputs[-1].token_ids == alone([2], 30, True)
        assert outputs[-1].finish_reason == "length"

    run(body)


def test_streams_that_are_never_read_abort() -> None:
    long = SamplingParams(max_tokens=1900, ignore_eos=True)

    async def body(engine: AsyncEngine) -> None:
        submitting = asyncio.create_task(engine.submit([1], long, "cancelled"))
        await asyncio.sleep(0)
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting
        closed = await engine.submit([1], long, "closed")
        await closed.aclose()  # type: ignore[attr-defined]
        dropped = await engine.submit([1], long, "dropped")
        del dropped
        await collect(await engine.submit([3], PARAMS))
        assert not engine._engine.has_unfinished

    run(body)


def test_a_closed_event_loop_ends_its_request_only() -> None:
    engine = AsyncEngine(EngineConfig(model="simulated"), start=lambda _: simulated_engine(max_num_seqs=4))  # type: ignore[arg-type,return-value]
    kept: list[AsyncIterator[RequestOutput]] = []

    async def leave() -> None:
        kept.append(await engine.submit([1], SamplingParams(max_tokens=1900, ignore_eos=True)))

    async def stay() -> None:
        outputs = await collect(await asyncio.wait_for(engine.submit([2], PARAMS), 20))
        assert outputs[-1].token_ids == alone([2], 30, True)
        await engine.shutdown()

    asyncio.run(leave())
    asyncio.run(stay())
    assert not engine._thread.is_alive()


def test_any_failure_reaches_users_and_ends_the_ranks() -> None:
    core = simulated_engine(max_num_seqs=4)
    ended: list[bool] = []
    end = core.shutdown

    def broken() -> object:
        raise ValueError("no such thing")

    core._executor.collect = broken  # type: ignore[method-assign,assignment]
    core.shutdown = lambda: (ended.append(True), end())[1]  # type: ignore[method-assign,assignment,return-value]

    async def main() -> None:
        engine = AsyncEngine(EngineConfig(model="simulated"), start=lambda _: core)
        with pytest.raises(WorkerError, match="no such thing"):
            await collect(await engine.submit([1], PARAMS))
        await engine.shutdown()

    asyncio.run(main())
    assert ended
