"""One rank as a Ray actor: started in phases, then one long `run`, whose end tells the driver that the rank is gone.

Nothing here imports torch before the constructor has set the environment that torch reads when it loads. Phases that
touch the device, and `run`, go to a concurrency group of one thread, so all device work stays on the thread that chose
the device; `health` has a thread of its own and answers while `run` is busy.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import ray

from dsv4dist.distributed.tp import TpInfo
from dsv4dist.env import debug_wanted, device_masks, set_thread_count
from dsv4dist.workers.channel import ChannelAddress, ConnectionLostError, RankChannel, make_keys
from dsv4dist.workers.devices import device_index
from dsv4dist.workers.executor import Runner, RunnerFactory
from dsv4dist.workers.failure import FailureKind, RankFailure, describe
from dsv4dist.workers.processes import Process, find_process

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import TCPStore

    from dsv4dist.distributed.comm import Communicator

CONCURRENCY_GROUPS = {"device": 1, "health": 1}
EXECUTING = "executing packet"
"""How the phase of a rank begins that runs a step."""
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class RankPlace:
    """Where an actor found itself, before it is given a rank."""

    node_id: str
    hostname: str
    host: str
    """The node's address in the cluster."""
    process: Process
    gpu_id: str
    """Empty without a GPU."""
    public_key: bytes
    masks: dict[str, str]
    """The visible-device variables it started with."""
    torch_was_loaded: bool


@dataclass(frozen=True)
class RankSetup:
    """What every rank of a generation is initialised with."""

    factory: RunnerFactory
    size: int
    store: tuple[str, int] | None
    generation: int
    collective_timeout_s: float


@dataclass(frozen=True)
class InitReport:
    """What a rank knows once its weights are loaded."""

    device: str
    cache_block_limits: dict[str, int]
    skipped_draft_tensors: int
    load_s: float


@dataclass(frozen=True)
class Health:
    """What a rank is doing: the phase, for how long, and the line of code it is at."""

    phase: str
    since_s: float
    where: str


