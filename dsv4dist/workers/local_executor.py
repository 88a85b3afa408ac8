"""The executor of one rank inside the calling process: for one device, and for tests."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from itertools import chain

import torch

from dsv4dist.distributed.comm import SingleProcess
from dsv4dist.distributed.tp import TpInfo
from dsv4dist.errors import UnsupportedError
from dsv4dist.workers.executor import RankInfo, StepResult, WorkerReport
from dsv4dist.workers.failure import FailureKind, RankFailure
from dsv4dist.workers.packet import Int32Array
from dsv4dist.workers.runner import RunnerFactory


class LocalExecutor:
    """Runs every step in the thread that calls `execute`."""

    generation = 0

    def __init__(self, factory: RunnerFactory) -> None:
        """Raises: UnsupportedError for a GPU that is not there."""
        if factory.config.device == "cuda" and not torch.cuda.is_available():
            raise UnsupportedError("--device: PyTorch finds no GPU here; use cpu, or install PyTorch for this GPU")
        device = torch.device("cuda:0" if factory.config.device == "cuda" else "cpu")
        self.runner = factory(TpInfo(), SingleProcess(), device)
        self._results: Iterator[StepResult] = iter(())

    def start(self) -> WorkerReport:
        """Load the model and allocate the caches."""
        started = time.monotonic()
        self.runner.load()
        num_blocks = self.runner.cache_block_limits()
        decode = self.runner.allocate(num_blocks)
        rank = RankInfo(0, "", socket.gethostname(), os.getpid(), str(self.runner.device), gpu_id="")
        self._report = WorkerReport(
            num_cache_blocks=num_blocks,
            ranks=[rank],
            skipped_draft_tensors=self.runner.skipped_draft_tensors,
            load_s=time.monotonic() - started,
            decode=decode,
        )
        return self._report

    def restart(self) -> WorkerReport:
        """Go on after an interrupted step, with the same weights and the same memory for caches."""
        self._results = iter(())
        return self._report

    def check(self) -> None:
        """The rank is there as long as the caller."""

    def submit(self, packet: Int32Array, num_steps: int = 1) -> None:
        self._results = chain(self._results, self.runner.execute(packet))

    def collect(self) -> StepResult:
        try:
            result = next(self._results, None)
        except BaseException:
            self._results = iter(())  # an iterator that raised gives nothing more
            raise
        if result is None:
            raise RankFailure(0, FailureKind.LOST, "its step was interrupted and has no result", time.time())
        return result

    def execute(self, packet: Int32Array) -> StepResult:
        self.submit(packet)
        return self.collect()

    def shutdown(self) -> None:
        """Nothing outlives the object."""
