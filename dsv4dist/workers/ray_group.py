"""The actors of one generation: created in a placement group, ordered into ranks, watched, and ended for certain."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from dsv4dist.workers import processes
from dsv4dist.workers.actor import CONCURRENCY_GROUPS, EXECUTING, Health, RankPlace, Worker
from dsv4dist.workers.failure import FailureKind, RankFailure, describe, first_cause, one_line
from dsv4dist.workers.placement import Placement, cluster_nodes, rank_order

log = logging.getLogger(__name__)

_LATE_S = 10.0
"""A phase that takes longer is reported in the log every so many seconds, with what each rank is doing."""
_SILENT_S = 300.0
"""A rank that for so long does not say what it is doing is stuck, however long its phase may take."""
_SETTLE_S = 0.2
_CAUSE_WAIT_S = 5.0
_HEALTH_S = 2.0
_GONE_S = 1.0


class RankGroup:
    """Actors in rank order; `refs` are those of their `run`, `all_seen_at` is when the last of them showed life."""

    def __init__(self, placement: Placement, driver_node_id: str) -> None:
        self._driver_node_id = driver_node_id
        self._placement = placement
        self._actors: list[Any] = []
        self.places: list[RankPlace] = []
        self.refs: list[Any] = []
        self.all_seen_at = time.monotonic()
        self._phase_refs: list[Any] = []

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
        places: dict[int, RankPlace] = {}
        try:
            self.call("describe", timeout_s, results=places)
        finally:  # of those that answered the processes are to be seen gone, also when others failed
            known = sorted(places)
            order = rank_order([(places[i].node_id, places[i].gpu_id) for i in known], self._driver_node_id)
            unknown = [actor for bundle, actor in enumerate(self._actors) if bundle not in places]
            self._actors = [self._actors[known[i]] for i in order] + unknown
            self.places = [places[known[i]] for i in order]

    def is_local(self, rank: int) -> bool:
        """Whether a rank runs on the driver's node."""
        return self.places[rank].node_id == self._driver_node_id

    def call(
        self,
        method: str,
        timeout_s: float,
        *args: object,
        each: Sequence[Sequence[object]] = (),
        results: dict[int, Any] | None = None,
    ) -> list[Any]:
        """Call a method on every rank, with `args` and then the rank's entry of `each`; returns their results.

        results  takes each rank's result as soon as it is there
        Raises: RankFailure with the first cause when any rank fails, its node is gone, or it is not done in time.
        """
        self._phase_refs = refs = [
            getattr(actor, method).options(concurrency_group="device").remote(*args, *(each[i] if each else ()))
            for i, actor in enumerate(self._actors)
        ]
        results = {} if results is None else results
        started = reported = time.monotonic()
        answered = dict.fromkeys(range(len(refs)), started)
        while missing := [rank for rank in range(len(refs)) if rank not in results]:
            ready, _ = ray.wait([refs[rank] for rank in missing], num_returns=1, timeout=1.0)
            for ref in ready:
                rank = refs.index(ref)
                try:
                    results[rank] = ray.get(ref)
                except RayError as error:
                    raise_cause([self._failure(rank, error), *self._settle(refs)])
            if ready:
                continue
            self.all_seen_at = min(answered[rank] for rank in missing)
            self._raise_if_node_lost(missing)
            now = time.monotonic()
            if now - started > timeout_s:
                raise self.stuck(f"{method} is not done after {timeout_s:g} s", missing)
            if now - reported > _LATE_S:
                reported = now
                healths = self._healths()
                log.info("%s takes %.0f s so far; %s", method, now - started, _activities(healths))
                answered |= {rank: now for rank, health in enumerate(healths) if isinstance(health, Health)}
                # One that never answered is still being started.
                silent = [rank for rank in missing if now - answered[rank] > _SILENT_S and self.places]
                if silent:
                    raise self.stuck(f"no answer for {_SILENT_S:g} s during {method}", silent)
        self.all_seen_at = time.monotonic()
        return [results[rank] for rank in range(len(refs))]

    def run(self, connect_timeout_s: float) -> None:
        """Begin every rank's `run`."""
        self.refs = [actor.run.options(concurrency_group="device").remote(connect_timeout_s) for actor in self._actors]

    def raise_if_failed(self, lost: Sequence[int] = ()) -> None:
        """Raise the first cause if a rank has ended or, by `lost`, is no longer connected.  Raises: RankFailure."""
        ready, _ = ray.wait(self.refs, num_returns=1, timeout=0)
        if not ready and not lost:
            return
        failures = [
            RankFailure(rank, FailureKind.LOST, f"its connection broke ({self._named(rank)})", time.time())
            for rank in lost
        ]
        failures += self._settle(self.refs, bool(failures))
        if lost and not any(failure.kind.explains for failure in failures):
            failures += self._silent(lost)
        raise_cause(failures)

    def activities(self) -> str:
        """What each rank is doing, as far as it answers."""
        return _activities(self._healths())

    def stuck(self, what: str, suspects: Sequence[int] = ()) -> RankFailure:
        """The failure of the rank that holds the others up: one that does not answer, else one that does not wait for
        others in a collective. Without `suspects` all that execute a step are."""
        healths = self._healths()
        working = [
            rank
            for rank, health in enumerate(healths)
            if not isinstance(health, Health) or health.phase.startswith(EXECUTING)
        ]

        def innocence(rank: int) -> int:
            health = healths[rank]
            return 0 if not isinstance(health, Health) else 1 + health.where.startswith("comm.py:")

        rank = min(suspects or working or range(len(healths)), key=innocence)
        message = f"{what} ({self._named(rank)}): {_activities(healths)}"
        return RankFailure(rank, FailureKind.STUCK, message, time.time())

    def wait_stopped(self, timeout_s: float) -> None:
        """Give every `run` time to return after a stop."""
        if self.refs:
            ray.wait(self.refs, num_returns=len(self.refs), timeout=timeout_s)

    def kill(self) -> dict[str, list[processes.Process]]:
        """End every actor, wherever it is blocked; returns the processes, by node, that are still to be seen gone.

        On the driver's node they are gone when this returns; for others see `wait_gone_elsewhere`.
        """
        for actor in self._actors:
            with contextlib.suppress(RayError):
                ray.kill(actor, no_restart=True)
        self._actors = []
        of_node: dict[str, list[processes.Process]] = {}
        for place in self.places:
            of_node.setdefault(place.node_id, []).append(place.process)
        left = processes.wait_gone(of_node.pop(self._driver_node_id, []), _GONE_S)
        if left:
            log.info("ending processes that Ray left behind: %s", ", ".join(str(process.pid) for process in left))
            processes.kill(left)
            processes.wait_gone(left, _GONE_S)
        self._forget_errors()
        return of_node

    def _forget_errors(self) -> None:
        """Take the errors that followed from the first: Ray prints those that nobody looked at, as tracebacks."""
        refs = [*self._phase_refs, *self.refs]
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=_SETTLE_S) if refs else ([], [])
        for ref in ready:
            with contextlib.suppress(RayError):
                ray.get(ref)

    def _raise_if_node_lost(self, ranks: Sequence[int]) -> None:
        alive = {node.node_id for node in cluster_nodes()}
        for rank in ranks:
            node_id = self.places[rank].node_id if self.places else self._placement.node_ids[rank]
            if node_id not in alive:
                message = f"its node is gone ({self._named(rank)}, node {node_id})"
                raise RankFailure(rank, FailureKind.DIED, message, time.time())

    def _healths(self) -> list[Health | RayError]:
        """What each rank is doing, or why there is no answer."""
        refs = [actor.health.options(concurrency_group="health").remote() for actor in self._actors]
        ray.wait(refs, num_returns=len(refs), timeout=_HEALTH_S)
        found: list[Health | RayError] = []
        for ref in refs:
            try:
                found.append(ray.get(ref, timeout=0))
            except RayError as error:  # GetTimeoutError is one
                found.append(error)
        return found

    def _silent(self, lost: Sequence[int]) -> list[RankFailure]:
        """Why ranks whose connection broke do not answer either; nothing of those that do."""
        healths, found = self._healths(), []
        for rank in lost:
            health = healths[rank]
            if isinstance(health, RayActorError):
                found.append(self._failure(rank, health))
            elif isinstance(health, RayError):
                message = f"it does not answer: its process is stopped, or its node cut off ({self._named(rank)})"
                found.append(RankFailure(rank, FailureKind.STUCK, message, time.time()))
        return found

    def _settle(self, refs: Sequence[Any], only_lost: bool = False) -> list[RankFailure]:
        """Collect failures until the cause is among them or time is up: what arrives first is often a consequence."""
        started = time.monotonic()
        while True:
            found = self._failures(refs)
            waited = time.monotonic() - started
            explained = any(failure.kind.explains for failure in found)
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
        for rank, place in enumerate(self.places):
            if rank not in known and self.is_local(rank) and not processes.is_alive(place.process):
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
            return "while it was started"
        return f"pid {self.places[rank].process.pid} on {self.places[rank].hostname}"