def _with_rank(method: Callable[Concatenate[Worker, P], R]) -> Callable[Concatenate[Worker, P], R]:
    """The border to the driver: whatever a phase raises arrives there as a RankFailure."""

    @wraps(method)
    def bordered(self: Worker, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            message = f"{describe(error)} ({self.phase}; pid {os.getpid()} on {socket.gethostname()})"
            raise RankFailure(self.rank, _kind_of(error), message, time.time(), traceback.format_exc()) from None

    return bordered


class Worker:
    """A rank's process. The driver calls each phase once, in this order, when every rank has done the one before."""

    def __init__(self, ranks_on_node: int) -> None:
        # A library's print to standard output would end up between the driver's own results.
        os.dup2(2, 1)
        self._torch_was_loaded = "torch" in sys.modules
        self._threads = max(1, len(os.sched_getaffinity(0)) // ranks_on_node)
        set_thread_count(self._threads)
        self.rank = -1
        self._keys = make_keys()
        self._store: TCPStore | None = None
        self._gpu_id = ""
        self._enter("created")

    def describe(self) -> RankPlace:
        """Where this actor is."""
        context = ray.get_runtime_context()
        gpu_ids = context.get_accelerator_ids().get("GPU", [])
        self._gpu_id = str(gpu_ids[0]) if gpu_ids else ""
        process = find_process(os.getpid())
        assert process is not None, "this process exists"
        return RankPlace(
            node_id=context.get_node_id(),
            hostname=socket.gethostname(),
            host=ray.util.get_node_ip_address(),
            process=process,
            gpu_id=self._gpu_id,
            public_key=self._keys.public,
            masks=device_masks(),
            torch_was_loaded=self._torch_was_loaded,
        )

    @_with_rank
    def prepare(self, rank: int, size: int, timeout_s: float) -> tuple[str, int] | None:
        """Take a rank and load torch; rank 0 of several opens the rendezvous store and returns its host and port."""
        self.rank = rank
        level = logging.DEBUG if debug_wanted() else logging.WARNING
        logging.basicConfig(format=f"rank {rank}: %(message)s", level=logging.WARNING, force=True)
        logging.getLogger("dsv4dist").setLevel(level)
        self._tp = TpInfo(rank, size)
        self._enter("loading torch")
        import torch

        from dsv4dist.distributed.comm import bind_store

        torch.set_num_threads(self._threads)
        if self.rank != 0 or self._tp.size == 1:
            return None
        host = ray.util.get_node_ip_address()
        self._store, port = bind_store(host, self._tp, timeout_s)
        return host, port

    @_with_rank
    def init(self, setup: RankSetup, address: ChannelAddress) -> InitReport:
        """Choose the device, join the process group and load the weights."""
        from dsv4dist.distributed.comm import open_communicator

        self._thread_id = threading.get_ident()
        self._enter("joining the process group")
        device = self._choose_device()
        self._comm: Communicator = open_communicator(
            self._tp,
            device,
            setup.store,
            setup.collective_timeout_s,
            own_host=ray.util.get_node_ip_address(),
            store=self._store,
        )
        self._enter("loading weights")
        started = time.monotonic()
        self._runner: Runner = setup.factory(self._tp, self._comm, device)
        self._runner.load()
        load_s = time.monotonic() - started
        self._channel = RankChannel(address, self.rank, setup.generation, self._keys)
        return InitReport(
            device=str(device),
            cache_block_limits=self._runner.cache_block_limits(),
            skipped_draft_tensors=self._runner.skipped_draft_tensors,
            load_s=load_s,
        )

    @_with_rank
    def allocate(self, num_blocks: dict[str, int]) -> str:
        """Create the caches with the sizes that all ranks agreed on; says how decode steps will run."""
        self._enter("allocating caches")
        return self._runner.allocate(num_blocks)

    @_with_rank
    def run(self, connect_timeout_s: float) -> None:
        """Execute packets until the driver says stop; every other way out is a failure."""
        self._enter("connecting to the driver")
        self._channel.hello(connect_timeout_s)
        while True:
            self._enter("waiting for a packet")
            step = self._channel.receive()
            if step is None:
                break
            self._enter(f"{EXECUTING} {step.sequence}")
            for result in self._runner.execute(step.packet):
                if self.rank == 0:
                    self._channel.reply(result)
        self._enter("stopped")
        self._channel.close()
        self._comm.close()

    def health(self) -> Health:
        """What this rank is doing; answers while `run` is busy."""
        where = _line_of(getattr(self, "_thread_id", -1))
        return Health(self.phase, time.monotonic() - self._since, where)

    def _choose_device(self) -> torch.device:
        import torch

        if not self._gpu_id:
            return torch.device("cpu")
        device = torch.device("cuda", device_index(self._gpu_id, device_masks(), torch.cuda.device_count()))
        torch.cuda.set_device(device)
        return device

    def _enter(self, phase: str) -> None:
        self.phase = phase
        self._since = time.monotonic()


def _kind_of(error: Exception) -> FailureKind:
    # Two of the classes live in torch or beside it, which may not be loaded here yet: then they were not raised.
    comm, torch = sys.modules.get("dsv4dist.distributed.comm"), sys.modules.get("torch")
    if comm is not None and isinstance(error, comm.CollectiveError):
        return FailureKind.COLLECTIVE
    if isinstance(error, ConnectionLostError):
        return FailureKind.LOST
    if torch is not None and isinstance(error, torch.AcceleratorError):
        return FailureKind.DEVICE
    return FailureKind.RAISED


def _line_of(thread_id: int) -> str:
    """File, line and function at which a thread is, in the innermost code that belongs to no library."""
    frame = sys._current_frames().get(thread_id)
    libraries = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    while frame is not None and frame.f_code.co_filename.startswith(libraries) and frame.f_back is not None:
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}"
