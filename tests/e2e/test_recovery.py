"""Ranks of a real model killed in every phase: the outputs are those of a run without a fault, and nothing is left."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dsv4dist import Engine, SamplingParams
from dsv4dist.step.sections import HEADER
from dsv4dist.workers.packet import StepKind
from dsv4dist.workers.processes import children, command_line, descendants, find_process, wait_gone
from tests.cli.support import json_lines
from tests.cli.test_signals import Command, has_a_line, start, wait_for, wait_until_gone
from tests.conftest import cpu_config
from tests.support.compare import random_tokens

__all__ = ["start"]  # a fixture
pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

PROMPTS = [random_tokens(length) for length in (1, 5, 130, 300)]
# Greedy ones and sampled ones; the prompts take several chunks, mixed with decode steps.
PARAMS = [
    SamplingParams(max_tokens=24, ignore_eos=True),
    SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=17),
    SamplingParams(max_tokens=24, ignore_eos=True),
    SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8, top_p=0.9, seed=18),
]
OPTIONS: dict[str, Any] = {"max_num_batched_tokens": 160, "max_model_len": 512}


class Killer:
    """Kills ranks of an engine with SIGKILL: in a step of some kind, while they start, or at once."""

    def __init__(self, engine: Engine, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        from dsv4dist.workers.ray_group import RankGroup

        self.engine, self.rng = engine, random.Random(seed)
        self.kills: list[str] = []
        self.plan: list[str] = []
        """Where the next kills are to happen: a StepKind's name, or a phase of the start; in this order."""
        submit, call = engine._executor.submit, RankGroup.call

        def submit_and_kill(packet: Any, *args: Any) -> None:
            submit(packet, *args)
            kind = StepKind(packet[HEADER.index("kind")]).name
            if self.plan and self.plan[0] == kind and (kind != "DECODE" or self.rng.random() < 0.3):
                time.sleep(self.rng.uniform(0, 0.02))
                self.kill(self.plan.pop(0), [rank.pid for rank in engine.report.ranks])

        def call_and_kill(group: Any, method: str, *args: Any, **options: Any) -> Any:
            if self.plan and self.plan[0] == method:
                threading.Thread(target=self.kill_starting, args=(self.plan.pop(0), group)).start()
            return call(group, method, *args, **options)

        monkeypatch.setattr(engine._executor, "submit", submit_and_kill)
        monkeypatch.setattr(RankGroup, "call", call_and_kill)

    def kill(self, where: str, pids: list[int]) -> None:
        os.kill(self.rng.choice(pids), signal.SIGKILL)
        self.kills.append(where)

    def kill_starting(self, phase: str, group: Any) -> None:
        """Kill a rank of a group that may not know its processes yet."""
        pids = [place.process.pid for place in group.places]
        while not pids:
            pids = [one.pid for one in all_processes() if command_line(one.pid).startswith("ray::Worker")]
        time.sleep(self.rng.uniform(0, 0.02))
        self.kill(phase, pids)


def all_processes() -> list[Any]:
    return descendants(children(os.getpid()))


