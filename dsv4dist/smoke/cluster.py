"""All checks of a cluster, in order: nodes, GPUs, groups of ranks, the tiny model. Every failure is a row."""

from __future__ import annotations

import re
import secrets
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from dsv4dist.errors import Dsv4Error, PlacementError, WorkerError
from dsv4dist.kernels.ops import Ops
from dsv4dist.smoke import collectives, model, node
from dsv4dist.smoke.gpu import DeviceReport, GpuProbe, PeerReport
from dsv4dist.smoke.kernels import max_error
from dsv4dist.smoke.node import NodeProbe
from dsv4dist.smoke.probes import ProbeError, Probes
from dsv4dist.smoke.rows import Row
from dsv4dist.workers.executor import RankInfo
from dsv4dist.workers.failure import RankFailure, describe
from dsv4dist.workers.placement import Node, cluster_nodes
from dsv4dist.workers.ray_cluster import RayConnection
from dsv4dist.workers.ray_executor import RayExecutor

MIN_FREE_SHARE = 0.9
"""Of a GPU's memory: what runs by default may use so much."""
MIN_OF_MEDIAN = 0.85
"""A GPU that reaches less of what its like reach is too slow: it holds up every step."""
CONNECT_S = 5.0
_CLOCK_SAMPLES = 5
_CLEAN_S = 1.0
"""An interrupted command has little time to end in."""

Labels = dict[str, Node]
"""Nodes by the name that rows give them."""


@dataclass(frozen=True)
class SmokeOptions:
    """What to check: one group size or all that fit, `cpu`, `cuda`, `rocm` or `auto`, and seconds for each part."""

    tp: int | None = None
    device: str = "auto"
    timeout_s: float = 300.0


def smoke_rows(options: SmokeOptions, connection: RayConnection) -> Generator[Row, None, None]:
    """The rows of all checks, as they come; ends what it has started, also when it is closed early."""
    nodes = label_nodes(cluster_nodes())
    wants_gpu = options.device not in ("auto", "cpu")
    kind = "cuda" if wants_gpu or (options.device == "auto" and connection.has_gpus()) else "cpu"
    base, owner = Path(tempfile.gettempdir()) / f"dsv4dist-smoke-{secrets.token_hex(8)}", secrets.token_hex(16)
    probes = Probes(NodeProbe, {name: one.node_id for name, one in nodes.items()})
    try:
        node.make_checkpoint_once(base, owner, model.RECIPES[kind])
        yield from node_rows(probes, nodes, kind, options.timeout_s)
        recipe = str(base), owner, model.RECIPES[kind]
        answers = probes.ask("make_checkpoint", options.timeout_s, lambda name: recipe)
        yield from _failed(answers, "checkpoint", f"`df -h {base.parent}` on that node")
        yield from device_rows(probes, nodes, kind, base / "model", options.timeout_s)
        if set(probes.keys) < set(nodes):
            lost = ", ".join(name for name in nodes if name not in probes.keys)
            hint = "put the node right, or end Ray there (`ray stop`), then `dsv4dist smoke`"
            yield Row("groups", lost, False, "not tried: ranks may be placed where nothing answers", None, hint)
            return
        yield from group_rows(options, nodes, kind, base / "model", connection.address)
    finally:
        shutil.rmtree(base, ignore_errors=True)
        probes.ask("clean", _CLEAN_S)
        probes.close()


def label_nodes(nodes: Sequence[Node]) -> Labels:
    """Names for rows: the host's, with the start of Ray's id where several nodes share a host."""
    count = Counter(one.hostname for one in nodes)
    return {
        one.hostname if count[one.hostname] == 1 else f"{one.hostname}/{one.node_id[:6]}": one
        for one in sorted(nodes, key=lambda one: (one.hostname, one.node_id))
    }


# ---- Nodes -----------------------------------------------------------------------------------------------------------


def node_rows(probes: Probes[str], nodes: Labels, kind: str, timeout_s: float) -> Iterator[Row]:
    """Each node by itself, its clock, and whether all nodes reach each other."""
    expected = node.versions()
    answers = probes.ask("host_rows", timeout_s, lambda name: (name, kind, nodes[name].capacity("GPU"), expected))
    yield from _failed(answers, "node", "`ray status`; then `dsv4dist info` on that node, in the environment of Ray")
    for rows in _good(answers).values():
        yield from rows
    yield from _clock_rows(probes, timeout_s)
    yield from _port_rows(probes, nodes, timeout_s)


