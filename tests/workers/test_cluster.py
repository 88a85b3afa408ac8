"""Several simulated nodes on this machine: where ranks go, refusals, hung and raising ranks, a node that is lost."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from dsv4dist import Engine, EngineConfig
from dsv4dist.errors import ConfigError, PlacementError, WorkerError
from dsv4dist.workers.executor import WorkerReport
from dsv4dist.workers.failure import FailureKind, RankFailure
from dsv4dist.workers.processes import Process, children, command_line, descendants, find_process, wait_gone
from dsv4dist.workers.ray_cluster import connect_ray
from dsv4dist.workers.ray_executor import RayExecutor
from tests.cli.test_signals import Command, start, wait_for
from tests.workers.toy_runner import Order, ToyFactory, packet

__all__ = ["start"]  # a fixture
pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

SMALL = {"include_dashboard": False, "object_store_memory": 80 << 20}
GPUS = (1, 1, 1, 2)
CPUS_PER_NODE = 2


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without resources, and four nodes of two CPUs and so many GPUs as GPUS says, as far as Ray knows."""
    from ray.cluster_utils import Cluster

    before = children(os.getpid())
    # A node that is gone is noticed soon, so that tests need not wait for it.
    quick = {"health_check_period_ms": 500, "health_check_initial_delay_ms": 1000}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": quick, **SMALL})
    try:
        for gpus in GPUS:
            made.add_node(num_cpus=CPUS_PER_NODE, num_gpus=gpus, **SMALL)
        yield made
    finally:
        started = descendants(child for child in children(os.getpid()) if child not in before)
        made.shutdown()
        assert wait_gone(started, 20) == []


@contextmanager
def toys(cluster: Any, size: int, **options: Any) -> Iterator[RayExecutor]:
    """An executor of toy runners on the cluster; in the end none of its processes is left, and Ray is as before."""
    import ray

    executor = RayExecutor(ToyFactory(), size, "cpu", address=cluster.address, **options)
    started = []
    start, restart = executor.start, executor.restart

    def noted(call: Callable[[], WorkerReport]) -> Callable[[], WorkerReport]:
        def noting() -> WorkerReport:
            report = call()
            started.extend(process for one in report.ranks if (process := find_process(one.pid)) is not None)
            return report

        return noting

    executor.start, executor.restart = noted(start), noted(restart)  # type: ignore[method-assign]
    try:
        yield executor
    finally:
        executor.shutdown()
        assert wait_gone(started, 5) == []
        assert not ray.is_initialized()


