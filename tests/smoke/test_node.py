"""Each check of a node, with what it reads replaced, and the parts that are real on this machine."""

from __future__ import annotations

import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsv4dist.smoke import node
from dsv4dist.smoke.rows import Row

VERSIONS: dict[str, Any] = {**dict.fromkeys(node.SAME_EVERYWHERE, "1"), "aiter": None, "driver": None}
RECIPE = {"preset": "tiny-swa"}


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A node with nothing wrong and no GPU."""
    monkeypatch.setattr(node, "versions", lambda: VERSIONS)
    monkeypatch.setattr(node, "driver_gpus", lambda: 0)
    monkeypatch.setattr(node, "memory_free_gib", lambda: 64.0)
    monkeypatch.setattr(node, "shm_free_gib", lambda: 8.0)
    monkeypatch.setattr(node, "soft_limit", lambda which: 65536.0)
    return monkeypatch


def rows_of(device: str = "cpu", ray_gpus: int = 0, expected: dict[str, Any] = VERSIONS) -> dict[str, Row]:
    return {row.check: row for row in node.host_rows("a", device, ray_gpus, expected)}


@pytest.mark.usefixtures("healthy")
def test_a_healthy_node_has_a_good_row_for_each_check() -> None:
    rows = rows_of()
    names = ["versions", "aiter", "gpus", "memory", "/dev/shm", "open files", "processes", "locked memory"]
    assert list(rows) == names
    for row in rows.values():
        assert (row.node, row.ok, row.hint) == ("a", True, "")
        assert list(row.as_dict())[:6] == ["check", "node", "ok", "value", "limit", "hint"]
        assert row.as_text().count("\n") == 0


@pytest.mark.parametrize(
    ("check", "name", "value", "device", "ray_gpus"),
    [
        ("versions", "versions", {**VERSIONS, "ray": "2"}, "cpu", 0),
        ("gpus", "driver_gpus", 8, "cpu", 0),
        ("memory", "memory_free_gib", 0.5, "cpu", 0),
        ("/dev/shm", "shm_free_gib", 0.06, "cpu", 0),
        ("/dev/shm", "shm_free_gib", 0.5, "cuda", 8),
        ("open files", "soft_limit", 1024.0, "cpu", 0),
        ("processes", "soft_limit", 1024.0, "cpu", 0),
    ],
)
def test_what_is_wrong_says_so_and_what_to_do(
    check: str, name: str, value: Any, device: str, ray_gpus: int, healthy: pytest.MonkeyPatch
) -> None:
    healthy.setattr(node, name, lambda *args: value)
    row = rows_of(device, ray_gpus)[check]
    assert not row.ok
    assert "`" in row.hint or "install" in row.hint
    assert row.as_text().startswith("FAIL ")
    assert f"next: {row.hint}" in row.as_text()


def test_versions_name_what_differs(healthy: pytest.MonkeyPatch) -> None:
    healthy.setattr(node, "versions", lambda: VERSIONS | {"ray": "2", "driver": "amdgpu 6", "pyzmq": "9"})
    row = rows_of()["versions"]
    assert row.value == "ray 2 (driver: 1)", "drivers and what does not cross nodes may differ"


def test_another_package_called_aiter_is_told(healthy: pytest.MonkeyPatch) -> None:
    healthy.setattr(node, "versions", lambda: VERSIONS | {"aiter": "not AMD's: aiter 0.13 answers to the name aiter"})
    row = rows_of()["aiter"]
    assert row.ok, "nothing needs it"
    assert "answers to the name aiter" in str(row.value)
    assert "amd-aiter" in row.hint


def test_locked_memory_matters_for_rdma_only(healthy: pytest.MonkeyPatch) -> None:
    assert rows_of("cuda", 8)["locked memory"].ok
    healthy.setattr(node.Path, "is_dir", lambda path: str(path) == "/sys/class/infiniband")
    assert rows_of("cpu")["locked memory"].ok
    assert "memlock" in rows_of("cuda", 8)["locked memory"].hint
    healthy.setattr(node, "soft_limit", lambda which: 2.0**63)
    assert rows_of("cuda", 8)["locked memory"].value == "unlimited"


@pytest.mark.usefixtures("healthy")
def test_a_node_without_gpus_in_a_cluster_that_has_some_is_no_failure() -> None:
    row = rows_of("cuda", 0)["gpus"]
    assert row.ok
    assert row.hint


def test_what_this_machine_says_can_be_read() -> None:
    assert 0 < node.memory_free_gib() < 1e6
    assert node.shm_free_gib() >= 0
    assert node.driver_gpus() >= 0
    assert {*node.SAME_EVERYWHERE, "aiter", "driver"} <= set(node.versions())


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])


def test_closed_ports_are_named(port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        closed = int(other.getsockname()[1])
    found = node.unreachable([("b", "127.0.0.1", port), ("c", "127.0.0.1", closed)], timeout_s=5)
    assert found == [f"c (127.0.0.1:{closed}): Connection refused"]


def test_a_checkpoint_is_written_once_for_its_owner_alone(tmp_path: Path) -> None:
    base = tmp_path / "base"
    assert node.make_checkpoint_once(base, "me", RECIPE)
    assert stat.S_IMODE(base.stat().st_mode) == 0o700
    weights = base / "model" / "model.safetensors"
    written = weights.stat().st_mtime_ns
    assert not node.make_checkpoint_once(base, "me", RECIPE), "a shared file system"
    assert weights.stat().st_mtime_ns == written
    with pytest.raises(FileExistsError):
        node.make_checkpoint_once(base, "another", RECIPE)
    with pytest.raises(Exception, match="preset"):
        node.make_checkpoint_once(tmp_path / "bad", "me", {"preset": "unknown"})
    assert not (tmp_path / "bad").exists()
