"""The executor over Ray: starts the ranks, sends every step to all of them, and ends all when one fails.

Ranks that are lost can be started again, in the same places if those still exist; what made them lost is told by a
RankFailure.

Ray is imported when `connect_ray` has put the environment right, so the modules that need it are imported after that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dsv4dist.errors import PlacementError, WorkerError
from dsv4dist.workers.channel import ConnectionLostError, DriverChannel, Peer
from dsv4dist.workers.executor import Int32Array, RankInfo, RunnerFactory, StepResult, WorkerReport, agree_on_blocks
from dsv4dist.workers.failure import RankFailure
from dsv4dist.workers.processes import Process
from dsv4dist.workers.ray_cluster import RayConnection, connect_ray

if TYPE_CHECKING:
    from dsv4dist.workers.actor import InitReport
    from dsv4dist.workers.placement import Placement
    from dsv4dist.workers.ray_group import RankGroup

log = logging.getLogger(__name__)

_TICK_S = 0.02
_LATE_S = 10.0
"""A step that takes longer is reported in the log every so many seconds, with what each rank is doing."""
_CONNECT_S = 60.0
_STOP_S = 0.5
_GONE_ELSEWHERE_S = 2.5
_NODE_DECISION_S = 60.0
"""Ray takes so long at most to give up a node that does not answer."""
_COLLECTIVE_MARGIN_S = 60.0
"""Collectives give up this much after the driver's deadline, which can say more about the cause."""


