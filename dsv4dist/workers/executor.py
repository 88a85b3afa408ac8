"""The contract between the engine and whoever runs its steps, and the contract of one rank's runner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

    from dsv4dist.distributed.comm import Communicator
    from dsv4dist.distributed.tp import TpInfo

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


NO_TOKEN = -1


@dataclass(frozen=True)
class RankInfo:
    """Where a rank runs."""

    rank: int
    node_id: str
    """Ray's id of the node; empty for a rank inside the calling process."""
    hostname: str
    pid: int
    device: str
    """torch's name, such as `cpu` or `cuda:0`; an index counts what the rank's process sees."""
    gpu_id: str
    """The GPU's number on its node, or its UUID; empty on a CPU."""


@dataclass(frozen=True)
class WorkerReport:
    """What the ranks agreed on when they started."""

    num_cache_blocks: dict[str, int]
    """Blocks of each cache group: the least that any rank can hold."""
    ranks: list[RankInfo]
    skipped_draft_tensors: int
    """Checkpoint tensors of draft layers that were not loaded."""
    load_s: float
    """Seconds that the slowest rank took to load its weights."""
    decode: str = ""
    """How decode steps run: what capturing them took, or why they are not captured."""


@dataclass(frozen=True)
class StepResult:
    """What one step brings back, from rank 0. S sampled requests, M scored rows, L rows with logits, V vocabulary:

        token_ids  int32 [S x (1 + 2k)] with k speculative tokens: for each request 1 + k words for its new tokens,
                   NO_TOKEN behind the last, and k for its next drafts; NO_TOKEN alone where logits are not finite
        logprobs   float32 [M]
        logits     float32 [L, V]
    Every count may be 0. `generation` and `step_id` repeat those of the packet. Arrays that came over a channel are
    read-only.
    """

    generation: int
    step_id: int
    token_ids: Int32Array
    logprobs: Float32Array
    logits: Float32Array
    elapsed_us: int


class Runner(Protocol):
    """One rank's model. Every method is called on the same thread, in the order of this class."""

    @property
    def skipped_draft_tensors(self) -> int:
        """Checkpoint tensors that `load` left out because they belong to draft layers."""
        ...

    def load(self) -> None:
        """Read this rank's weights."""
        ...

    def cache_block_limits(self) -> dict[str, int]:
        """The blocks of each cache group that fit on this rank, after loading."""
        ...

    def allocate(self, num_blocks: dict[str, int]) -> str:
        """Create the caches with the agreed sizes, and all that a step needs; see WorkerReport.decode."""
        ...

    def execute(self, packet: Int32Array) -> Iterator[StepResult]:
        """Run the steps of a packet, a result each. All ranks get the same packets; only rank 0's results are used."""
        ...


RunnerFactory = Callable[["TpInfo", "Communicator", "torch.device"], Runner]
"""Builds a rank's runner in the rank's process: a top-level callable or a functools.partial of one, so it pickles."""


class Executor(Protocol):
    """Runs steps on every rank. Errors of ranks are WorkerError, one line with the rank and the first real cause.

    Behind an error of `start`, `restart`, `check` or a step no rank is left: `restart` or `shutdown` comes next.
    """

    @property
    def generation(self) -> int:
        """Which start of the ranks this is; packets and results carry it, and those of another one are refused."""
        ...

    def start(self) -> WorkerReport:
        """Start every rank, load, agree on cache sizes and allocate.  Raises: PlacementError, WorkerError."""
        ...

    def restart(self) -> WorkerReport:
        """Start every rank again, as the next generation, which knows nothing of the one before.

        Raises: PlacementError, WorkerError.
        """
        ...

    def check(self) -> None:
        """Between two steps: see whether every rank is there, unless none is.  Raises: WorkerError."""
        ...

    def execute(self, packet: Int32Array) -> StepResult:
        """Run one step: `submit`, then `collect`."""
        ...

    def submit(self, packet: Int32Array, num_steps: int = 1) -> None:
        """Send a packet of `num_steps` steps to every rank and return at once; its buffer may be reused afterwards."""
        ...

    def collect(self) -> StepResult:
        """Wait for the result of the oldest step that has not been collected."""
        ...

    def shutdown(self) -> None:
        """End every rank; safe at any time, also after a failure, and a second time."""
        ...


def agree_on_blocks(limits: list[dict[str, int]]) -> dict[str, int]:
    """The least of every rank's limits for each cache group; all ranks name the same groups."""
    groups = limits[0].keys()
    assert all(limit.keys() == groups for limit in limits), f"ranks name different cache groups: {limits}"
    return {group: min(limit[group] for limit in limits) for group in groups}
