"""`dsv4dist smoke`: every kind of failure is a row with its node and the next command, and exit code 1; real runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsv4dist.errors import PlacementError
from dsv4dist.smoke import cluster, gpu, model, node
from dsv4dist.smoke.gpu import DeviceReport, PeerReport
from dsv4dist.smoke.probes import ProbeError
from dsv4dist.workers.executor import RankInfo, StepResult
from dsv4dist.workers.failure import FailureKind, RankFailure
from dsv4dist.workers.placement import Node
from dsv4dist.workers.processes import children, descendants, wait_gone
from tests.cli.support import fails, json_lines, succeeds

Capture = pytest.CaptureFixture[str]
NODES = [Node("1" * 8, "a", "127.0.0.1", 1.0, 0.0), Node("2" * 8, "b", "127.0.0.1", 1.0, 0.0)]
RANKS = [RankInfo(rank, one.node_id, one.hostname, 100 + rank, "cpu", "") for rank, one in enumerate(NODES)]
TOKENS = [7, 8]
JSON = ["smoke", "--address", "local", "--json"]


class Connection:
    """A joined cluster of the nodes NODES."""

    address = "local"

    def __init__(self, gpus: bool) -> None:
        self.gpus = gpus

    def has_gpus(self) -> bool:
        return self.gpus

    def close(self) -> None:
        pass


class Probes:
    """Probes inside this process; `broken` maps (node, method) to what happens there instead."""

    broken: dict[tuple[str, str], Callable[..., Any]]

    def __init__(self, kind: type, node_ids: Mapping[Any, str], gpus: Mapping[Any, int] | None = None) -> None:
        self._probes = {key: kind() for key in node_ids}

    @property
    def keys(self) -> list[Any]:
        return list(self._probes)

    def ask(
        self, method: str, timeout_s: float, args: Callable[[Any], tuple[Any, ...]] = lambda key: (), only: Any = None
    ) -> dict[Any, Any]:
        found = {}
        for key in [key for key in self.keys if only is None or key in only]:
            name = key if isinstance(key, str) else key[0]
            call = self.broken.get((name, method), getattr(self._probes[key], method))
            try:
                found[key] = call(*args(key))
            except ProbeError as error:
                found[key] = error
                if str(error).startswith("no answer"):
                    del self._probes[key]
        return found

    def close(self) -> None:
        pass


class Executor:
    """Ranks 0 on node a and 1 on node b; `failure` is what a step ends in."""

    failure: Exception | None = None

    def __init__(self, factory: Any, size: int, device: str, **options: Any) -> None:
        assert options["start_timeout_s"] == options["step_timeout_s"] == 300

    def start(self) -> Any:
        if isinstance(self.failure, PlacementError):
            raise self.failure
        return type("Report", (), {"ranks": RANKS})

    def execute(self, packet: Any) -> StepResult:
        if self.failure is not None:
            raise self.failure
        nothing = np.empty((0, 0), np.float32)
        return StepResult(0, 0, np.zeros(1, np.int32), np.array([100.0, 300.0, 200.0], np.float32), nothing, 0)

    def shutdown(self) -> None:
        pass


def answer(value: Any) -> Callable[..., Any]:
    """A function that returns `value`, or raises it."""

    def call(*args: Any, **options: Any) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    return call


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Two nodes with a CPU each, on which everything is right."""
    monkeypatch.setattr("dsv4dist.workers.ray_cluster.connect_ray", lambda address, tp: Connection(False))
    monkeypatch.setattr(Probes, "broken", {}, raising=False)
    monkeypatch.setattr(Executor, "failure", None)
    monkeypatch.setattr(cluster, "cluster_nodes", lambda: NODES)
    monkeypatch.setattr(cluster, "Probes", Probes)
    monkeypatch.setattr(cluster, "RayExecutor", Executor)
    monkeypatch.setattr(os, "dup2", lambda *args: None)
    monkeypatch.setattr(node, "driver_gpus", lambda: 0)
    monkeypatch.setattr(node, "soft_limit", lambda which: 65536.0)
    monkeypatch.setattr(node, "memory_free_gib", lambda: 64.0)
    monkeypatch.setattr(node, "shm_free_gib", lambda: 8.0)
    monkeypatch.setattr(node, "versions", answer(node.versions() | {"aiter": None}))
    monkeypatch.setattr(model, "expected_tokens", answer(TOKENS))
    monkeypatch.setattr(model, "generate", answer((TOKENS, RANKS, "")))
    return monkeypatch