class RayExecutor:
    """Runs every rank as a Ray actor."""

    def __init__(
        self,
        factory: RunnerFactory,
        tp_size: int,
        device: str,
        *,
        address: str = "auto",
        connection: RayConnection | None = None,
        placement_timeout_s: float = 60.0,
        start_timeout_s: float = 3600.0,
        step_timeout_s: float = 300.0,
        heartbeat_s: float = 10.0,
    ) -> None:
        """Prepare; nothing is started.

        factory     builds each rank's runner in the rank's process
        device      `cpu`, or any other name for one GPU per rank
        address     see `connect_ray`; unused with a `connection`, which this executor then closes
        timeouts    seconds for the placement, for each phase of the start (loading is the longest), and for a step
        heartbeat_s a rank that was not heard for so long while it should run counts as lost
        """
        self._factory = factory
        self._tp_size = tp_size
        self._resource = "CPU" if device == "cpu" else "GPU"
        self._address = address
        self._connection = connection
        self._placement_timeout_s = placement_timeout_s
        self._start_timeout_s = start_timeout_s
        self._step_timeout_s = step_timeout_s
        self._heartbeat_s = heartbeat_s
        self._placement: Placement | None = None
        self._group: RankGroup | None = None
        self._channel: DriverChannel | None = None
        self._oldest_since = 0.0
        self._unseen: dict[str, list[Process]] = {}
        self._generation = 0
        self._ended: str | None = "they were not started"

    @property
    def generation(self) -> int:
        """Which start of the ranks this is, from 0."""
        return self._generation

    def start(self) -> WorkerReport:
        """Connect, place, start every rank, load and allocate.  Raises: ConfigError, PlacementError, WorkerError."""
        with self._ending_on_error():
            self._connection = self._connection or connect_ray(self._address, self._tp_size)
            from dsv4dist.workers.placement import IMPOSSIBLE_WAIT_S

            return self._launch(0.0 if self._connection.private else IMPOSSIBLE_WAIT_S)

    def restart(self) -> WorkerReport:
        """Start every rank again as the next generation, elsewhere if a node is gone.

        Raises: PlacementError when there is no room any more, also when Ray neither reaches a node nor gives it up;
        WorkerError.
        """
        self._end_ranks("they are started again")
        with self._ending_on_error():
            self._see_gone()
            if self._placement is not None and not self._placement.is_whole():
                self._placement.remove()
                self._placement = None
            self._generation += 1
            return self._launch(self._placement_timeout_s)  # a node that was lost may be replaced

    def check(self) -> None:
        """Between two steps: see whether every rank is there, unless none is.  Raises: WorkerError."""
        if self._ended is not None:
            return
        channel, group = self._running()
        with self._ending_on_error():
            group.raise_if_failed(channel.lost_ranks())
        group.all_seen_at = time.monotonic()

    def execute(self, packet: Int32Array) -> StepResult:
        """Run one step on every rank.  Raises: WorkerError with the rank and the first cause."""
        self.submit(packet)
        return self.collect()

    def submit(self, packet: Int32Array, num_steps: int = 1) -> None:
        """Send a packet of `num_steps` steps to every rank; the buffer may be reused then.  Raises: WorkerError."""
        channel, group = self._running()
        if not channel.in_flight:
            self._oldest_since = time.monotonic()
        with self._ending_on_error():
            try:
                channel.send(packet, num_steps)
            except ConnectionLostError:
                # A packet is missing even where the connection came back.
                group.raise_if_failed(channel.lost_ranks() or range(self._tp_size))

    def collect(self) -> StepResult:
        """Wait for the result of the oldest packet in flight.  Raises: WorkerError; also when a step takes too long."""
        channel, group = self._running()
        assert channel.in_flight, "collect follows submit"
        reported = self._oldest_since
        with self._ending_on_error():
            while (result := channel.poll(_TICK_S)) is None:
                group.raise_if_failed(channel.lost_ranks())
                now = time.monotonic()
                if now - self._oldest_since > self._step_timeout_s:
                    raise group.stuck(f"step {channel.oldest} is not finished after {self._step_timeout_s:g} s")
                if now - reported > _LATE_S:
                    reported = now
                    log.warning("step %d takes long: %s", channel.oldest, group.activities())
        self._oldest_since = group.all_seen_at = time.monotonic()
        return result

    def shutdown(self) -> None:
        """End every rank and leave Ray; at any time, from any state, as often as one likes; takes at most seconds."""
        try:
            self._end_ranks("they were shut down", in_order=True)
            if self._unseen:
                from dsv4dist.workers.ray_group import wait_gone_elsewhere

                self._unseen = wait_gone_elsewhere(self._unseen, _GONE_ELSEWHERE_S)
        finally:
            placement, self._placement = self._placement, None
            connection, self._connection = self._connection, None
            try:
                if placement is not None:
                    placement.remove()
            finally:
                if connection is not None:
                    connection.close()

    def _launch(self, impossible_wait_s: float) -> WorkerReport:
        """Start the ranks of this generation, in the placement that is held or else in a new one."""
        from dsv4dist.workers.actor import RankSetup
        from dsv4dist.workers.placement import place
        from dsv4dist.workers.ray_group import RankGroup

        assert self._connection is not None
        if self._placement is None:
            self._placement = place(
                self._tp_size, self._resource, self._placement_timeout_s, impossible_wait_s=impossible_wait_s
            )
        group = self._group = RankGroup(self._placement, self._connection.node_id)
        group.create(self._start_timeout_s)
        collective_timeout_s = self._step_timeout_s + _COLLECTIVE_MARGIN_S
        ranks = [(rank, self._tp_size, collective_timeout_s) for rank in range(self._tp_size)]
        store = group.call("prepare", self._start_timeout_s, each=ranks)[0]
        peers = [Peer(r, None if group.is_local(r) else group.places[r].public_key) for r in range(self._tp_size)]
        channel = self._channel = DriverChannel(
            peers, self._generation, host=self._connection.host, heartbeat_s=self._heartbeat_s
        )
        setup = RankSetup(self._factory, self._tp_size, store, self._generation, collective_timeout_s)
        addresses = [(channel.address(rank),) for rank in range(self._tp_size)]
        reports: list[InitReport] = group.call("init", self._start_timeout_s, setup, each=addresses)
        num_blocks = agree_on_blocks([report.cache_block_limits for report in reports])
        decode: str = group.call("allocate", self._start_timeout_s, num_blocks)[0]
        group.run(_CONNECT_S)
        try:
            channel.wait_connected(_CONNECT_S, group.raise_if_failed)
        except ConnectionLostError as error:
            raise group.stuck(str(error)) from error
        self._ended = None
        return _report(group, reports, num_blocks, decode)

    def _running(self) -> tuple[DriverChannel, RankGroup]:
        if self._ended is not None or self._channel is None or self._group is None:
            raise WorkerError(f"the ranks are not running: {self._ended}")
        return self._channel, self._group

    @contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        """Leave no rank behind when the block fails, with whatever; placement and connection stay."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, RankFailure) and self._group is not None:
                error.unseen_s = time.monotonic() - self._group.all_seen_at
            self._end_ranks(str(error) or type(error).__name__)
            raise

    def _end_ranks(self, why: str, in_order: bool = False) -> None:
        """End the ranks of this generation, at once unless they may finish `in_order`; the placement stays."""
        was_running, self._ended = self._ended is None, why
        channel, self._channel = self._channel, None
        group, self._group = self._group, None
        try:
            if in_order and was_running and channel is not None and group is not None and not channel.in_flight:
                channel.stop()
                group.wait_stopped(_STOP_S)
        finally:
            if group is not None:
                self._unseen |= group.kill()
            if channel is not None:
                channel.close()

    def _see_gone(self) -> None:
        """Return when no process of an earlier generation is left on any node.  Raises: PlacementError."""
        from dsv4dist.workers.ray_group import wait_gone_elsewhere

        deadline = time.monotonic() + _NODE_DECISION_S
        while self._unseen:
            self._unseen = wait_gone_elsewhere(self._unseen, _GONE_ELSEWHERE_S)
            if self._unseen and time.monotonic() > deadline:
                raise PlacementError(
                    f"node {', '.join(self._unseen)} neither answers nor is given up by Ray after "
                    f"{_NODE_DECISION_S:g} s, so its ranks may still run; see `ray status`, and end Ray on that node"
                )


def _report(group: RankGroup, reports: list[InitReport], num_blocks: dict[str, int], decode: str) -> WorkerReport:
    ranks = [
        RankInfo(rank, place.node_id, place.hostname, place.process.pid, report.device, place.gpu_id)
        for rank, (place, report) in enumerate(zip(group.places, reports, strict=True))
    ]
    for info in ranks:
        gpu = f", GPU {info.gpu_id} of its node" if info.gpu_id else ""
        log.info("rank %d: pid %d on %s, %s%s", info.rank, info.pid, info.hostname, info.device, gpu)
    return WorkerReport(
        num_cache_blocks=num_blocks,
        ranks=ranks,
        skipped_draft_tensors=reports[0].skipped_draft_tensors,
        load_s=max(report.load_s for report in reports),
        decode=decode,
    )
