"""The executor over Ray: starts the ranks, sends every step to all of them, and ends all when one fails.

Ray is imported when `connect_ray` has put the environment right, so the modules that need it are imported after that.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, NoReturn

from dsv4dist.errors import WorkerError
from dsv4dist.workers.channel import DriverChannel, Peer
from dsv4dist.workers.executor import Int32Array, RankInfo, RunnerFactory, StepResult, WorkerReport, agree_on_blocks
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
_COLLECTIVE_MARGIN_S = 60.0
"""Collectives give up this much after the driver's deadline, which can say more about the cause."""


class RayExecutor:
    """Runs every rank as a Ray actor. After a failure nothing of it is left running, and only `shutdown` is allowed."""

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
    ) -> None:
        """Prepare; nothing is started.

        factory     builds each rank's runner in the rank's process
        device      `cpu`, or any other name for one GPU per rank
        address     see `connect_ray`; unused with a `connection`, which this executor then closes
        timeouts    seconds for the placement, for each phase of the start (loading is the longest), and for a step
        """
        self._factory = factory
        self._tp_size = tp_size
        self._resource = "CPU" if device == "cpu" else "GPU"
        self._address = address
        self._connection = connection
        self._placement_timeout_s = placement_timeout_s
        self._start_timeout_s = start_timeout_s
        self._step_timeout_s = step_timeout_s
        self._placement: Placement | None = None
        self._group: RankGroup | None = None
        self._channel: DriverChannel | None = None
        self._oldest_since = 0.0
        self._generation = 0
        self._ended: str | None = "it was not started"

    @property
    def generation(self) -> int:
        """Which start of the ranks this is, from 0."""
        return self._generation

    def start(self) -> WorkerReport:
        """Connect, place, start every rank, load and allocate.  Raises: ConfigError, PlacementError, WorkerError."""
        try:
            self._connection = self._connection or connect_ray(self._address, self._tp_size)
            from dsv4dist.workers.placement import place

            self._placement = place(
                self._tp_size, self._resource, self._placement_timeout_s, may_grow=not self._connection.private
            )
            report = self._launch()
        except BaseException as error:
            self._end(str(error) or type(error).__name__)
            raise
        self._ended = None
        return report

    def execute(self, packet: Int32Array) -> StepResult:
        """Run one step on every rank.  Raises: WorkerError with the rank and the first cause."""
        self.submit(packet)
        return self.collect()

    def submit(self, packet: Int32Array) -> None:
        """Send a packet to every rank; the buffer may be reused afterwards.  Raises: WorkerError."""
        channel, group = self._running()
        if not channel.in_flight:
            self._oldest_since = time.monotonic()
        try:
            channel.send(packet)
        except WorkerError as error:
            self._fail(group, channel, error)

    def collect(self) -> StepResult:
        """Wait for the result of the oldest packet in flight.  Raises: WorkerError; also when a step takes too long."""
        channel, group = self._running()
        assert channel.in_flight, "collect follows submit"
        reported = self._oldest_since
        try:
            while (result := channel.poll(_TICK_S)) is None:
                group.raise_if_failed(channel.lost_ranks())
                now = time.monotonic()
                if now - self._oldest_since > self._step_timeout_s:
                    raise WorkerError(
                        f"step {channel.oldest} is not finished after {self._step_timeout_s:g} s: {group.activities()}"
                    )
                if now - reported > _LATE_S:
                    reported = now
                    log.warning("step %d takes long: %s", channel.oldest, group.activities())
        except WorkerError as error:
            self._fail(group, channel, error)
        self._oldest_since = time.monotonic()
        return result

    def shutdown(self) -> None:
        """End every rank and leave Ray; at any time, from any state, as often as one likes; takes at most seconds."""
        self._end("it was shut down")

    def _launch(self) -> WorkerReport:
        """Start the ranks of this generation in the placement that is held."""
        from dsv4dist.workers.actor import RankSetup
        from dsv4dist.workers.ray_group import RankGroup

        assert self._connection is not None
        assert self._placement is not None
        group = self._group = RankGroup(self._placement, self._connection.node_id)
        group.create(self._start_timeout_s)
        collective_timeout_s = self._step_timeout_s + _COLLECTIVE_MARGIN_S
        ranks = [(rank, self._tp_size, collective_timeout_s) for rank in range(self._tp_size)]
        store = group.call("prepare", self._start_timeout_s, each=ranks)[0]
        peers = [Peer(r, None if group.is_local(r) else group.places[r].public_key) for r in range(self._tp_size)]
        channel = self._channel = DriverChannel(peers, self._generation, host=self._connection.host)
        setup = RankSetup(self._factory, self._tp_size, store, self._generation, collective_timeout_s)
        addresses = [(channel.address(rank),) for rank in range(self._tp_size)]
        reports: list[InitReport] = group.call("init", self._start_timeout_s, setup, each=addresses)
        num_blocks = agree_on_blocks([report.cache_block_limits for report in reports])
        group.call("allocate", self._start_timeout_s, num_blocks)
        group.run(_CONNECT_S)
        channel.wait_connected(_CONNECT_S, group.raise_if_failed)
        return _report(group, reports, num_blocks)

    def _running(self) -> tuple[DriverChannel, RankGroup]:
        if self._ended is not None or self._channel is None or self._group is None:
            raise WorkerError(f"the ranks are not running: {self._ended}")
        return self._channel, self._group

    def _fail(self, group: RankGroup, channel: DriverChannel, error: WorkerError) -> NoReturn:
        """End everything and raise the cause: `error`, unless a rank's own failure explains it."""
        cause = error
        if not isinstance(error.__cause__, Exception):
            try:
                group.raise_if_failed(channel.lost_ranks())
            except WorkerError as explained:
                cause = explained
        self._end(str(cause))
        raise cause

    def _end_ranks(self) -> None:
        """End the ranks of this generation; the placement stays."""
        channel, self._channel = self._channel, None
        group, self._group = self._group, None
        try:
            if channel is not None and group is not None and self._ended is None and not channel.in_flight:
                channel.stop()
                group.wait_stopped(_STOP_S)
        finally:
            if group is not None:
                group.kill()
            if channel is not None:
                channel.close()

    def _end(self, why: str) -> None:
        try:
            self._end_ranks()
        finally:
            self._ended = why
            placement, self._placement = self._placement, None
            connection, self._connection = self._connection, None
            try:
                if placement is not None:
                    placement.remove()
            finally:
                if connection is not None:
                    connection.close()


def _report(group: RankGroup, reports: list[InitReport], num_blocks: dict[str, int]) -> WorkerReport:
    ranks = [
        RankInfo(rank, place.node_id, place.hostname, place.pid, report.device, place.gpu_id)
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
    )