def rows(text: str) -> list[dict[str, Any]]:
    found = json_lines(text)
    for row in found:
        assert {"check", "node", "ok", "value", "limit", "hint"} <= set(row)
        assert row["ok"] or row["hint"], "what is wrong says what to do"
    return found


@pytest.mark.usefixtures("healthy")
def test_rows_of_a_healthy_cluster(capsys: Capture) -> None:
    found = rows(succeeds(JSON, capsys))
    assert all(row["ok"] for row in found)
    per_node = {row["check"] for row in found if row["node"] == "a"}
    assert per_node == {row["check"] for row in found if row["node"] == "b"}
    assert per_node >= {"versions", "gpus", "memory", "/dev/shm", "open files", "clock", "ports", "gemm", "kernels"}
    across = {row["check"]: row for row in found if row["node"] == "a+b"}
    sums = [f"all_reduce {size}, TP 2" for size in ("64 KB", "1 MB", "64 MB")]
    assert set(across) == {"model TP 1", *sums, "model TP 2"}
    assert across[sums[1]]["value"] == 200.0
    assert across[sums[1]]["gb_per_s"] == pytest.approx((1 << 20) / 200e-6 / 1e9, rel=1e-3)
    only_two = rows(succeeds([*JSON, "--tp", "2"], capsys))
    assert [row["tp"] for row in only_two if "tp" in row] == [2] * 4


@pytest.mark.usefixtures("healthy")
def test_the_table_has_a_line_for_each_row(capsys: Capture) -> None:
    lines = succeeds(["smoke"], capsys).splitlines()
    assert all(line.startswith("ok ") for line in lines)
    assert any("200 us, " in line and " GB/s" in line for line in lines)


SILENT = ProbeError("no answer within 300 s")
RANK_1 = RankFailure(1, FailureKind.DIED, "its process died", 0.0)
FAILURES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "node": lambda patch: patch.setitem(Probes.broken, ("b", "host_rows"), answer(SILENT)),
    "clock": lambda patch: patch.setitem(Probes.broken, ("b", "now"), lambda: time.time() - 7),
    "ports": lambda patch: patch.setitem(Probes.broken, ("b", "unreachable"), answer(["a (127.0.0.1:9): timed out"])),
    "checkpoint": lambda patch: patch.setitem(Probes.broken, ("b", "make_checkpoint"), answer(ProbeError("disk full"))),
    "gemm": lambda patch: patch.setitem(
        Probes.broken, ("b", "device_report"), answer(DeviceReport("cpu", "", 0, 0, 3, 1.0, 0, 1.0))
    ),
    "copy": lambda patch: patch.setitem(
        Probes.broken, ("b", "device_report"), answer(DeviceReport("cpu", "", 0, 0, 0, 1.0, 5, 1.0))
    ),
    "all_reduce 64 KB, TP 2": lambda patch: patch.setattr(Executor, "failure", RANK_1),
    "model TP 2": lambda patch: patch.setattr(
        model, "generate", lambda path, kind, size, *rest: (TOKENS if size == 1 else [9, 9], RANKS[1:], "")
    ),
}


@pytest.mark.parametrize("check", FAILURES)
def test_a_failure_is_a_row_with_node_and_hint_and_the_others_still_report(
    check: str, healthy: pytest.MonkeyPatch, capsys: Capture
) -> None:
    FAILURES[check](healthy)
    found = rows(fails(JSON, 1, f"; the first: {check} on b: ", capsys))
    assert next((row["check"], row["node"]) for row in found if not row["ok"]) == (check, "b")
    assert {row["check"] for row in found if row["node"] == "a" and row["ok"]} >= {"versions", "gemm", "clock", "ports"}
    assert len([row for row in found if not row["ok"]]) == (2 if check == "node" else 1)


def test_where_a_node_is_silent_no_ranks_are_started(healthy: pytest.MonkeyPatch, capsys: Capture) -> None:
    """They could be placed on it, and would wait for ever."""
    FAILURES["node"](healthy)
    healthy.setattr(model, "generate", answer(AssertionError("started")))
    found = rows(fails(JSON, 1, "2 of", capsys))
    assert (found[-1]["check"], found[-1]["node"], found[-1]["ok"]) == ("groups", "b", False)