def raise_cause(failures: Sequence[RankFailure]) -> None:
    """Raise the failure that explains the others as one line; the rest goes to the log."""
    cause = first_cause(failures)
    for failure in failures:
        log.debug("%s\n%s", failure, failure.details)
    raise cause


def wait_gone_elsewhere(
    of_node: Mapping[str, list[processes.Process]], timeout_s: float
) -> dict[str, list[processes.Process]]:
    """See that processes of other nodes are gone, ending them where Ray did not; returns those of which it is unknown.

    Those of a node that has left the cluster are gone as far as anybody here can tell.
    """
    wait = ray.remote(_end)
    refs = {
        wait.options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
        ).remote(found, timeout_s / 2): node_id
        for node_id, found in of_node.items()
    }
    ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s) if refs else ([], [])
    gone = set(of_node) - {node.node_id for node in cluster_nodes()}
    for ref in ready:
        with contextlib.suppress(RayError):
            if ray.get(ref):
                gone.add(refs[ref])
    return {node_id: found for node_id, found in of_node.items() if node_id not in gone}


def _end(found: list[processes.Process], timeout_s: float) -> bool:
    """Runs on the node of the processes; whether all are gone in the end."""
    left = processes.wait_gone(found, timeout_s / 2)
    processes.kill(left)
    return not processes.wait_gone(left, timeout_s / 2)


def _activities(healths: Sequence[Health | RayError]) -> str:
    texts = []
    for rank, health in enumerate(healths):
        if isinstance(health, Health):
            at = f" at {health.where}" if health.where else ""
            texts.append(f"rank {rank} {health.phase} for {health.since_s:.1f} s{at}")
        else:
            texts.append(f"rank {rank} does not answer")
    return ", ".join(texts)


def _reason(text: str) -> str:
    """The sentence of Ray's long explanation that says why an actor died."""
    found = re.search(r"Worker exit detail:(.*?)(?:Some common causes|There are some potential|\n|$)", text, re.DOTALL)
    if found and found[1].strip():
        return f"{one_line(found[1])} (killed, out of memory, or crashed)"
    lines = [line for line in text.splitlines() if line.strip()]
    return one_line(lines[-1]) if lines else "no reason given"
