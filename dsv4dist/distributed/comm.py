"""The collectives between tensor-parallel ranks: nothing for one rank, torch.distributed for more."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from dsv4dist.distributed.tp import TpInfo
from dsv4dist.env import set_collective_interface
from dsv4dist.errors import WorkerError

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


class CollectiveError(WorkerError):
    """A collective that broke, most often because another rank is gone: rarely the first cause of a failure."""


class Communicator(Protocol):
    """The collectives of one rank; every rank calls the same ones in the same order with equal shapes and dtypes."""

    @property
    def tp(self) -> TpInfo:
        """This rank's place."""
        ...

    @property
    def capturable(self) -> bool:
        """Whether everything but `barrier` may be captured in a graph."""
        ...

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a contiguous tensor over the ranks in its own dtype, in place; returns it."""
        ...

    def all_gather_last(self, tensor: torch.Tensor) -> torch.Tensor:
        """Join the ranks' tensors [..., n] in rank order to a new one [..., n x ranks], same dtype."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Overwrite a contiguous tensor with that of rank `source`, in place; returns it."""
        ...

    def barrier(self) -> None:
        """Return when every rank has called it."""
        ...

    def close(self) -> None:
        """Leave the group; a second call does nothing."""
        ...


class SingleProcess:
    """The collectives of a group of one: no group, no buffers, no work."""

    tp = TpInfo()
    capturable = True

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather_last(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        return tensor

    def barrier(self) -> None:
        return None

    def close(self) -> None:
        return None


class TorchDistributed:
    """The collectives over torch.distributed's default group: gloo for CPU tensors, NCCL or RCCL for one GPU a rank.

    A sum is formed in the tensor's dtype and has the same bits on every rank. Everything but `barrier` may be
    captured in a graph with NCCL and RCCL. A broken collective raises CollectiveError.
    """

    def __init__(self, tp: TpInfo) -> None:
        assert dist.get_world_size() == tp.size, f"{dist.get_world_size()} processes for {tp.size} ranks"
        assert dist.get_rank() == tp.rank, f"process {dist.get_rank()} for rank {tp.rank}"
        self.tp = tp
        self.capturable = dist.get_backend() == "nccl"
        self._open = True

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.is_contiguous(), f"all_reduce needs a contiguous tensor, got strides {tensor.stride()}"
        with _named("all_reduce", tensor):
            dist.all_reduce(tensor)
        return tensor

    def all_gather_last(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.contiguous()
        parts = tensor.new_empty((self.tp.size, *tensor.shape))
        with _named("all_gather_last", tensor):
            dist.all_gather(list(parts.unbind(0)), tensor)
        return parts.movedim(0, -2).flatten(-2)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        assert tensor.is_contiguous(), f"broadcast needs a contiguous tensor, got strides {tensor.stride()}"
        with _named("broadcast", tensor):
            dist.broadcast(tensor, src=source)
        return tensor

    def barrier(self) -> None:
        with _named("barrier", None):
            dist.barrier()

    def close(self) -> None:
        if self._open:
            self._open = False
            dist.destroy_process_group()


def bind_store(host: str, tp: TpInfo, timeout_s: float) -> tuple[TCPStore, int]:
    """Open the rendezvous store on a free port of `host` alone, without waiting for anyone; returns it and the port."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(tp.size + 16)
    port = int(listener.getsockname()[1])
    # A store that binds by itself listens on every interface; it takes over the descriptor of a bound one.
    store = TCPStore(
        host,
        port,
        tp.size,
        True,
        timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


def open_communicator(
    tp: TpInfo,
    device: torch.device,
    address: tuple[str, int] | None,
    timeout_s: float,
    *,
    own_host: str,
    store: TCPStore | None = None,
    backend: str | None = None,
) -> Communicator:
    """Join the group whose store listens at `address`; every rank calls it, and it returns when all have.

    A group of one ignores all but `tp` and creates nothing. `own_host` is this rank's address in the cluster, whose
    interface all traffic then uses; `store` is the store itself on the rank that bound it. `backend` None picks gloo
    for a CPU and nccl (RCCL on ROCm) for a GPU; gloo also serves ranks that share a GPU.
    Raises: CollectiveError when the group does not form within `timeout_s`.
    """
    if tp.size == 1:
        return SingleProcess()
    assert address is not None, "a group of several ranks needs the address of its store"
    interface = interface_of(own_host)
    if interface is not None:
        set_collective_interface(interface)
    timeout = timedelta(seconds=timeout_s)
    chosen = backend or ("gloo" if device.type == "cpu" else "nccl")
    try:
        store = store or TCPStore(address[0], address[1], tp.size, False, timeout)
        dist.init_process_group(
            chosen,
            store=store,
            rank=tp.rank,
            world_size=tp.size,
            timeout=timeout,
            device_id=device if chosen == "nccl" else None,
        )
    except (RuntimeError, ValueError) as error:
        raise CollectiveError(f"{chosen} group of {tp.size} ranks at {address[0]}:{address[1]}: {error}") from error
    return TorchDistributed(tp)


def interface_of(address: str) -> str | None:
    """The name of the network interface that has this IPv4 address; None when there is none, or for IPv6."""
    try:
        wanted = socket.inet_aton(address)
    except OSError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # an interface without an IPv4 address
                continue
            if reply[20:24] == wanted:
                return name
    return None


@contextmanager
def _named(operation: str, tensor: torch.Tensor | None) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        what = "" if tensor is None else f" of {list(tensor.shape)} {tensor.dtype}".replace("torch.", "")
        raise CollectiveError(f"{operation}{what}: {error}") from error
