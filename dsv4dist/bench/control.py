"""What a step costs beside its computation, driver to every rank and back: over the channel, and over Ray calls."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dsv4dist.bench.report import Spread, time_calls
from dsv4dist.distributed.comm import Communicator
from dsv4dist.distributed.tp import TpInfo
from dsv4dist.workers.executor import Int32Array, StepResult
from dsv4dist.workers.ray_executor import RayExecutor

IDLE_S = 2.0


@dataclass
class EmptyRunner:
    """A rank that computes nothing: word 0 of a packet says how many results it wants."""

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
        nothing = np.empty(0, np.float32)
        for step in range(int(packet[0])):
            yield StepResult(0, step, np.zeros(8, np.int32), nothing, nothing.reshape(0, 0), 0)


def bench_control(
    num_ranks: int, packet_bytes: int, steps_per_packet: list[int], repeats: int
) -> Iterator[dict[str, Any]]:
    """Rows of microseconds a step, driver to ranks and back, with ranks on this machine's CPU.

    method  `ray_call`: a method call on every actor with the packet, then `ray.get`; `channel`: the step channel, with
            k steps per packet and a result for each; `idle`: share of a core that a waiting rank uses
    """
    executor = RayExecutor(EmptyRunner, num_ranks, "cpu", address="local")
    shape = {"ranks": num_ranks, "packet_bytes": packet_bytes}
    try:
        report = executor.start()
        packet = np.zeros(packet_bytes // 4, np.int32)
        packet[0] = 1
        yield {
            "bench": "control",
            "method": "ray_call",
            "k": 1,
            **shape,
            **asdict(_ray_calls(num_ranks, packet, repeats)),
        }
        for k in steps_per_packet:
            packet[0] = k
            whole = time_calls(partial(_round_trip, executor, packet, k), repeats)
            per_step = {name: value / k for name, value in asdict(whole).items()}
            yield {"bench": "control", "method": "channel", "k": k, **shape, **per_step}
        pids = [rank.pid for rank in report.ranks]
        before = sum(map(_cpu_seconds, pids))
        time.sleep(IDLE_S)
        share = (sum(map(_cpu_seconds, pids)) - before) / IDLE_S / num_ranks
        yield {"bench": "control", "method": "idle", **shape, "cores_per_rank": round(share, 4)}
    finally:
        executor.shutdown()


def _round_trip(executor: RayExecutor, packet: Int32Array, k: int) -> None:
    executor.submit(packet, k)
    for _ in range(k):
        executor.collect()


def _ray_calls(num_ranks: int, packet: Int32Array, repeats: int) -> Spread:
    import ray

    class Plain:
        def step(self, packet: Int32Array) -> Int32Array:
            return np.zeros(8, np.int32)

    actor_class = ray.remote(num_cpus=0)(Plain)
    actors = [actor_class.remote() for _ in range(num_ranks)]
    try:
        return time_calls(lambda: ray.get([actor.step.remote(packet) for actor in actors]), repeats)
    finally:
        for actor in actors:
            ray.kill(actor)


def _cpu_seconds(pid: int) -> float:
    """Time on a processor that a process has used (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