def _clock_rows(probes: Probes[str], timeout_s: float) -> Iterator[Row]:
    """Each clock minus the driver's, with half of the round trip taken off; the fastest of several trips counts."""
    best: dict[str, tuple[float, float]] = {}
    for _ in range(_CLOCK_SAMPLES):
        for name in probes.keys:
            sent, started = time.time(), time.perf_counter()
            answer = probes.ask("now", timeout_s, only=[name])[name]
            trip = time.perf_counter() - started
            if isinstance(answer, ProbeError):
                yield from _failed({name: answer}, "clock", "`ray status`")
            else:
                best[name] = min(best.get(name, (float("inf"), 0.0)), (trip, answer - sent - trip / 2))
    for name, (trip, skew) in best.items():
        ok = abs(skew) <= node.MAX_CLOCK_SKEW_S + trip / 2
        hint = "" if ok else "`timedatectl` on that node; start its time service (chrony or systemd-timesyncd)"
        yield Row("clock", name, ok, round(skew, 4), node.MAX_CLOCK_SKEW_S, hint, unit="s")


def _port_rows(probes: Probes[str], nodes: Labels, timeout_s: float) -> Iterator[Row]:
    """Free ports of every node, as ranks use them, from every other node; of a single node from itself."""
    listening = probes.ask("listen", timeout_s, lambda name: (nodes[name].address,))
    yield from _failed(listening, "ports", "`ip -br addr` on that node: is its address in the cluster its own?")
    ports = _good(listening)

    def others(name: str) -> tuple[list[tuple[str, str, int]], float]:
        return [(to, nodes[to].address, ports[to]) for to in ports if to != name or len(ports) == 1], CONNECT_S

    answers = probes.ask("unreachable", timeout_s + CONNECT_S * len(ports), others)
    yield from _failed(answers, "ports", "`ray status`")
    for name, failed in _good(answers).items():
        total = len(others(name)[0])
        hint = "open all TCP ports between the nodes of the cluster (ranks use free ones); `ss -tln` shows who listens"
        value = "; ".join(failed) or f"reaches {total} of {total} addresses"
        yield Row("ports", name, not failed, value, None, hint if failed else "")


# ---- Devices ---------------------------------------------------------------------------------------------------------


def device_rows(probes: Probes[str], nodes: Labels, kind: str, checkpoint: Path, timeout_s: float) -> Iterator[Row]:
    """Every GPU, or the CPU of every node."""
    if kind == "cpu":
        answers = probes.ask("device_report", timeout_s)
        yield from _failed(answers, "gemm", "`ray status`")
        for name, report in _good(answers).items():
            yield from _report_rows(name, report, {})
            yield Row("kernels", name, True, "reference kernels only", None)
        return
    places = {(name, i): one.node_id for name, one in nodes.items() for i in range(one.capacity("GPU"))}
    gpus = Probes(GpuProbe, places, dict.fromkeys(places, 1))
    try:
        ids = gpus.ask("gpu_id", timeout_s)
        busy = "`ray status` shows whether another job holds the GPU"
        yield from _failed({(name, None): one for (name, _), one in ids.items()}, "gpu", busy)
        ids = _good(ids)
        reports = gpus.ask("device_report", timeout_s, only=ids)
        yield from gpu_report_rows({(key[0], ids[key]): report for key, report in reports.items()})
        errors = gpus.ask("kernel_errors", timeout_s, lambda key: (str(checkpoint),), only=ids)
        for key, answer in errors.items():
            yield kernel_row(key[0], ids[key], answer)
    finally:
        gpus.close()
    yield from _peer_rows(nodes, timeout_s)


def gpu_report_rows(reports: Mapping[tuple[str, str], DeviceReport | ProbeError]) -> Iterator[Row]:
    """Memory, product and copy of each (node, GPU), the speeds held against the median of GPUs of the same name."""
    hint = "`rocm-smi` or `nvidia-smi` on that node; errors of the GPU are in `dmesg`"
    yield from _failed(reports, "gemm", hint)
    good = _good(reports)
    for (name, gpu), report in good.items():
        alike = [other for other in good.values() if other.name == report.name]
        yield from _report_rows(name, report, _medians(alike), gpu)


def _medians(reports: Sequence[DeviceReport]) -> dict[str, float]:
    return {which: median(getattr(one, which) for one in reports) for which in ("gemm_tflop_per_s", "copy_gb_per_s")}


