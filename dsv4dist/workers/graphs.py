"""Decode steps as captured graphs: recorded once per padded size over the step buffer, then replayed (CUDA and HIP)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dsv4dist.config.resolve import RunConfig
from dsv4dist.distributed.comm import Communicator
from dsv4dist.step.buffers import StepBuffers

DecodeStep = Callable[[int, bool], torch.Tensor]
"""(bucket, all_greedy) -> new tokens: a function of the step buffer's contents alone."""


@dataclass(frozen=True)
class CaptureRow:
    """What the graphs of one bucket took: seconds, and bytes that the shared pool grew by."""

    bucket: int
    seconds: float
    num_bytes: int


class DecodeGraphs:
    """Two graphs per bucket, one of them for steps in which nobody draws.

    All share one memory pool, so that what a replay returned must be read before the next one. The addresses that
    graphs have baked in are compared before each replay with those at capture, for the tensors in `watched`.
    """

    def __init__(self, decode: DecodeStep, buffers: StepBuffers, watched: Sequence[torch.Tensor] = ()) -> None:
        self._decode, self._buffers, self._watched = decode, buffers, watched
        self._addresses = [one.data_ptr() for one in watched]
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def warm_up(self) -> None:
        """Run every step once, of padding only: compiles kernels, fills library caches, warms collectives."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for bucket in self._largest_first():
                for all_greedy in (True, False):
                    self._buffers.clear(bucket)
                    self._decode(bucket, all_greedy)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()

    def capture(self) -> list[CaptureRow]:
        """Record all graphs."""
        pool = torch.cuda.graph_pool_handle()
        rows = []
        for bucket in self._largest_first():
            started, before = time.monotonic(), torch.cuda.memory_reserved()
            for all_greedy in (True, False):
                graph = torch.cuda.CUDAGraph()
                # Other threads, such as a collective library's watchdog, go on using the device meanwhile.
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                    tokens = self._decode(bucket, all_greedy)
                self._graphs[bucket, all_greedy] = graph, tokens
            torch.cuda.synchronize()
            rows.append(CaptureRow(bucket, time.monotonic() - started, torch.cuda.memory_reserved() - before))
        return rows

    def replay(self, bucket: int, all_greedy: bool) -> torch.Tensor:
        """Enqueue the step that the buffer holds; the next replay overwrites what this one returns."""
        for one, address in zip(self._watched, self._addresses, strict=True):
            assert one.data_ptr() == address, "a tensor that captured graphs read has moved"
        graph, tokens = self._graphs[bucket, all_greedy]
        graph.replay()
        return tokens

    def _largest_first(self) -> list[int]:
        """The smaller graphs then fit into the memory of the larger ones."""
        return sorted(self._buffers.shapes, reverse=True)


def eager_reason(config: RunConfig, kernels: str, comm: Communicator, device: torch.device) -> str | None:
    """Why decode steps cannot be captured here; None if they can."""
    if device.type != "cuda":
        return "there is no GPU"
    if config.enforce_eager:
        return "--enforce-eager"
    if kernels == "reference":
        return "the reference kernels read lengths on the host"
    if not comm.capturable:
        return "collectives over gloo run on the host"
    return None


def capture_on_all_ranks(
    graphs: DecodeGraphs, comm: Communicator, device: torch.device
) -> tuple[list[CaptureRow], str | None]:
    """Capture on every rank or on none: what the graphs took, and else why there are none.

    Warming up runs collectives, so an error there ends the run as it does in any other step.
    """
    graphs.warm_up()
    comm.barrier()
    rows, reason = [], None
    try:
        rows = graphs.capture()
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
    failed = int(comm.all_reduce(torch.tensor([reason is not None], dtype=torch.int32, device=device)).item())
    if failed and reason is None:
        reason = f"{failed} of the other ranks could not capture"
    return rows, reason


def describe_capture(rows: Sequence[CaptureRow]) -> str:
    """One line for people."""
    buckets = ", ".join(f"{row.bucket}: {row.seconds:.2f} s {row.num_bytes / 2**20:.0f} MiB" for row in rows)
    seconds, size = sum(row.seconds for row in rows), sum(row.num_bytes for row in rows) / 2**20
    return f"captured graphs for {len(rows)} token counts in {seconds:.1f} s, {size:.0f} MiB ({buckets})"