def test_ranks_that_find_no_place(healthy: pytest.MonkeyPatch, capsys: Capture) -> None:
    refusal = PlacementError("placement of 2 ranks: not granted; nodes have CPU: b (127.0.0.1) 1, 0 free")
    healthy.setattr(Executor, "failure", refusal)
    found = rows(fails(JSON, 1, "all_reduce TP 2 on a+b: placement", capsys))
    assert "ray status" in next(row["hint"] for row in found if not row["ok"])


@pytest.mark.usefixtures("healthy")
def test_wrong_usage(capsys: Capture) -> None:
    assert fails(["smoke", "--tp", "3"], 2, "--tp is 3; the tiny model divides by 1, 2, 4, 8, 16", capsys) == ""
    assert fails(["smoke", "--device", "tpu"], 2, "--device is 'tpu'; choose from auto, cpu", capsys) == ""
    fails(
        ["smoke", "--device", "rocm", "--json"], 1, "groups on a+b: no GPU in the cluster; next: `ray status`", capsys
    )


# ---- GPUs ------------------------------------------------------------------------------------------------------------


class GpuProbe:
    """The GPUs of a healthy node."""

    def gpu_id(self) -> str:
        return "0"

    def device_report(self) -> DeviceReport:
        return DeviceReport("X", "0", 180.0, 192.0, 0, 500.0, 0, 4000.0)

    def kernel_errors(self, path: str) -> dict[str, float]:
        return {"rms_norm": 1e-3, "window_key_list": 0.0}

    def peer_report(self) -> PeerReport:
        return PeerReport(2, {"0->1": 50.0, "1->0": 48.0})


GPU_FAILURES: dict[str, tuple[str, Any]] = {
    "gpu": ("gpu_id", SILENT),
    "gemm": ("device_report", ProbeError("AcceleratorError: unspecified launch failure")),
    "gpu memory": ("device_report", DeviceReport("X", "0", 20.0, 192.0, 0, 500.0, 0, 4000.0)),
    "kernels": ("kernel_errors", {"rms_norm": 0.3}),
    "peer access": ("peer_report", PeerReport(2, {"0->1": 50.0, "1->0": 48.0}, no_access=["0->1"])),
}