def _report_rows(
    name: str, report: DeviceReport, medians: Mapping[str, float], gpu: str | None = None
) -> Iterator[Row]:
    if gpu is not None:
        least, more = round(report.total_gib * MIN_FREE_SHARE, 2), {"device": report.name}
        ok = report.free_gib >= least
        hint = "" if ok else "`rocm-smi --showpids` or `nvidia-smi` on that node: who uses it?"
        yield Row("gpu memory", name, ok, report.free_gib, least, hint, gpu, "GiB", report.name, more)
    damaged = "take this GPU out of the cluster; `dmesg` and `rocm-smi --showrasinfo` or `nvidia-smi -q` on that node"
    slow = "`rocm-smi` or `nvidia-smi` on that node: clocks, power limit, temperature, other processes"
    for check, wrong, which, unit in (
        ("gemm", report.gemm_wrong, "gemm_tflop_per_s", "TFLOP/s"),
        ("copy", report.copy_wrong, "copy_gb_per_s", "GB/s"),
    ):
        speed: float = getattr(report, which)
        least = round(medians.get(which, 0.0) * MIN_OF_MEDIAN, 3)
        limit = least or None
        if wrong:
            yield Row(check, name, False, f"{wrong} wrong results", "none", damaged, gpu)
        else:
            yield Row(check, name, speed >= least, speed, limit, "" if speed >= least else slow, gpu, unit)


def kernel_row(name: str, gpu: str | None, answer: Mapping[str, float] | ProbeError) -> Row:
    """Whether every operation on a GPU agrees with its reference."""
    if isinstance(answer, ProbeError):
        return Row("kernels", name, False, str(answer), None, "`dsv4dist compile` shows which kernels build", gpu)
    wrong = {op: error for op, error in answer.items() if not error <= max_error(op)}
    value = ", ".join(f"{op} off by {error:.3g} (limit {max_error(op):g})" for op, error in wrong.items())
    hint = "`pytest -m gpu tests/kernels` on that node; until then use --kernels reference" if wrong else ""
    more = {"errors": {op: error if np.isfinite(error) else None for op, error in answer.items()}}
    idle = [one.name for one in fields(Ops) if one.name not in answer]
    value = value or f"{len(answer)} agree with their references" + (f"; not run: {', '.join(idle)}" if idle else "")
    return Row("kernels", name, not wrong, value, None, hint, gpu, more=more)


def _peer_rows(nodes: Labels, timeout_s: float) -> Iterator[Row]:
    counts = {name: one.capacity("GPU") for name, one in nodes.items() if one.capacity("GPU") > 1}
    whole = Probes(GpuProbe, {name: nodes[name].node_id for name in counts}, counts)
    try:
        for name, answer in whole.ask("peer_report", timeout_s).items():
            yield peer_row(name, counts[name], answer)
    finally:
        whole.close()


def peer_row(name: str, num_gpus: int, answer: PeerReport | ProbeError) -> Row:
    """Whether the GPUs of a node see and reach each other."""
    topology = "`rocm-smi --showtopo` or `nvidia-smi topo -m` on that node"
    if isinstance(answer, ProbeError):
        return Row("peer access", name, False, str(answer), None, topology)
    if answer.visible < num_gpus:
        hint = "unset HIP_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES before `ray start` there"
        return Row("peer access", name, False, f"torch sees {answer.visible} GPUs", f"Ray has {num_gpus}", hint)
    for what, pairs in (("wrong copies", answer.wrong), ("no direct access", answer.no_access)):
        if pairs:
            hint = f"{topology}; boot with iommu=pt, and switch PCIe ACS off"
            return Row("peer access", name, False, f"{what}: {', '.join(pairs)}", None, hint, pairs[0].split("->")[0])
    slowest = min(answer.gb_per_s, key=lambda pair: answer.gb_per_s[pair])
    value = f"{len(answer.gb_per_s)} pairs, slowest {slowest} with {answer.gb_per_s[slowest]:g} GB/s"
    return Row("peer access", name, True, value, more={"gb_per_s": answer.gb_per_s})


# ---- Groups of ranks -------------------------------------------------------------------------------------------------


