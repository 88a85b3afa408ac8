"""Checks that run on each node, in a process without a GPU: versions, limits, memory, clock, ports."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv4dist.smoke.rows import Row

if TYPE_CHECKING:
    from dsv4dist.smoke.gpu import DeviceReport

MIN_MEMORY_GIB = 2.0
MIN_SHM_GIB = {"cpu": 0.125, "cuda": 1.0}
"""A private Ray's object store; what RCCL and NCCL take per node of eight GPUs, with a margin."""
MIN_OPEN_FILES = 4096
MIN_PROCESSES = 4096
MAX_CLOCK_SKEW_S = 1.0
"""Logs of two nodes can still be put in order by eye."""
SAME_EVERYWHERE = ("dsv4dist", "python", "torch", "hip", "cuda", "ray", "triton")
"""What may not differ from the driver's node."""
OWNER_FILE = "owner"


class NodeProbe:
    """A process on one node; the driver calls its methods through Ray."""

    def __init__(self) -> None:
        os.dup2(2, 1)  # a library's print would end up between the driver's own rows
        self._listener: socket.socket | None = None
        self._made: Path | None = None

    def host_rows(self, node: str, device: str, ray_gpus: int, expected: dict[str, Any]) -> list[Row]:
        """The rows of this node; `expected` holds the driver's versions."""
        return host_rows(node, device, ray_gpus, expected)

    def now(self) -> float:
        """This node's clock, seconds since the epoch."""
        return time.time()

    def listen(self, host: str) -> int:
        """Accept connections on a free port of `host` alone, and close each at once; returns the port."""
        self._listener = socket.create_server(
            (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=64
        )
        threading.Thread(target=_accept, args=(self._listener,), daemon=True).start()
        return int(self._listener.getsockname()[1])

    def unreachable(self, addresses: Sequence[tuple[str, str, int]], timeout_s: float) -> list[str]:
        """Connect to each (node, host, port); returns a line for each that does not answer."""
        return unreachable(addresses, timeout_s)

    def make_checkpoint(self, base: str, owner: str, recipe: dict[str, Any]) -> None:
        """Write the checkpoint that the driver has at `base`, unless this node sees the driver's own."""
        if make_checkpoint_once(Path(base), owner, recipe):
            self._made = Path(base)

    def device_report(self) -> DeviceReport:
        """The measurements of a GPU, of this node's CPU."""
        from dsv4dist.smoke.gpu import measure_device

        return measure_device("", "cpu")

    def clean(self) -> None:
        """Remove what this process has written."""
        if self._made is not None:
            shutil.rmtree(self._made, ignore_errors=True)


def host_rows(node: str, device: str, ray_gpus: int, expected: dict[str, Any]) -> list[Row]:
    """One row per check of the machine that this process runs on."""
    here = versions()
    different = [
        f"{name} {here.get(name)} (driver: {expected[name]})"
        for name in SAME_EVERYWHERE
        if here.get(name) != expected[name]
    ]
    shown = ", ".join(f"{name} {version}" for name, version in here.items() if version is not None)
    stranger = str(here["aiter"]).startswith("not AMD's")
    return [
        Row(
            "versions", node, not different, "; ".join(different) or shown, "as on the driver's node",
            f"install the same versions on {node}, then `dsv4dist info` there" if different else "",
            more={"versions": here},
        ),
        Row(
            "aiter", node, True, here["aiter"] or "not installed", None,
            "AMD's kernel library is the package amd-aiter; `pip uninstall aiter` on that node" if stranger else "",
        ),
        _gpu_count(node, device, ray_gpus),
        _at_least("memory", node, memory_free_gib(), MIN_MEMORY_GIB, "GiB", "`ps aux --sort=-rss | head` there"),
        _at_least(
            "/dev/shm", node, shm_free_gib(), MIN_SHM_GIB[device], "GiB",
            "start the container with --shm-size=8g (Kubernetes: an emptyDir of medium Memory), or `df -h /dev/shm`",
        ),
        _at_least(
            "open files", node, soft_limit(resource.RLIMIT_NOFILE), MIN_OPEN_FILES, "",
            "`ulimit -n 65536` before `ray start` there (Docker: --ulimit nofile=65536)",
        ),
        _at_least(
            "processes", node, soft_limit(resource.RLIMIT_NPROC), MIN_PROCESSES, "",
            "`ulimit -u 65536` before `ray start` there (Docker: --pids-limit -1)",
        ),
        _locked_memory(node, device),
    ]  # fmt: skip


def versions() -> dict[str, Any]:
    """What `dsv4dist info` shows, and the GPU's kernel driver."""
    from dsv4dist.cli import info

    return {**info.versions(), "driver": driver_version()}


def driver_version() -> str | None:
    """The version of the kernel's GPU driver; None where there is none."""
    for name in ("amdgpu", "nvidia"):
        try:
            return f"{name} {Path(f'/sys/module/{name}/version').read_text().strip()}"
        except OSError:
            if Path(f"/sys/module/{name}").is_dir():
                return f"{name} (the kernel's own)"
    return None


def driver_gpus() -> int:
    """GPUs that the kernel driver offers to this machine or container, whatever libraries see of them."""
    nvidia = Path("/proc/driver/nvidia/gpus")
    if nvidia.is_dir():
        return len(list(nvidia.iterdir()))
    found = 0
    for properties in Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        try:
            facts = dict(line.split(None, 1) for line in properties.read_text().splitlines() if " " in line)
        except OSError:
            continue  # a GPU that this container may not use
        found += int(facts.get("simd_count", 0)) > 0
    return found


def memory_free_gib() -> float:
    """Memory that new processes can have: the machine's, or the container's where that is less."""
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(facts["MemAvailable"].split()[0]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        free = free if limit == "max" else min(free, int(limit) - used)
    except OSError:
        pass  # no cgroup of version 2
    return round(free / 2**30, 2)


def shm_free_gib() -> float:
    """Free shared memory, which Ray's object store and the collectives inside a node use."""
    try:
        facts = os.statvfs("/dev/shm")
    except OSError:
        return 0.0
    return round(facts.f_bavail * facts.f_frsize / 2**30, 2)


def soft_limit(which: int) -> float:
    """A limit of this process; infinite as a number that JSON has."""
    soft = resource.getrlimit(which)[0]
    return float(2**63) if soft == resource.RLIM_INFINITY else float(soft)


def unreachable(addresses: Sequence[tuple[str, str, int]], timeout_s: float) -> list[str]:
    """Connect to each (node, host, port); returns a line for each that does not answer within `timeout_s`."""
    failed = []
    for node, host, port in addresses:
        try:
            socket.create_connection((host, port), timeout_s).close()
        except OSError as error:
            failed.append(f"{node} ({host}:{port}): {error.strerror or error}")
    return failed


def make_checkpoint_once(base: Path, owner: str, recipe: dict[str, Any]) -> bool:
    """Write base/model by `recipe`, the arguments of make_checkpoint, into a new directory of this user alone.

    Returns False, and writes nothing, where base is there with `owner` in it: a file system shared with the driver.
    Raises: FileExistsError when it is someone else's.
    """
    from dsv4dist.checkpoint.random_checkpoint import make_checkpoint

    try:
        base.mkdir(mode=0o700)
    except FileExistsError:
        try:
            if (base / OWNER_FILE).read_text() == owner:
                return False
        except OSError:
            pass
        raise
    try:
        make_checkpoint(base / "model", **recipe)
        (base / OWNER_FILE).write_text(owner)
    except BaseException:
        shutil.rmtree(base, ignore_errors=True)
        raise
    return True


def _accept(listener: socket.socket) -> None:
    while True:
        try:
            listener.accept()[0].close()
        except OSError:
            return


def _at_least(check: str, node: str, value: float, limit: float, unit: str, hint: str) -> Row:
    ok = value >= limit
    shown = "unlimited" if value >= 2**62 else value
    return Row(check, node, ok, shown, limit, "" if ok else hint, unit="" if shown == "unlimited" else unit)


def _gpu_count(node: str, device: str, ray_gpus: int) -> Row:
    """Ray's count beside the driver's: Ray may be given fewer on purpose, but none is a mistake."""
    present = driver_gpus()
    value = f"Ray {ray_gpus}, kernel driver {present}"
    hint = ""
    if present and not ray_gpus:
        hint = "`pip install amdsmi` on that node (Ray finds AMD GPUs through it), then `ray stop` and `ray start`"
        if Path("/dev/kfd").exists() and not os.access("/dev/kfd", os.R_OK | os.W_OK):
            hint = "/dev/kfd is not open to this user: add the user to the groups render and video, log in again"
        elif Path("/proc/driver/nvidia").exists():
            hint = "`nvidia-smi` on that node, then `ray stop` and `ray start`"
    elif device == "cuda" and not ray_gpus:
        return Row("gpus", node, True, value, hint="no ranks run here; `ray status` shows which nodes have GPUs")
    return Row("gpus", node, not hint, value, f"Ray {present}" if hint else None, hint)


def _locked_memory(node: str, device: str) -> Row:
    """Only RDMA between nodes needs it unlimited."""
    limit, has_rdma = soft_limit(resource.RLIMIT_MEMLOCK), Path("/sys/class/infiniband").is_dir()
    ok = device == "cpu" or not has_rdma or limit >= 2**62
    return Row(
        "locked memory", node, ok, "unlimited" if limit >= 2**62 else limit, None if ok else "unlimited",
        "" if ok else "`ulimit -l unlimited` before `ray start` there (Docker: --ulimit memlock=-1)",
        unit="" if limit >= 2**62 else "bytes",
    )  # fmt: skip
