"""The driver's connection to Ray: joining a cluster, or starting a private one that leaves nothing behind."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import sys
import threading
from dataclasses import dataclass, field

from dsv4dist.env import fold_rocr_mask, prepare_private_ray, ray_address
from dsv4dist.errors import ConfigError, WorkerError
from dsv4dist.workers.processes import Process, children, command_line, descendants, kill, wait_gone

log = logging.getLogger(__name__)

_HOST_PORT = re.compile(r"(\[[0-9a-fA-F:]+\]|[^\s:/]+):\d{1,5}")
_OBJECT_STORE_BYTES = 128 << 20
"""Enough for start-up messages: steps do not go through the object store, and a container's /dev/shm may be small."""
_EXIT_WAIT_S = 1.0
_ANSWER_S = 10.0


@dataclass
class RayConnection:
    """A connected Ray; `close` undoes what `connect_ray` did, and no more."""

    address: str
    private: bool
    """Started by `connect_ray` for this process alone."""
    joined: bool
    """Connected by `connect_ray`; False when the calling program had connected before."""
    node_id: str
    """The driver's node."""
    host: str
    """The driver's address in the cluster."""
    _processes: list[Process] = field(default_factory=list)
    _open: bool = True

    def has_gpus(self) -> bool:
        """Whether any node of the cluster offers a GPU."""
        import ray

        return bool(ray.cluster_resources().get("GPU", 0))

    def close(self) -> None:
        """Leave the cluster; a private one is ended, and no process of it is left. A second call does nothing."""
        if not self._open:
            return
        self._open = False
        if not self.joined:
            return
        import ray

        everything = descendants(self._processes)
        ray.shutdown()
        if self.private:
            kill(wait_gone(everything, _EXIT_WAIT_S))
            wait_gone(everything, _EXIT_WAIT_S)


def connect_ray(address: str, tp_size: int) -> RayConnection:
    """Join or start Ray. A program that is already connected keeps its connection, whatever `address` says.

    address  `auto`: the cluster that RAY_ADDRESS names, else a private instance; `local`: a private instance;
             HOST:PORT: that cluster
    tp_size  a private instance offers at least this many CPUs, so that many CPU ranks fit on few cores

    Raises: ConfigError for an address of another form; WorkerError when the cluster does not answer.
    """
    target = _target(address)
    if target not in (None, "auto"):
        _check_listening(target)
    change = fold_rocr_mask()
    if change is not None:
        log.warning("%s", change)
    if target is None:
        prepare_private_ray()  # before the import, which reads what it sets
    import ray

    if ray.is_initialized():
        return _connection(private=False, joined=False)
    before = children(os.getpid())
    on_term = signal.getsignal(signal.SIGTERM)
    try:
        if target is None:
            ray.init(
                address="local",
                num_cpus=max(tp_size, len(os.sched_getaffinity(0))),
                object_store_memory=_OBJECT_STORE_BYTES,
                include_dashboard=False,
                logging_level=logging.ERROR,
            )
        else:
            ray.init(address=target, logging_level=logging.ERROR)
    except ray.exceptions.AuthenticationError as error:
        text = " ".join(str(error).split())[:200]
        raise WorkerError(
            f"Ray at {target} asks for a token: {text}; give its cluster's token in RAY_AUTH_TOKEN, and set "
            "RAY_AUTH_MODE=token"
        ) from error
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        where = f"Ray at {target}" if target else "a private Ray instance"
        text = " ".join(str(error).split())[:300]
        advice = "set TMPDIR to a shorter path" if "AF_UNIX path" in text else "check --address and `ray status`"
        raise WorkerError(f"{where} does not start or answer: {text}; {advice}") from error
    if threading.current_thread() is threading.main_thread() and on_term is not None:
        signal.signal(signal.SIGTERM, on_term)  # Ray puts a handler there that aborts the process
    connection = _connection(private=target is None, joined=True)
    if target is None:
        connection._processes = [
            child for child in children(os.getpid()) if child not in before and "/ray/" in command_line(child.pid)
        ]
    return connection


def _check_listening(target: str) -> None:
    """Refuse an address where nobody answers, which Ray would try for many minutes.  Raises: WorkerError."""
    host, _, port = target.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise WorkerError(f"Ray at {target} does not answer: {error}; check --address and `ray status`") from error


def joins_cluster(address: str) -> bool:
    """Whether `connect_ray` would use a cluster that exists.  Raises: ConfigError for an address of another form."""
    ray = sys.modules.get("ray")
    return _target(address) is not None or (ray is not None and ray.is_initialized())


def _target(address: str) -> str | None:
    """What to join; None = start a private instance."""
    source = "--address"
    if address == "auto":
        named = ray_address()
        if named is None:
            return None
        source, address = "RAY_ADDRESS", named
        if address == "auto":
            return "auto"
    if address == "local":
        return None
    if not _HOST_PORT.fullmatch(address):
        raise ConfigError(
            f"{source} is {address!r}; expected auto, local or HOST:PORT (to reach a cluster from outside it, "
            "use `ray job submit --address http://HOST:8265 -- dsv4dist ...`)"
        )
    return address


def _connection(private: bool, joined: bool) -> RayConnection:
    import ray

    context = ray.get_runtime_context()
    return RayConnection(
        address=context.gcs_address,
        private=private,
        joined=joined,
        node_id=context.get_node_id(),
        host=ray.util.get_node_ip_address(),
    )