@pytest.fixture
def gpus(healthy: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    two = [Node(one.node_id, one.hostname, one.address, 1.0, 2.0) for one in NODES]
    healthy.setattr("dsv4dist.workers.ray_cluster.connect_ray", lambda address, tp: Connection(True))
    healthy.setattr(cluster, "cluster_nodes", lambda: two)
    healthy.setattr(cluster, "GpuProbe", GpuProbe)
    return healthy


@pytest.mark.usefixtures("gpus")
def test_rows_of_gpus(capsys: Capture) -> None:
    found = rows(succeeds([*JSON, "--tp", "2"], capsys))
    per_gpu = [row for row in found if row.get("gpu") == "0"]
    assert [row["check"] for row in per_gpu].count("kernels") == 4
    assert {row["check"] for row in per_gpu} == {"gpu memory", "gemm", "copy", "kernels"}
    assert next(row for row in per_gpu if row["check"] == "kernels")["errors"]["rms_norm"] == 1e-3
    assert [row["value"] for row in found if row["check"] == "peer access"] == [
        "2 pairs, slowest 1->0 with 48 GB/s"
    ] * 2


@pytest.mark.parametrize("check", GPU_FAILURES)
def test_a_failing_gpu_is_named(check: str, gpus: pytest.MonkeyPatch, capsys: Capture) -> None:
    method, value = GPU_FAILURES[check]
    gpus.setitem(Probes.broken, ("b", method), answer(value))
    where = "b" if check == "gpu" else "b, GPU 0"
    found = rows(fails([*JSON, "--tp", "2"], 1, f"the first: {check} on {where}: ", capsys))
    assert all(row["node"] == "b" for row in found if not row["ok"])


@pytest.mark.parametrize(("check", "which"), [("gemm", "gemm_tflop_per_s"), ("copy", "copy_gb_per_s")])
def test_a_gpu_slower_than_its_like_is_an_outlier(check: str, which: str) -> None:
    from dataclasses import replace

    usual = GpuProbe().device_report()
    slow = replace(usual, **{which: getattr(usual, which) * 0.8})
    other = replace(usual, name="Y", gemm_tflop_per_s=10.0, copy_gb_per_s=10.0)
    reports = {("a", "0"): usual, ("a", "1"): usual, ("b", "0"): slow, ("b", "1"): other}
    found = list(cluster.gpu_report_rows(reports))
    (bad,) = [row for row in found if not row.ok]
    assert (bad.check, bad.node, bad.gpu) == (check, "b", "0")
    assert bad.limit == pytest.approx(getattr(usual, which) * cluster.MIN_OF_MEDIAN)
    assert "clocks" in bad.hint


def test_kernel_and_peer_rows_say_what_is_wrong() -> None:
    row = cluster.kernel_row("a", "3", {"rms_norm": float("inf"), "step_rows": 0.1, "compress_state": 0.0})
    assert row.value == "rms_norm off by inf (limit 0.02), step_rows off by 0.1 (limit 0)"
    assert row.as_dict()["errors"] == {"rms_norm": None, "step_rows": 0.1, "compress_state": 0.0}
    assert "compile" in cluster.kernel_row("a", "3", ProbeError("x")).hint
    hidden = cluster.peer_row("a", 8, PeerReport(1))
    assert (hidden.value, hidden.limit) == ("torch sees 1 GPUs", "Ray has 8")
    wrong = cluster.peer_row("a", 2, PeerReport(2, {"0->1": 1.0}, wrong=["0->1"]))
    assert (wrong.ok, wrong.value, wrong.gpu) == (False, "wrong copies: 0->1", "0")
    assert gpu.COPY_BYTES["cpu"] < gpu.COPY_BYTES["cuda"]


# ---- Real ones -------------------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """In the end no process and no directory of ours is left."""
    before, directories = children(os.getpid()), set(Path("/tmp").glob("dsv4dist-smoke-*"))
    yield
    started = descendants(child for child in children(os.getpid()) if child not in before)
    assert wait_gone(started, 10) == []
    assert set(Path("/tmp").glob("dsv4dist-smoke-*")) <= directories


@pytest.mark.ray
@pytest.mark.usefixtures("nothing_left")
def test_a_private_cluster_on_this_machine() -> None:
    command = [sys.executable, "-m", "dsv4dist", "smoke", "--address", "local", "--device", "cpu", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    found = rows(done.stdout)
    failed = [row for row in found if not row["ok"]]
    assert done.returncode == bool(failed), done.stderr
    assert {row["check"] for row in failed} <= {"memory", "/dev/shm", "open files", "processes", "gpus"}, "this machine"
    checks = [row["check"] for row in found]
    assert {"model TP 1", "all_reduce 64 MB, TP 2", "model TP 2", "ports", "clock"} <= set(checks)
    assert next(row for row in found if row["check"] == "kernels")["value"] == "reference kernels only"


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
def test_two_nodes_one_of_which_stops(capfd: Capture) -> None:
    from ray.cluster_utils import Cluster

    small: dict[str, Any] = {"include_dashboard": False, "object_store_memory": 80 << 20}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **small})
    try:
        second = made.add_node(num_cpus=1, **small)
        raylet = second.all_processes["raylet"][0].process.pid
        command = ["smoke", "--address", made.address, "--device", "cpu", "--json"]
        found = rows(succeeds(command, capfd))
        names = {row["node"] for row in found if row["check"] == "versions"}
        assert len(names) == 2
        across = next(row for row in found if row["check"] == "model TP 2")
        assert set(across["node"].split("+")) == names
        assert {row["value"] for row in found if row["check"] == "ports"} == {"reaches 1 of 1 addresses"}
        os.kill(raylet, signal.SIGSTOP)
        stopped = next(name for name in names if name.endswith(second.node_id[:6]))
        found = rows(fails([*command, "--timeout", "10"], 1, f"node on {stopped}: no answer within 10 s", capfd))
        assert [(row["check"], row["node"]) for row in found if not row["ok"]] == [
            ("node", stopped),
            ("groups", stopped),
        ]
        assert {row["check"] for row in found if row["node"] in names - {stopped}} >= {"versions", "ports", "gemm"}
        os.kill(raylet, signal.SIGCONT)
    finally:
        made.shutdown()
