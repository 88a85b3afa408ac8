"""A runner without a model: it adds numbers over the ranks, and fails in every way that the tests need."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch

from dsv4dist.distributed.comm import Communicator
from dsv4dist.distributed.tp import TpInfo
from dsv4dist.workers.executor import StepResult


class Order(IntEnum):
    SUM = 0  # value x (rank + 1), added over the ranks
    RAISE = 1  # on one rank, while the others wait in a collective
    SLEEP = 2  # on one rank, for ever
    EXIT = 3  # on one rank, without a word
    LOGITS = 4  # value rows of 100 known logits
    EMPTY = 5  # nothing, not even a collective


def packet(order: Order, step_id: int, value: int = 0, rank: int = -1, generation: int = 0, words: int = 5) -> Any:
    made = np.zeros(words, dtype=np.int32)
    made[:5] = (order, step_id, value, rank, generation)
    return made


@dataclass
class ToyRunner:
    tp: TpInfo
    comm: Communicator
    device: torch.device
    skipped_draft_tensors: int = 3
    fail_load_on: int = -1
    exit_load_on: int = -1
    num_blocks: Any = None

    def load(self) -> None:
        if self.tp.rank == self.exit_load_on:
            os._exit(7)
        if self.tp.rank == self.fail_load_on:
            raise FileNotFoundError("no\nweights here")

    def cache_block_limits(self) -> dict[str, int]:
        return {"swa": 10 - self.tp.rank, "csa": 20 + self.tp.rank}

    def allocate(self, num_blocks: dict[str, int]) -> str:
        self.num_blocks = num_blocks
        return "eager: a toy"

    def execute(self, packet: Any) -> Iterator[StepResult]:
        yield self._execute(packet)

    def _execute(self, packet: Any) -> StepResult:
        order, step_id, value, rank, generation = (int(word) for word in packet[:5])
        if rank == self.tp.rank:
            if order == Order.RAISE:
                raise ValueError("toy failure\non two lines")
            if order == Order.SLEEP:
                time.sleep(3600)
            if order == Order.EXIT:
                os._exit(9)
        total = torch.full((3,), float(value * (self.tp.rank + 1)))
        if order != Order.EMPTY:
            self.comm.all_reduce(total)
        rows = value if order == Order.LOGITS else 0
        return StepResult(
            generation=generation,
            step_id=step_id,
            token_ids=total.to(torch.int32).numpy(),
            logprobs=np.array([torch.get_num_threads(), os.environ["OMP_NUM_THREADS"] == "1"], dtype=np.float32),
            logits=np.arange(rows * 100, dtype=np.float32).reshape(rows, 100),
            elapsed_us=17,
        )


@dataclass(frozen=True)
class ToyFactory:
    options: tuple[tuple[str, Any], ...] = ()

    def __call__(self, tp: TpInfo, comm: Communicator, device: torch.device) -> ToyRunner:
        return ToyRunner(tp, comm, device, **dict(self.options))