def sums(executor: RayExecutor, size: int, step_id: int = 0) -> bool:
    """Whether a step over all ranks comes out right."""
    result = executor.execute(packet(Order.SUM, step_id, 5, generation=executor.generation))
    return result.token_ids.tolist() == [5 * size * (size + 1) // 2] * 3


@contextmanager
def stopping_rank_0_at(phase: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rank 0 stops when this phase of the start begins, and the driver asks soon what it is doing."""
    from dsv4dist.workers import ray_group

    call = ray_group.RankGroup.call

    def stop_and_call(group: Any, method: str, *args: Any, **options: Any) -> Any:
        if method == phase:
            os.kill(group.places[0].process.pid, signal.SIGSTOP)
        return call(group, method, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(ray_group.RankGroup, "call", stop_and_call)
        patch.setattr(ray_group, "_LATE_S", 0.5)
        patch.setattr(ray_group, "_SILENT_S", 1)
        yield


def lose(executor: RayExecutor, order: Order) -> RankFailure:
    with pytest.raises(RankFailure) as caught:
        executor.execute(packet(order, 1, 5, rank=1, generation=executor.generation))
    return caught.value


class Removing:
    """Closes a placement by removing it."""

    def __init__(self, placement: Any) -> None:
        self.placement = placement

    def close(self) -> None:
        self.placement.remove()


@pytest.fixture(scope="class")
def connected(cluster: Any) -> Iterator[Any]:
    with closing(connect_ray(cluster.address, 1)) as connection:
        yield connection


@pytest.mark.usefixtures("connected")
class TestPlacement:
    @pytest.mark.parametrize(
        ("size", "resource", "strategy", "num_nodes"),
        [(2, "CPU", "STRICT_PACK", 1), (4, "CPU", "PACK", 2), (2, "GPU", "STRICT_PACK", 1), (4, "GPU", "PACK", 3)],
    )
    def test_one_node_if_it_can_hold_all_else_few(
        self, size: int, resource: str, strategy: str, num_nodes: int
    ) -> None:
        from dsv4dist.workers.placement import place

        with closing(Removing(place(size, resource, 20))) as placed:
            assert placed.placement.strategy == strategy
            assert len(set(placed.placement.node_ids)) == num_nodes
            assert placed.placement.is_whole()

    def test_ranks_go_by_node_then_gpu(self, connected: Any) -> None:
        from dsv4dist.workers.placement import place
        from dsv4dist.workers.ray_group import RankGroup

        with closing(Removing(place(5, "GPU", 20))) as placed:
            group = RankGroup(placed.placement, connected.node_id)
            try:
                group.create(60)
                order = [(place.node_id, place.gpu_id) for place in group.places]
                assert order == sorted(order)
                assert len({node for node, _ in order}) == 4
                assert sorted(gpu for _, gpu in order) == ["0", "0", "0", "0", "1"]
                assert not any(place.torch_was_loaded for place in group.places)
            finally:
                group.kill()

    def test_refusals_say_what_was_asked_what_there_is_and_what_to_do(self) -> None:
        from dsv4dist.workers.placement import place

        with pytest.raises(PlacementError) as caught:
            place(9, "CPU", 20, impossible_wait_s=0.5)
        has = r"((\S+ \(127\.0\.0\.1\) [02], \d free(; )?){5})"
        asked = "placement of 9 ranks with 1 CPU each: the cluster is too small; nodes have CPU: "
        do = "; use a smaller --tensor-parallel-size, or see `ray status`"
        assert re.fullmatch(re.escape(asked) + has + re.escape(do), str(caught.value))
        with closing(Removing(place(8, "CPU", 20))):
            deadline = time.monotonic() + 20  # what is free is known after a moment
            while True:
                with pytest.raises(PlacementError, match="2 ranks with 1 CPU each on one node: not granted") as caught:
                    place(2, "CPU", 0.5)
                if str(caught.value).count(" 2, 0 free") == 4:
                    break
                assert time.monotonic() < deadline, caught.value


def test_device_auto_is_what_the_cluster_has(cluster: Any, checkpoint: Callable[..., Path]) -> None:
    """This machine's torch has no GPU, yet nodes of the cluster do; six of them there are not."""
    import ray

    options = EngineConfig(checkpoint("tiny"), 4, address=cluster.address, placement_timeout_s=0.1)
    with closing(connect_ray(cluster.address, 1)):
        from dsv4dist.workers.placement import place

        with closing(Removing(place(5, "GPU", 20))), pytest.raises(PlacementError, match="4 ranks with 1 GPU each"):
            Engine(options)
    with pytest.raises(ConfigError):  # found after the cluster was joined
        Engine(EngineConfig(checkpoint("tiny"), 3, address=cluster.address))
    assert not ray.is_initialized()


def test_hung_and_raising_ranks_are_told_apart(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4dist.workers import ray_group

    monkeypatch.setattr(ray_group, "_CAUSE_WAIT_S", 1)
    with toys(cluster, 2, step_timeout_s=2, heartbeat_s=1) as executor:
        executor.start()
        placement = executor._placement
        assert sums(executor, 2)
        asleep = lose(executor, Order.SLEEP)  # rank 0 waits for it in a collective
        assert (asleep.rank, asleep.kind) == (1, FailureKind.STUCK)
        assert "step 1 is not finished after 2 s (pid " in str(asleep)
        assert "toy_runner.py" in str(asleep)
        assert asleep.unseen_s >= 2
        ranks = executor.restart().ranks
        assert sums(executor, 2)
        executor._step_timeout_s = 60
        os.kill(ranks[1].pid, signal.SIGSTOP)
        stopped = lose(executor, Order.SUM)
        assert (stopped.rank, stopped.kind) == (1, FailureKind.STUCK)
        assert f"(pid {ranks[1].pid} on " in str(stopped)
        with stopping_rank_0_at("init", monkeypatch), pytest.raises(RankFailure) as caught:
            executor.restart()
        assert (caught.value.rank, caught.value.kind) == (0, FailureKind.STUCK)
        assert str(caught.value).startswith("rank 0: no answer for 1 s during init (pid ")
        executor.restart()
        assert sums(executor, 2)
        raised = lose(executor, Order.RAISE)
        assert (raised.rank, raised.kind) == (1, FailureKind.RAISED)
        assert str(raised).startswith("rank 1: ValueError: toy failure on two lines (executing packet 1; pid ")
        assert executor.generation == 3
        assert executor._placement is placement, "its bundles were there all the time"


@pytest.mark.slow
def test_a_driver_that_dies_leaves_no_rank_in_the_cluster(
    cluster: Any, checkpoint: Callable[..., Path], start: Callable[..., Command]
) -> None:
    command = start(
        *("generate", "--model", checkpoint("tiny-swa"), "--tp", "4", "--device", "cpu", "--address", cluster.address),
        *("--prompt-ids", "1,2,3", "--max-tokens", "3000", "--ignore-eos"),
    )
    before = {process.pid for process in ranks()}
    wait_for(lambda: len(ranks()) == 4, command)
    assert not before
    command.end(signal.SIGKILL, group=False)
    assert wait_gone(ranks(), 20) == []


def ranks() -> list[Process]:
    """The processes of ranks that run steps, on any node."""
    started = descendants(children(os.getpid()))
    return [process for process in started if command_line(process.pid).startswith("ray::Worker.run")]


def test_a_lost_node_is_replaced_while_there_is_room(cluster: Any) -> None:
    with toys(cluster, 3, placement_timeout_s=1) as executor:
        report = executor.start()
        assert sums(executor, 3)
        for room_left in (True, False):
            nodes = {one.node_id for one in report.ranks}
            assert len(nodes) == 2
            others = [node for node in cluster.worker_nodes if node.node_id not in nodes]
            cluster.remove_node(next(node for node in cluster.worker_nodes if node.node_id == report.ranks[2].node_id))
            if not room_left:
                for node in others:
                    cluster.remove_node(node)
            lost = None
            for step_id in range(1, 10_000):  # the processes of a node may outlive it for a moment
                try:
                    assert sums(executor, 3, step_id)
                except RankFailure as error:
                    lost = error
                    break
            assert lost is not None
            assert lost.kind.can_recover
            if room_left:
                report = executor.restart()
                assert sums(executor, 3)
            else:
                with pytest.raises(
                    PlacementError, match="placement of 3 ranks with 1 CPU each: the cluster is too small"
                ):
                    executor.restart()


def test_an_address_where_nobody_listens_is_refused_at_once() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(WorkerError, match=rf"Ray at 127.0.0.1:{port} does not answer: .*check --address"):
            connect_ray(f"127.0.0.1:{port}", 1)


def test_a_missing_token_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def refuse(**options: object) -> None:
        raise ray.exceptions.AuthenticationError("no\ntoken")

    monkeypatch.setattr(ray, "init", refuse)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with pytest.raises(WorkerError, match=r"asks for a token: no token.*RAY_AUTH_TOKEN"):
            connect_ray(f"127.0.0.1:{listener.getsockname()[1]}", 1)
