"""Metrics and the step trace: what they count, and that a failing run leaves them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsv4dist import SamplingParams
from dsv4dist.engine.trace import StepTrace
from dsv4dist.errors import WorkerError
from tests.support.simulation import simulated_engine


def test_metrics_count_what_happened() -> None:
    engine = simulated_engine(max_num_seqs=2, compressed_blocks=4, prefix_caching=True)
    prompt = [1] * 300
    engine.generate([prompt, [2] * 300, [3] * 300], SamplingParams(max_tokens=230, ignore_eos=True))
    engine.generate([prompt], SamplingParams(max_tokens=1))
    values = engine.metrics.values
    assert values["generated_tokens"] == 3 * 230 + 1
    assert values["preemptions"] == engine._scheduler.num_preemptions > 0
    assert values["running_requests"] == values["waiting_requests"] == 0
    assert values["computed_tokens"] == engine._executor.rows  # type: ignore[attr-defined]
    assert values["cached_tokens"] == engine._scheduler.prefix_cache.stats.reused_tokens  # type: ignore[union-attr]
    assert values["prefix_queries"] == 4
    assert values["prefix_hits"] == (values["cached_tokens"] > 0)
    assert set(engine.metrics.block_use) == {"window", "compressed", "csa_state", "hca_state"}
    assert all(use == 0 for use in engine.metrics.block_use.values())


def test_the_trace_is_whole_json_even_after_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    engine = simulated_engine()
    engine._trace = StepTrace(path)
    collect = engine._executor.collect

    def failing() -> object:
        if engine._executor.steps == 4:  # type: ignore[attr-defined]
            raise WorkerError("rank 0: lost")
        return collect()

    engine._executor.collect = failing  # type: ignore[method-assign,assignment]
    with pytest.raises(WorkerError):
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=9, ignore_eos=True))
    engine.shutdown()
    engine.shutdown()
    events = json.loads(path.read_text())["traceEvents"]
    assert [event["name"] for event in events[:4]] == ["plan", "pack", "execute", "account"]
    assert sum(event["name"] == "execute" for event in events) == 5
    assert all(event["dur"] >= 0 and event["ph"] == "X" for event in events)
    assert events[2]["args"]["tokens"] == 3


def test_a_trace_that_cannot_be_written_ends_without_ending_the_run(caplog: pytest.LogCaptureFixture) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs Linux")
    served = 0
    with StepTrace(Path("/dev/full")) as trace:
        for _ in range(1000):  # more than a file buffers
            with trace.span("step", text="x" * 99):
                served += 1
    assert served == 1000
    assert [record.message for record in caplog.records] == ["the trace ends early: /dev/full: No space left on device"]


def test_an_empty_trace_is_json(tmp_path: Path) -> None:
    with StepTrace(tmp_path / "t.json"):
        pass
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"] == []
