"""Checks of one device, and of all GPUs of a node among each other; each runs in a process that Ray gave these GPUs."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import torch

from dsv4dist.env import device_masks
from dsv4dist.workers.devices import device_index

GEMM_SIZE = {"cpu": 512, "cuda": 4096}
COPY_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
PEER_BYTES = 64 << 20
WARM_S = 0.2
"""A GPU needs so long to raise its clocks."""
_SPARSITY = 16


@dataclass(frozen=True)
class DeviceReport:
    """What one device did. `*_wrong` counts wrong results: rows of the product, words of the copy."""

    name: str
    gpu_id: str
    free_gib: float
    total_gib: float
    gemm_wrong: int
    gemm_tflop_per_s: float
    copy_wrong: int
    copy_gb_per_s: float


@dataclass(frozen=True)
class PeerReport:
    """How the GPUs of a node reach each other: pairs as `from->to`, by Ray's ids."""

    visible: int
    """GPUs that torch sees."""
    gb_per_s: dict[str, float] = field(default_factory=dict)
    no_access: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class GpuProbe:
    """A process that holds one GPU, or all GPUs of a node; the driver calls its methods through Ray."""

    def __init__(self) -> None:
        os.dup2(2, 1)  # a library's print would end up between the driver's own rows

    def gpu_id(self) -> str:
        """What Ray calls the first GPU that it gave to this process."""
        return _own_gpus()[0]

    def device_report(self) -> DeviceReport:
        """Memory, product and copy of the one GPU."""
        return measure_device(_own_gpus()[0], "cuda")

    def kernel_errors(self, model: str) -> dict[str, float]:
        """Every kernel against its reference, see kernels.py."""
        from dsv4dist.smoke.kernels import kernel_errors

        return kernel_errors(Path(model), _device(_own_gpus()[0]))

    def peer_report(self) -> PeerReport:
        """Copies between all pairs of the GPUs."""
        return measure_peers(_own_gpus())


def _own_gpus() -> list[str]:
    import ray

    return [str(one) for one in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]


def _device(gpu_id: str) -> torch.device:
    device = torch.device("cuda", device_index(gpu_id, device_masks(), torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def measure_device(gpu_id: str, kind: str) -> DeviceReport:
    """Measure the CPU, or the GPU that Ray calls `gpu_id`."""
    device = torch.device("cpu") if kind == "cpu" else _device(gpu_id)
    name, free, total = "cpu", 0, 0
    if kind != "cpu":
        name = torch.cuda.get_device_name(device)
        free, total = torch.cuda.mem_get_info(device)
    gemm_wrong, flops = run_gemm(device, GEMM_SIZE[kind])
    copy_wrong, rate = run_copy(device, COPY_BYTES[kind] if kind == "cpu" else min(COPY_BYTES[kind], free // 4))
    return DeviceReport(
        name=name,
        gpu_id=gpu_id,
        free_gib=round(free / 2**30, 2),
        total_gib=round(total / 2**30, 2),
        gemm_wrong=gemm_wrong,
        gemm_tflop_per_s=round(flops / 1e12, 3),
        copy_wrong=copy_wrong,
        copy_gb_per_s=round(rate / 1e9, 2),
    )


def run_gemm(device: torch.device, size: int) -> tuple[int, float]:
    """(rows whose checksum is wrong, operations per second) of a product [size, size], bf16 on GPUs and fp32 on CPUs.

    The factors hold -1, 0 and 1, and a row of the first one at most 256 numbers that are not 0: every entry of the
    product is exact. Its rows, each times the same random integers, are held against sums formed on the CPU.
    """
    generator = torch.Generator().manual_seed(0)
    lane = torch.arange(size) % _SPARSITY
    a = torch.randint(-1, 2, (size, size), generator=generator, dtype=torch.int8) * (lane.unsqueeze(1) == lane)
    b = torch.randint(-1, 2, (size, size), generator=generator, dtype=torch.int8)
    weights = torch.randint(-1000, 1000, (size,), generator=generator).double()
    expected = a.double() @ (b.double() @ weights)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    x, y = a.to(device, dtype), b.to(device, dtype)
    product = torch.full((size, size), float("nan"), dtype=dtype, device=device)
    seconds = _seconds(device, lambda: torch.mm(x, y, out=product))
    wrong = int((product.cpu().double() @ weights != expected).sum())
    return wrong, 2 * size**3 / seconds


def run_copy(device: torch.device, num_bytes: int) -> tuple[int, float]:
    """(wrong words, bytes read and written per second) of a copy inside the device's memory."""
    source = torch.arange(num_bytes // 4, dtype=torch.int32, device=device)
    target = torch.full_like(source, -1)
    seconds = _seconds(device, lambda: target.copy_(source))
    return int((target != source).sum()), 2 * num_bytes / seconds


def measure_peers(gpu_ids: list[str]) -> PeerReport:
    """Copy between every ordered pair of GPUs and compare what arrives."""
    visible = torch.cuda.device_count()
    report = PeerReport(visible)
    if visible < len(gpu_ids):
        return report
    devices = {gpu_id: torch.device("cuda", device_index(gpu_id, device_masks(), visible)) for gpu_id in gpu_ids}
    for (a, source), (b, target) in itertools.permutations(devices.items(), 2):
        pair = f"{a}->{b}"
        if not torch.cuda.can_device_access_peer(source, target):
            report.no_access.append(pair)
        words = torch.arange(PEER_BYTES // 4, dtype=torch.int32, device=source) + len(report.gb_per_s)
        arrived = torch.full((len(words),), -1, dtype=torch.int32, device=target)
        torch.cuda.synchronize(target)
        seconds = _seconds(source, partial(arrived.copy_, words), warm_s=0.0)
        report.gb_per_s[pair] = round(PEER_BYTES / seconds / 1e9, 2)
        if not torch.equal(arrived.cpu(), words.cpu()):
            report.wrong.append(pair)
    return report


def _seconds(device: torch.device, call: Callable[[], object], repeats: int = 10, warm_s: float = WARM_S) -> float:
    """Median time of one call, completed on the device."""
    times: list[float] = []
    started = time.perf_counter()
    while len(times) <= repeats:
        began = time.perf_counter()
        call()
        if device.type != "cpu":
            torch.cuda.synchronize(device)
        ended = time.perf_counter()
        is_warm = times and (device.type == "cpu" or ended - started > warm_s)
        times = [*times, ended - began] if is_warm else [ended - began]
    return median(times[1:])
