"""Every rank selects the same keys in the same order: their outputs are summed, so one that differs spoils all."""

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
