"""Probes: one Ray actor per place of the cluster, asked together, each of which may fail or stay silent."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dsv4dist.errors import WorkerError
from dsv4dist.workers.failure import describe, one_line

Key = TypeVar("Key", bound=Hashable)
_POLL_S = 1.0


class ProbeError(WorkerError):
    """A probe raised, died or did not answer in time."""


class Probes(Generic[Key]):
    """One actor of `kind` for each key, on the node with that Ray id; `gpus` for each. Close ends their processes."""

    def __init__(self, kind: type, node_ids: Mapping[Key, str], gpus: Mapping[Key, int] | None = None) -> None:
        remote = ray.remote(kind)
        self._actors = {
            key: remote.options(
                num_cpus=0,
                num_gpus=gpus[key] if gpus else 0,
                max_restarts=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            ).remote()
            for key, node_id in node_ids.items()
        }
        self._started = list(self._actors.values())

    @property
    def keys(self) -> list[Key]:
        """The probes that were not given up."""
        return list(self._actors)

    def ask(
        self,
        method: str,
        timeout_s: float,
        args: Callable[[Key], tuple[Any, ...]] = lambda key: (),
        only: Collection[Key] | None = None,
    ) -> dict[Key, Any]:
        """What each probe's method returns, or the ProbeError that came instead; of all probes, or of `only` some.

        A probe that is dead or silent is given up: it is not asked again.
        """
        asked = {key: actor for key, actor in self._actors.items() if only is None or key in only}
        refs = {getattr(actor, method).remote(*args(key)): key for key, actor in asked.items()}
        found: dict[Key, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(found) < len(refs) and time.monotonic() < deadline:
            waiting = [ref for ref, key in refs.items() if key not in found]
            ready, _ = ray.wait(waiting, num_returns=1, timeout=min(_POLL_S, timeout_s))
            for ref in ready:
                found[refs[ref]] = _answer(ref)
        silent = f"no answer within {timeout_s:g} s"
        for key in refs.values():
            found.setdefault(key, ProbeError(silent))
            if isinstance(found[key], ProbeError) and not isinstance(found[key].__cause__, RayTaskError):
                self._actors.pop(key)
        return {key: found[key] for key in refs.values()}

    def close(self) -> None:
        """End every probe."""
        for actor in self._started:
            with contextlib.suppress(RayError):
                ray.kill(actor, no_restart=True)
        self._actors, self._started = {}, []


def _answer(ref: Any) -> Any:
    try:
        return ray.get(ref)
    except RayTaskError as error:
        failure = ProbeError(describe(error.cause or error))
        failure.__cause__ = error
    except RayActorError as error:
        failure = ProbeError(f"its process ended: {one_line(str(error))[:200]}")
    except RayError as error:
        failure = ProbeError(one_line(str(error))[:200])
    return failure
