"""All-reduce over a group of ranks: whether the sums are right, and how long they take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from dsv4dist.distributed.comm import Communicator
from dsv4dist.distributed.tp import TpInfo
from dsv4dist.errors import WorkerError
from dsv4dist.workers.executor import Int32Array, StepResult

SIZES = {"64 KB": 64 << 10, "1 MB": 1 << 20, "64 MB": 64 << 20}
REPEATS = {"64 KB": 20, "1 MB": 20, "64 MB": 4}
_WARM_UP = 2
_MODULUS = 251


@dataclass
class CollectiveRunner:
    """A rank that only all-reduces: word 0 of a packet says how many bytes, word 1 how often for the timing."""

    tp: TpInfo
    comm: Communicator
    device: torch.device
    skipped_draft_tensors: int = 0

    def load(self) -> None:
        return None

    def cache_block_limits(self) -> dict[str, int]:
        return {}

    def allocate(self, num_blocks: dict[str, int]) -> str:
        return "nothing is decoded"

    def execute(self, packet: Int32Array) -> Iterator[StepResult]:
        """One result whose logprobs are the microseconds of each timed call on this rank."""
        num_bytes, repeats = int(packet[0]), int(packet[1])
        self._check(num_bytes // 4)
        times = self._time(num_bytes // 4, repeats)
        nothing = np.empty((0, 0), np.float32)
        yield StepResult(0, 0, np.zeros(1, np.int32), np.array(times, np.float32), nothing, 0)

    def _check(self, count: int) -> None:
        """Sum fp32 integers, other ones on each rank and at each place: exact.  Raises: WorkerError on a wrong rank."""
        place = torch.arange(count, device=self.device)
        parts = [(place * (rank + 1) + rank) % _MODULUS for rank in range(self.tp.size)]
        expected = torch.stack(parts).sum(0)
        found = self.comm.all_reduce(parts[self.tp.rank].float())
        wrong = torch.nonzero(found != expected).flatten()
        if len(wrong):
            first = int(wrong[0])
            raise WorkerError(
                f"all_reduce of {count * 4} bytes: {len(wrong)} of {count} sums are wrong, the first at {first}: "
                f"{float(found[first]):g} for {int(expected[first])}"
            )

    def _time(self, count: int, repeats: int) -> list[float]:
        tensor, times = torch.zeros(count, device=self.device), []
        for run in range(_WARM_UP + repeats):
            self.comm.barrier()
            self._wait()
            started = time.perf_counter()
            self.comm.all_reduce(tensor)
            self._wait()
            if run >= _WARM_UP:
                times.append((time.perf_counter() - started) * 1e6)
        return times

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def bus_gb_per_s(num_bytes: int, ranks: int, microseconds: float) -> float:
    """Bytes that each rank must send, 2 (n - 1) / n of the tensor, per time: comparable between group sizes."""
    return 2 * (ranks - 1) / ranks * num_bytes / microseconds / 1e3
