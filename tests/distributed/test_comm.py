"""The collectives over gloo between processes. Oracle: numpy on what every rank is known to have given."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dsv4dist.distributed.comm import (
    CollectiveError,
    SingleProcess,
    TorchDistributed,
    bind_store,
    interface_of,
    open_communicator,
)
from dsv4dist.distributed.tp import TpInfo

HOST = "127.0.0.1"
CPU = torch.device("cpu")


def given(rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    """What rank `rank` brings: values whose sum depends on the order in which they are added."""
    return torch.from_numpy(np.random.default_rng(rank).standard_normal(shape, np.float32) * 10.0**rank)


def _rank(work: Callable[[TorchDistributed], Any], tp: TpInfo, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    comm = open_communicator(tp, CPU, (HOST, port), 30, own_host=HOST)
    assert isinstance(comm, TorchDistributed)
    try:
        results.put((tp.rank, work(comm)))
    finally:
        comm.close()
        comm.close()


def together(size: int, work: Callable[[TorchDistributed], Any]) -> list[Any]:
    """Run `work` on `size` ranks in processes of their own; returns what they return, in rank order."""
    context = multiprocessing.get_context("spawn")
    store, port = bind_store(HOST, TpInfo(0, size), 30)
    results = context.Queue()
    ranks = [context.Process(target=_rank, args=(work, TpInfo(rank, size), port, results)) for rank in range(size)]
    for one in ranks:
        one.start()
    try:
        found = dict(results.get(timeout=60) for _ in ranks)
    finally:
        for one in ranks:
            one.join(20)
            one.kill()
        del store
    return [found[rank] for rank in range(size)]


def sums(comm: TorchDistributed) -> list[bytes]:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((1,), (5, 7), (3, 2, 129)):
            tensor = given(comm.tp.rank, shape).to(dtype)
            assert comm.all_reduce(tensor) is tensor
            found.append(tensor.float().numpy().tobytes())
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_sums_have_the_same_bits_on_every_rank(size: int) -> None:
    """Or ranks would go on with different rows, and select different keys."""
    found = together(size, sums)
    assert all(one == found[0] for one in found)
    for which, shape in enumerate(((1,), (5, 7), (3, 2, 129))):
        exact = sum(given(rank, shape).double() for rank in range(size))
        for half, tolerance in ((0, 1e-5), (1, 2e-2)):
            got = torch.from_numpy(np.frombuffer(found[0][which + 3 * half], np.float32).reshape(shape).copy())
            assert float((got.double() - exact).abs().max()) <= tolerance * 10.0**size


def joins(comm: TorchDistributed) -> list[Any]:
    rank = comm.tp.rank
    wide = torch.arange(12).reshape(2, 6).T + 100 * rank  # not contiguous
    scalar_rows = comm.all_gather_last(torch.tensor([rank]))
    gathered = comm.all_gather_last(wide[:, :1])
    from_last = comm.broadcast(torch.full((3,), rank), source=comm.tp.size - 1)
    comm.barrier()
    with pytest.raises(AssertionError, match="contiguous"):
        comm.all_reduce(wide)
    with pytest.raises(AssertionError, match="contiguous"):
        comm.broadcast(wide)
    return [scalar_rows.tolist(), gathered.tolist(), from_last.tolist(), comm.capturable]


def test_parts_are_joined_in_rank_order() -> None:
    for scalar_rows, gathered, from_last, capturable in together(3, joins):
        assert scalar_rows == [0, 1, 2]
        assert gathered == [[row, row + 100, row + 200] for row in range(6)]
        assert from_last == [2, 2, 2]
        assert not capturable


def leave(comm: TorchDistributed) -> str:
    if comm.tp.rank == 1:
        return "gone"
    try:
        while True:  # what is under way when the other leaves may still end well
            comm.all_reduce(torch.ones(3, 5, dtype=torch.bfloat16))
    except CollectiveError as error:
        return str(error)


def test_a_rank_that_leaves_is_an_error_that_names_the_collective() -> None:
    stayed, _ = together(2, leave)
    assert stayed.startswith("all_reduce of [3, 5] bfloat16: ")


def test_a_group_that_does_not_form_is_told_with_its_address() -> None:
    store, port = bind_store(HOST, TpInfo(0, 2), 1)
    with pytest.raises(CollectiveError, match=f"gloo group of 2 ranks at {HOST}:{port}: "):
        open_communicator(TpInfo(0, 2), CPU, (HOST, port), 1, own_host=HOST, store=store)


def test_a_group_of_one_creates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "init_process_group", None)
    before = dict(os.environ)
    comm = open_communicator(TpInfo(), CPU, None, 1, own_host="")
    assert isinstance(comm, SingleProcess)
    assert not torch.distributed.is_initialized()
    assert dict(os.environ) == before
    tensor = torch.tensor([[1.0, 2.0]])
    assert comm.all_reduce(tensor) is tensor
    assert comm.broadcast(tensor) is tensor
    joined = comm.all_gather_last(tensor)
    assert joined.tolist() == tensor.tolist()
    assert joined.data_ptr() != tensor.data_ptr()
    comm.barrier()
    comm.close()


def test_the_store_listens_on_its_address_alone() -> None:
    store, port = bind_store(HOST, TpInfo(0, 2), 5)
    socket.create_connection((HOST, port), 5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), 5).close()
    del store


def test_interfaces_by_address() -> None:
    assert interface_of(HOST) == "lo"
    assert interface_of("203.0.113.1") is None
    assert interface_of("::1") is None
    assert interface_of("no address") is None
