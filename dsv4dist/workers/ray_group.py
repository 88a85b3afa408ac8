"""The actors of one generation: created in a placement group, ordered into ranks, watched, and ended for certain."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from dsv4dist.errors import WorkerError
from dsv4dist.workers import processes
from dsv4dist.workers.actor import CONCURRENCY_GROUPS, Health, RankPlace, Worker
from dsv4dist.workers.failure import FailureKind, RankFailure, describe, first_cause, one_line
from dsv4dist.workers.placement import Placement, rank_order

log = logging.getLogger(__name__)

_LATE_S = 10.0
"""A phase that takes longer is reported in the log every so many seconds, with what each rank is doing."""
_SETTLE_S = 0.2
_CAUSE_WAIT_S = 5.0
_HEALTH_S = 2.0
_GONE_S = 1.0
_REMOTE_GONE_S = 2.5


class RankGroup:
    """Actors in rank order; `refs` are those of their `run`."""

    def __init__(self, placement: Placement, driver_node_id: str) -> None:
        self._driver_node_id = driver_node_id
        self._placement = placement
        self._actors: list[Any] = []
        self._processes: dict[int, processes.Process] = {}
        self.places: list[RankPlace] = []
        self.refs: list[Any] = []

    def create(self, timeout_s: float) -> None:
        """Start one actor per bundle and put them in rank order.  Raises: WorkerError."""
        remote = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(Worker)
        resources = {"num_gpus": 1, "num_cpus": 0} if self._placement.resource == "GPU" else {"num_cpus": 1}
        for bundle, node_id in enumerate(self._placement.node_ids):
            strategy = PlacementGroupSchedulingStrategy(self._placement.group, placement_group_bundle_index=bundle)
            options = remote.options(
                scheduling_strategy=strategy,
                max_restarts=0,
                max_task_retries=0,
                **resources,
            )
            self._actors.append(options.remote(self._placement.node_ids.count(node_id)))
        places: list[RankPlace] = self.call("describe", timeout_s)
        order = rank_order([(place.node_id, place.gpu_id) for place in places], self._driver_node_id)
        self._actors = [self._actors[bundle] for bundle in order]
        self.places = [places[bundle] for bundle in order]
        for rank, place in enumerate(self.places):
            process = processes.find_process(place.pid) if self.is_local(rank) else None
            if process is not None:
                self._processes[rank] = process

    def is_local(self, rank: int) -> bool:
        """Whether a rank runs on the driver's node."""
        return self.places[rank].node_id == self._driver_node_id

    def call(self, method: str, timeout_s: float, *args: object, each: Sequence[Sequence[object]] = ()) -> list[Any]:
        """Call a method on every rank, with `args` and then the rank's entry of `each`; returns their results.

        Raises: WorkerError with the first cause when any rank fails, or naming the ranks that are not done in time.
        """
        refs = [
            getattr(actor, method).options(concurrency_group="device").remote(*args, *(each[i] if each else ()))
            for i, actor in enumerate(self._actors)
        ]
        results: dict[int, Any] = {}
        started = reported = time.monotonic()
        while len(results) < len(refs):
            pending = [ref for rank, ref in enumerate(refs) if rank not in results]
            ready, _ = ray.wait(pending, num_returns=1, timeout=1.0)
            for ref in ready:
                rank = refs.index(ref)
                try:
                    results[rank] = ray.get(ref)
                except RayError as error:
                    raise_cause([self._failure(rank, error), *self._settle(refs)])
            now = time.monotonic()
            if now - started > timeout_s:
                missing = ", ".join(str(rank) for rank in range(len(refs)) if rank not in results)
                raise WorkerError(f"rank {missing}: {method} not done after {timeout_s:g} s; {self.activities()}")
            if now - reported > _LATE_S:
                reported = now
                log.info("%s takes %.0f s so far; %s", method, now - started, self.activities())
        return [results[rank] for rank in range(len(refs))]

    def run(self, connect_timeout_s: float) -> None:
        """Begin every rank's `run`."""
        self.refs = [actor.run.options(concurrency_group="device").remote(connect_timeout_s) for actor in self._actors]

    def raise_if_failed(self, lost: Sequence[int] = ()) -> None:
        """Raise the first cause if a rank has ended or, by `lost`, is no longer connected.  Raises: WorkerError."""
        ready, _ = ray.wait(self.refs, num_returns=1, timeout=0)
        if not ready and not lost:
            return
        failures = [
            RankFailure(rank, FailureKind.LOST, f"its connection broke ({self._named(rank)})", time.time())
            for rank in lost
        ]
        raise_cause([*failures, *self._settle(self.refs, bool(failures))])

    def activities(self) -> str:
        """What each rank is doing, as far as it answers."""
        refs = [actor.health.options(concurrency_group="health").remote() for actor in self._actors]
        ray.wait(refs, num_returns=len(refs), timeout=_HEALTH_S)
        texts = []
        for rank, ref in enumerate(refs):
            try:
                health: Health = ray.get(ref, timeout=0)
                at = f" at {health.where}" if health.where else ""
                texts.append(f"rank {rank} {health.phase} for {health.since_s:.1f} s{at}")
            except (RayError, GetTimeoutError):
                texts.append(f"rank {rank} does not answer")
        return ", ".join(texts)

    def wait_stopped(self, timeout_s: float) -> None:
        """Give every `run` time to return after a stop."""
        if self.refs:
            ray.wait(self.refs, num_returns=len(self.refs), timeout=timeout_s)

    def kill(self) -> None:
        """End every actor, wherever it is blocked, and return when their processes are gone."""
        for actor in self._actors:
            with contextlib.suppress(RayError):
                ray.kill(actor, no_restart=True)
        self._actors = []
        left = processes.wait_gone(self._processes.values(), _GONE_S)
        if left:
            log.warning("ending processes that Ray left behind: %s", ", ".join(str(process.pid) for process in left))
            processes.kill(left)
            processes.wait_gone(left, _GONE_S)
        self._wait_remote_gone()

    def _wait_remote_gone(self) -> None:
        pids_of_node: dict[str, list[int]] = {}
        for rank, place in enumerate(self.places):
            if not self.is_local(rank):
                pids_of_node.setdefault(place.node_id, []).append(place.pid)
        wait = ray.remote(_wait_pids_gone)
        refs = [
            wait.options(
                num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
            ).remote(pids, _REMOTE_GONE_S / 2)
            for node_id, pids in pids_of_node.items()
        ]
        try:
            ray.get(refs, timeout=_REMOTE_GONE_S)
        except RayError as error:  # also when the node itself is gone
            log.info("no answer whether the ranks of other nodes are gone: %s", one_line(error))

    def _settle(self, refs: Sequence[Any], only_lost: bool = False) -> list[RankFailure]:
        """Collect failures until the cause is among them or time is up: what arrives first is often a consequence."""
        started = time.monotonic()
        while True:
            found = self._failures(refs)
            waited = time.monotonic() - started
            explained = any(failure.kind <= FailureKind.RAISED for failure in found)
            # Consequences alone: the dead rank, or the one that raised, is still to be reported.
            if waited > (_SETTLE_S if explained or not (found or only_lost) else _CAUSE_WAIT_S):
                return found
            time.sleep(0.02)

    def _failures(self, refs: Sequence[Any]) -> list[RankFailure]:
        found = []
        ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
        for ref in ready:
            rank = refs.index(ref)
            try:
                ray.get(ref)
            except RayError as error:
                found.append(self._failure(rank, error))
            else:
                if ref in self.refs:
                    found.append(RankFailure(rank, FailureKind.LOST, "it stopped by itself", time.time()))
        known = {failure.rank for failure in found}
        for rank, process in self._processes.items():
            if rank not in known and not processes.is_alive(process):
                message = f"its process died ({self._named(rank)})"
                found.append(RankFailure(rank, FailureKind.DIED, message, time.time()))
        return found

    def _failure(self, rank: int, error: RayError) -> RankFailure:
        if isinstance(error, RayTaskError):
            if isinstance(error.cause, RankFailure):
                return error.cause
            return RankFailure(rank, FailureKind.RAISED, describe(error.cause or error), time.time(), str(error))
        if isinstance(error, ActorUnavailableError):
            message = f"its process cannot be reached ({self._named(rank)}): the process or the whole node is gone"
        else:
            message = f"its process died ({self._named(rank)}): {_reason(str(error))}"
        return RankFailure(rank, FailureKind.DIED, message, time.time(), str(error))

    def _named(self, rank: int) -> str:
        if rank >= len(self.places):
            return "not started"
        return f"pid {self.places[rank].pid} on {self.places[rank].hostname}"


def raise_cause(failures: Sequence[RankFailure]) -> None:
    """Raise the failure that explains the others as one line; the rest goes to the log."""
    cause = first_cause(failures)
    for failure in failures:
        log.debug("%s\n%s", failure, failure.details)
    raise WorkerError(str(cause)) from cause


def _wait_pids_gone(pids: list[int], timeout_s: float) -> None:
    found = [process for process in map(processes.find_process, pids) if process is not None]
    left = processes.wait_gone(found, timeout_s)
    processes.kill(left)
    processes.wait_gone(left, timeout_s / 2)


def _reason(text: str) -> str:
    """The sentence of Ray's long explanation that says why an actor died."""
    found = re.search(r"Worker exit detail:(.*?)(?:Some common causes|There are some potential|\n|$)", text, re.DOTALL)
    if found and found[1].strip():
        return f"{one_line(found[1])} (killed, out of memory, or crashed)"
    lines = [line for line in text.splitlines() if line.strip()]
    return one_line(lines[-1]) if lines else "no reason given"
