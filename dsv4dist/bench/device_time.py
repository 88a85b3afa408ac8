"""Times of device work: replays of a captured graph, and the ceilings of the device measured in the same way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from dsv4dist.bench.report import Spread

Call = Callable[[], object]
"""One launch, or a few, on the current stream; captures without host synchronisation."""

COPY_BYTES = 1 << 30
MATMUL_SIZE = 8192
MIN_SETS, MAX_SETS = 4, 64
"""Input sets that one graph goes through, at least and at most."""


@dataclass(frozen=True)
class Ceilings:
    """What the device reached: bytes per microsecond of a copy, operations per microsecond of matrix products.

    fp8_flops is the bf16 rate where torch has no fp8 product.
    """

    copy_bytes: float
    bf16_flops: float
    fp8_flops: float

    def floor_us(self, bytes_moved: int, flops: int, fp8: bool = False) -> float:
        """No version runs much faster: the larger of bytes and operations, each over its ceiling."""
        return max(bytes_moved / self.copy_bytes, flops / (self.fp8_flops if fp8 else self.bf16_flops))


@contextmanager
def captured(calls: Sequence[Call]) -> Iterator[torch.cuda.CUDAGraph]:
    """`calls`, one after the other, as one graph, on a stream that is current inside.

    Every call runs once before the capture (compilation, handles). All results stay allocated until the end.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            results = [call() for call in calls]
        yield graph
    del results


def time_graph(calls: Sequence[Call], replays: int) -> Spread:
    """Capture `calls`, one after the other, in one graph and replay it: microseconds per call.

    Three replays are not counted. The spread is that of whole replays: single calls inside a graph are not seen. As all
    results stay allocated, no call finds the memory it writes in a cache because the call before it wrote it too.
    """
    with captured(calls) as graph:
        for _ in range(3):
            graph.replay()
        ends = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
        for start, end in ends:
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
    times = [start.elapsed_time(end) * 1000 / len(calls) for start, end in ends]
    p10, median, p90 = np.percentile(times, (10, 50, 90))
    return Spread(float(median), float(p10), float(p90))


def num_sets(bytes_moved: int, cache_bytes: int) -> int:
    """Input sets to rotate, so that twice the cache's size passes between two uses of one; within the bounds."""
    return min(MAX_SETS, max(MIN_SETS, math.ceil(2 * cache_bytes / max(1, bytes_moved))))


def cache_bytes(device: torch.device) -> int:
    """Bytes of the device's last shared cache; 256 MiB where torch does not know it, as of MI300's."""
    if torch.version.hip:
        return 256 << 20  # the L2 that torch reports is small and private; the cache behind it is shared
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or 256 << 20


def measure_ceilings(device: torch.device, replays: int) -> tuple[Ceilings, dict[str, Spread]]:
    """The ceilings and the times they come from: `copy` of 1 GiB; `matmul bf16` and, if torch has it, `matmul fp8`.

    The copy is by a kernel (negation), which reaches far more than the driver's own device-to-device copy.

    Products are of two 8192 x 8192 matrices; the fp8 one has one scale per tensor.
    """
    source = torch.randn(COPY_BYTES // 4, device=device)
    spreads = {"copy": time_graph([partial(torch.neg, source, out=torch.empty_like(source))] * 2, replays)}
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
    spreads["matmul bf16"] = time_graph([partial(torch.matmul, a, b.T)] * 2, replays)
    one, a8, b8 = torch.ones(1, device=device), a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    with suppress(AttributeError, RuntimeError, NotImplementedError, ValueError):  # no fp8 products, or not of these
        by_tensor = F.ScalingType.TensorWise
        product = partial(F.scaled_mm, a8, b8.T, one, by_tensor, one, by_tensor, use_fast_accum=True)
        spreads["matmul fp8"] = time_graph([product] * 2, replays)
    operations = 2 * MATMUL_SIZE**3
    rates = [operations / spreads[name].median_us for name in ("matmul bf16", "matmul fp8") if name in spreads]
    return Ceilings(2 * COPY_BYTES / spreads["copy"].median_us, rates[0], rates[-1]), spreads