@pytest.fixture(scope="module")
def directory(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("tiny", quant=True)


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[list[int]]:
    with Engine(cpu_config(directory, **OPTIONS)) as engine:
        return [output.token_ids for output in engine.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[Engine]:
    before = all_processes()
    ray = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray", "address": "local"}
    with Engine(cpu_config(directory, max_recoveries=1000, **OPTIONS, **ray)) as engine:
        yield engine
        started = [process for process in all_processes() if process not in before]
        assert started
    assert wait_gone(started, 5) == []


def serve(engine: Engine) -> list[list[int]]:
    """What a user of the stream has seen; no token may come twice."""
    seen: dict[str, list[list[int]]] = {str(index): [] for index in range(len(PROMPTS))}
    for output in engine.stream(PROMPTS, PARAMS):
        seen[output.id].append(output.token_ids)
    for states in seen.values():
        lengths = [len(state) for state in states]
        assert lengths == sorted(set(lengths))
    return [states[-1] for states in seen.values()]


def test_eight_kills_in_every_phase_change_no_output(
    engine: Engine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert serve(engine) == expected
    killer = Killer(engine, 1, monkeypatch)
    killer.plan = ["PREFILL", "MIXED", "allocate"]
    assert serve(engine) == expected
    killer.kill("idle", [rank.pid for rank in engine.report.ranks])
    killer.plan = ["DECODE", "describe", "init"]
    assert serve(engine) == expected
    killer.plan = ["DECODE"]
    assert serve(engine) == expected
    assert not killer.plan
    assert len(killer.kills) == 8
    values = engine.metrics.values
    assert values["recoveries"] == engine._executor.generation == 8
    assert values["recovery_seconds"] > 0
    assert values["generated_tokens"] == 4 * 4 * 24
    alive = [process for process in all_processes() if command_line(process.pid).startswith("ray::Worker")]
    assert sorted(process.pid for process in alive) == sorted(rank.pid for rank in engine.report.ranks)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(5))
def test_fifty_kills_at_any_moment(
    engine: Engine, expected: list[list[int]], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    killer = Killer(engine, seed, monkeypatch)

    def strike() -> None:
        while len(killer.kills) < 10:
            time.sleep(rng.uniform(0, 12))
            found = {one.pid: command_line(one.pid) for one in all_processes()}
            ranks = {pid: line for pid, line in found.items() if line.startswith("ray::Worker")}
            if ranks:
                pid = rng.choice(list(ranks))
                killer.kill(ranks[pid], [pid])

    striker = threading.Thread(target=strike)
    striker.start()
    while striker.is_alive():
        assert serve(engine) == expected
    assert serve(engine) == expected
    print(killer.kills)


def ranks_of(command: Command) -> list[int]:
    """The processes of ranks that run steps."""
    return [pid for pid in command.descendants() if command_line(pid).startswith("ray::Worker.run")]


def test_when_no_recovery_is_left_finished_results_are_kept(
    checkpoint: Callable[..., Path], start: Callable[..., Command], tmp_path: Path
) -> None:
    requests = [{"id": "short", "prompt_token_ids": [1], "max_tokens": 1}]
    requests += [{"id": "long", "prompt_token_ids": [2], "max_tokens": 3000, "ignore_eos": True}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(one) + "\n" for one in requests))
    output = tmp_path / "out.jsonl"
    more = ["--tp", "2", "--device", "cpu", "--address", "local", "--max-recoveries", "0"]
    command = start(
        "generate", "--model", checkpoint("tiny-swa"), *more, "--input", tmp_path / "in.jsonl", "--output", output
    )
    wait_for(lambda: has_a_line(output), command)
    killed = ranks_of(command)[1]
    os.kill(killed, signal.SIGKILL)
    errors = command.end(0)
    assert command.process.returncode == 1
    rows = {row["id"]: row for row in json_lines(output)}
    assert rows["short"]["finish_reason"] == "length"
    assert rows["long"]["finish_reason"] == "error"
    assert f"its process died (pid {killed} on " in rows["long"]["error"]
    assert "; no recovery of 0 is left" in rows["long"]["error"]
    assert rows["long"]["error"] in errors
    assert "Traceback" not in errors
    wait_until_gone(command)


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.1, 1.0, 2.5])
def test_a_signal_during_a_recovery_ends_everything(
    delay_s: float, checkpoint: Callable[..., Path], start: Callable[..., Command]
) -> None:
    more = ["--tp", "2", "--device", "cpu", "--address", "local", "--max-tokens", "3000", "--ignore-eos"]
    command = start("generate", "--model", checkpoint("tiny-swa"), *more, "--prompt-ids", "1,2,3")
    wait_for(lambda: len(ranks_of(command)) == 2, command)
    os.kill(ranks_of(command)[0], signal.SIGKILL)
    time.sleep(delay_s)
    errors = command.end(signal.SIGTERM, group=False)
    assert command.process.returncode == 128 + signal.SIGTERM, errors
    assert "interrupted by SIGTERM" in errors
    assert "Traceback" not in errors
    wait_until_gone(command)


def test_a_driver_that_dies_takes_ranks_and_ray_with_it(
    checkpoint: Callable[..., Path], start: Callable[..., Command]
) -> None:
    more = ["--tp", "2", "--device", "cpu", "--address", "local", "--max-tokens", "3000", "--ignore-eos"]
    command = start("generate", "--model", checkpoint("tiny-swa"), *more, "--prompt-ids", "1,2,3")
    wait_for(lambda: len(ranks_of(command)) == 2, command)
    command.end(signal.SIGKILL, group=False)
    # Ray's two agents may look a minute for the node that ended; they hold neither a device nor a model.
    left = [process for pid in command.descendants() if (process := find_process(pid)) is not None]
    assert wait_gone([process for process in left if "Agent" not in command_line(process.pid)], 10) == []