def group_rows(options: SmokeOptions, nodes: Labels, kind: str, checkpoint: Path, address: str) -> Iterator[Row]:
    """All-reduce and the tiny model over every number of ranks that fits, or over the one that was asked for."""
    resource = "GPU" if kind == "cuda" else "CPU"
    total = sum(one.capacity(resource) for one in nodes.values())
    sizes = [options.tp] if options.tp is not None else [size for size in model.TP_SIZES if size <= total]
    if not total:
        hint = "`ray status`; Ray finds AMD GPUs through the Python package amdsmi, and --device cpu needs none"
        yield Row("groups", "+".join(nodes), False, f"no {resource} in the cluster", None, hint)
        return
    expected = model.expected_tokens(checkpoint, kind)
    for size in sizes:
        if size > 1:
            yield from collective_rows(size, kind, address, options.timeout_s, nodes)
        yield model_row(size, kind, checkpoint, expected, address, options.timeout_s, nodes)


def collective_rows(size: int, kind: str, address: str, timeout_s: float, nodes: Labels) -> Iterator[Row]:
    """All-reduce over `size` ranks: right sums, latency, bandwidth."""
    executor = RayExecutor(
        collectives.CollectiveRunner,
        size,
        kind,
        address=address,
        placement_timeout_s=timeout_s,
        start_timeout_s=timeout_s,
        step_timeout_s=timeout_s,
    )
    ranks: list[RankInfo] = []
    check = f"all_reduce TP {size}"
    try:
        ranks = executor.start().ranks
        for name, num_bytes in collectives.SIZES.items():
            check = f"all_reduce {name}, TP {size}"
            result = executor.execute(np.array([num_bytes, collectives.REPEATS[name]], np.int32))
            took = round(float(np.median(result.logprobs)), 1)
            rate = round(collectives.bus_gb_per_s(num_bytes, size, took), 3)
            more, note = {"tp": size, "bytes": num_bytes, "gb_per_s": rate}, f"{rate:.3g} GB/s"
            yield Row(check, _names(ranks, nodes), True, took, unit="us", note=note, more=more)
    except Dsv4Error as error:
        yield _group_failure(check, size, error, ranks, nodes)
    finally:
        executor.shutdown()


def model_row(
    size: int, kind: str, checkpoint: Path, expected: list[int], address: str, timeout_s: float, nodes: Labels
) -> Row:
    """Whether the tiny model over `size` ranks gives the tokens that the reference gives."""
    check, more = f"model TP {size}", {"tp": size}
    try:
        tokens, ranks, error = model.generate(checkpoint, kind, size, address, timeout_s)
    except Dsv4Error as failure:
        return _group_failure(check, size, failure, [], nodes)
    if error:
        return _group_failure(check, size, WorkerError(error), ranks, nodes)
    ok = tokens == expected
    hint = "" if ok else f"`dsv4dist smoke --tp {size} --device cpu`: if that is right, it is the GPUs or their kernels"
    wanted = f"tokens {expected}"
    return Row(check, _names(ranks, nodes), ok, f"tokens {tokens}", wanted, hint, more=more | {"tokens": tokens})


def _group_failure(check: str, size: int, error: Dsv4Error, ranks: Sequence[RankInfo], nodes: Labels) -> Row:
    """The row of a group that failed, on the node and GPU of the rank that is the cause, where that is known."""
    text = str(error)
    where, gpu = "+".join(nodes), None
    if not isinstance(error, PlacementError):  # which lists all nodes
        where = next((name for name in nodes if re.search(rf"\b{re.escape(name)}\b", text)), where)
    if isinstance(error, RankFailure) and error.rank < len(ranks):
        where, gpu = _names([ranks[error.rank]], nodes), ranks[error.rank].gpu_id or None
    hint = f"NCCL_DEBUG=INFO (for RCCL too) in the environment of `ray start`, then `dsv4dist smoke --tp {size}`"
    if isinstance(error, PlacementError):
        hint = f"`ray status`: who holds the resources? Then `dsv4dist smoke --tp {size}`"
    return Row(check, where, False, text, None, hint, gpu, more={"tp": size})


def _names(ranks: Sequence[RankInfo], nodes: Labels) -> str:
    """The nodes of some ranks, each once."""
    by_id = {one.node_id: name for name, one in nodes.items()}
    return "+".join(dict.fromkeys(by_id.get(rank.node_id, rank.hostname) for rank in ranks))


def _good(answers: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: answer for key, answer in answers.items() if not isinstance(answer, ProbeError)}


def _failed(answers: Mapping[Any, Any], check: str, hint: str) -> Iterator[Row]:
    """A row per probe that failed; keys are nodes, or (node, GPU)."""
    for key, answer in answers.items():
        if isinstance(answer, ProbeError):
            name, gpu = key if isinstance(key, tuple) else (key, None)
            yield Row(check, name, False, describe(answer), None, hint, gpu if isinstance(gpu, str) else None)
