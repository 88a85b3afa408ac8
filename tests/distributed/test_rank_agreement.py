"""Ranks decide alike: which keys they select, in which order, and whether decode steps are captured.

Outputs are summed, so that one rank that selects others spoils all; a collective in a graph on one rank waits for ever
for an eager one on another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dsv4dist import EngineConfig, SamplingParams
from dsv4dist.config.resolve import resolve
from dsv4dist.distributed.comm import Communicator
from dsv4dist.workers.graphs import CaptureRow, capture_on_all_ranks
from dsv4dist.workers.local_executor import LocalExecutor
from dsv4dist.workers.runner import ModelRunner
from tests.distributed.test_comm import together
from tests.support.compare import random_tokens
from tests.support.stepping import Decoder

NUM_STEPS = 40


def selections(directory: Path, comm: Communicator) -> tuple[list[str], int, list[list[int]]]:
    """Digests of every key list that the indexers of one rank gave, how many entries all had, and the tokens."""
    size = comm.tp.size
    config = EngineConfig(directory, size, device="cpu", dtype="bfloat16", max_model_len=1024, max_num_seqs=4)
    runner = ModelRunner(resolve(config, gpu_available=False), comm.tp, comm, torch.device("cpu"))
    digests, selected = [], 0
    select = runner.ops.select_key_list

    def recorded(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal selected
        indices, indptr = select(*arguments)
        used = indices[: int(indptr[-1])]
        digests.append(blake2b(used.numpy().tobytes() + indptr.numpy().tobytes()).hexdigest())
        selected += len(used)
        return indices, indptr

    runner.ops = replace(runner.ops, select_key_list=recorded)

    class Executor(LocalExecutor):
        def __init__(self) -> None:
            self.runner = runner
            self._results = iter(())

    executor = Executor()
    engine = SimpleNamespace(config=runner.config, report=executor.start(), _executor=executor)
    prompts = [random_tokens(length, seed=length) for length in (5, 130, 700)]
    prompts.append([7] * 600)  # keys that differ by their rotation only, in bfloat16: scores that tie
    params = [SamplingParams(temperature=float(i % 2), seed=i + 1) for i in range(len(prompts))]
    one = Decoder(engine, prompts, params)
    one.prefill()
    for step in range(NUM_STEPS):
        one.step([0, 1, 2, 3] if step % 3 else [3, 1])
    return digests, selected, one.outputs


def test_four_ranks_select_the_same_keys(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint("tiny", overrides={"o_groups": 4})
    first, *others = together(4, partial(selections, directory))
    assert len(first[0]) > NUM_STEPS
    assert first[1] > 0
    assert all(one == first for one in others)


class _Capture:
    """Graphs of a device that is not there; `fails` says what its capture raises."""

    def __init__(self, fails: str | None) -> None:
        self.fails = fails

    def warm_up(self) -> None:
        pass

    def capture(self) -> list[CaptureRow]:
        if self.fails is not None:
            raise RuntimeError(self.fails)
        return [CaptureRow(8, 0.1, 0)]


def capturing(failing: tuple[int, ...], comm: Communicator) -> tuple[int, str | None]:
    graphs: Any = _Capture("no memory is left\nby the device" if comm.tp.rank in failing else None)
    rows, reason = capture_on_all_ranks(graphs, comm, torch.device("cpu"))
    return len(rows), reason


def test_all_ranks_replay_or_none() -> None:
    assert together(2, partial(capturing, ())) == [(1, None)] * 2
    assert together(3, partial(capturing, (1,))) == [
        (1, "1 of the other ranks could not capture"),
        (0, "no memory is left"),
        (1, "1 of the other ranks could not capture"),
    ]
