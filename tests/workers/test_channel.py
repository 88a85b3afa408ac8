from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from dsv4dist.errors import WorkerError
from dsv4dist.workers import channel as channel_module
from dsv4dist.workers.channel import ChannelAddress, DriverChannel, Keys, Peer, RankChannel, make_keys
from dsv4dist.workers.executor import StepResult

LOCAL, REMOTE = "ipc", "tcp"


def answer(packet: Any) -> StepResult:
    return StepResult(3, int(packet[0]), packet[1:4] * 2, np.zeros(1, np.float32), np.zeros((0, 7), np.float32), 5)


def serve(end: RankChannel, rank: int, errors: list[Exception]) -> None:
    """A rank's loop, as the actor has it."""
    try:
        end.hello(10)
        while (step := end.receive()) is not None:
            if rank == 0:
                end.reply(answer(step.packet))
    except WorkerError as error:
        errors.append(error)
    finally:
        end.close()


class Pair:
    """A driver and two ranks in threads, over one transport."""

    def __init__(self, transport: str, heartbeat_s: float = 10.0) -> None:
        self.keys = [make_keys(), make_keys()]
        remote = transport == REMOTE
        peers = [Peer(rank, keys.public if remote else None) for rank, keys in enumerate(self.keys)]
        self.driver = DriverChannel(peers, 3, heartbeat_s=heartbeat_s)
        self.errors: list[Exception] = []
        self.threads: list[threading.Thread] = []

    def start(self, *ranks: int) -> None:
        for rank in ranks:
            end = RankChannel(self.driver.address(rank), rank, 3, self.keys[rank])
            thread = threading.Thread(target=serve, args=(end, rank, self.errors), daemon=True)
            thread.start()
            self.threads.append(thread)

    def join(self) -> None:
        for thread in self.threads:
            thread.join(15)
            assert not thread.is_alive()


@pytest.fixture
def pair() -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(transport: str, **options: Any) -> Pair:
        made.append(Pair(transport, **options))
        return made[-1]

    yield make
    for one in made:
        one.driver.close()


@pytest.mark.parametrize("transport", [LOCAL, REMOTE])
def test_packets_go_to_all_and_results_come_back_in_order(pair: Callable[..., Pair], transport: str) -> None:
    p = pair(transport)
    p.start(0, 1)
    p.driver.wait_connected(10, lambda: None)
    packet = np.arange(16384, dtype=np.int32)
    for step in range(3):  # the buffer is reused while packets are under way
        packet[:4] = (step, 1, step, -1)
        p.driver.send(packet)
        packet[:] = -7
    assert p.driver.in_flight == 3
    for step in range(3):
        result = p.driver.poll(10)
        assert result is not None
        assert (result.step_id, result.token_ids.tolist()) == (step, [2, 2 * step, -2])
    assert p.driver.in_flight == 0
    assert p.driver.poll(0) is None
    assert p.driver.lost_ranks() == []
    p.driver.stop()
    p.join()
    assert p.errors == []


def test_local_sockets_lie_where_only_the_user_can_enter(pair: Callable[..., Pair]) -> None:
    p = pair(LOCAL)
    path = Path(p.driver.address(0).endpoint.removeprefix("ipc://"))
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert path.parent.stat().st_uid == os.getuid()
    assert len(os.fsencode(path)) < 100
    p.driver.close()
    assert not path.parent.exists()
    p.driver.close()


def test_remote_sockets_listen_on_one_address_alone(pair: Callable[..., Pair]) -> None:
    p = pair(REMOTE)
    for rank in range(2):
        assert p.driver.address(rank).endpoint.startswith("tcp://127.0.0.1:")
        port = int(p.driver.address(rank).endpoint.rpartition(":")[2])
        listening = [
            line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "0A"
        ]
        assert f"0100007F:{port:04X}" in listening
        assert f"00000000:{port:04X}" not in listening


def test_a_stranger_gets_nothing_and_does_not_disturb(pair: Callable[..., Pair]) -> None:
    p = pair(REMOTE)
    address = p.driver.address(0)
    keys = p.keys[0]
    strangers: list[tuple[str, Keys, ChannelAddress]] = [
        ("own key unknown", make_keys(), address),
        ("key of another rank", p.keys[1], address),
        ("wrong server key", keys, ChannelAddress(address.endpoint, make_keys().public)),
        ("no CURVE at all", keys, ChannelAddress(address.endpoint, None)),
    ]
    p.start(0, 1)
    p.driver.wait_connected(10, lambda: None)
    for what, own, where in strangers:
        end = RankChannel(where, 0, 3, own)
        with pytest.raises(WorkerError, match="no connection to the driver"):
            end.hello(0.4)
        p.driver.send(np.arange(8, dtype=np.int32))
        assert end._socket.poll(100) == 0, what
        end._socket.linger = 0
        end.close()
        assert p.driver.poll(10) is not None, what
        assert p.driver.lost_ranks() == [], what


def test_strangers_before_the_rank_do_not_keep_it_out(pair: Callable[..., Pair]) -> None:
    p = pair(REMOTE)
    end = RankChannel(p.driver.address(1), 1, 3, make_keys())
    with pytest.raises(WorkerError):
        end.hello(0.3)
    p.start(0, 1)
    p.driver.wait_connected(10, lambda: None)
    end._socket.linger = 0
    end.close()


def test_ranks_that_stay_away_are_named(pair: Callable[..., Pair]) -> None:
    p = pair(LOCAL)
    p.start(0)
    with pytest.raises(WorkerError, match=r"^rank 1 did not connect to the driver within 0.3 s$"):
        p.driver.wait_connected(0.3, lambda: None)


def test_waiting_stops_when_the_check_raises(pair: Callable[..., Pair]) -> None:
    def check() -> None:
        raise WorkerError("rank 1: gone")

    p = pair(LOCAL)
    with pytest.raises(WorkerError, match="rank 1: gone"):
        p.driver.wait_connected(60, check)


@pytest.mark.parametrize("transport", [LOCAL, REMOTE])
def test_a_rank_that_goes_away_is_seen(pair: Callable[..., Pair], transport: str) -> None:
    p = pair(transport)
    p.start(0)
    gone = RankChannel(p.driver.address(1), 1, 3, p.keys[1])
    gone.hello(10)
    p.driver.wait_connected(10, lambda: None)
    assert p.driver.lost_ranks() == []
    gone.close()
    deadline = time.monotonic() + 10
    while p.driver.lost_ranks() != [1]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(WorkerError, match="rank 1: its connection is lost"):
        p.driver.send(np.zeros(4, dtype=np.int32))


@pytest.mark.parametrize("transport", [LOCAL, REMOTE])
def test_a_driver_that_goes_away_ends_the_ranks(
    pair: Callable[..., Pair], transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "_IDLE_CHECK_MS", 50)
    p = pair(transport)
    p.start(0, 1)
    p.driver.wait_connected(10, lambda: None)
    p.driver.close()
    p.join()
    assert [str(error) for error in p.errors] == ["the connection to the driver is lost"] * 2


def test_a_packet_of_another_generation_is_refused(pair: Callable[..., Pair]) -> None:
    p = pair(LOCAL)
    late = RankChannel(p.driver.address(0), 0, 2, p.keys[0])
    late.hello(10)
    p.start(1)
    with pytest.raises(WorkerError, match="generation 2; expected 3"):
        p.driver.wait_connected(10, lambda: None)
    late.close()


def test_a_missing_packet_is_refused(pair: Callable[..., Pair]) -> None:
    p = pair(LOCAL)
    end = RankChannel(p.driver.address(0), 0, 3, p.keys[0])
    end.hello(10)
    p.start(1)
    p.driver.wait_connected(10, lambda: None)
    p.driver._next_sent = 1
    p.driver.send(np.zeros(4, dtype=np.int32))
    with pytest.raises(WorkerError, match="packet 1 arrived; expected 0"):
        end.receive()
    end.close()


def test_an_oversized_message_never_arrives(pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MAX_RESULT_BYTES", 1000)
    p = pair(LOCAL)
    p.start(1)
    end = RankChannel(p.driver.address(0), 0, 3, p.keys[0])
    end.hello(10)
    p.driver.wait_connected(10, lambda: None)
    p.driver.send(np.arange(4, dtype=np.int32))
    assert end.receive() is not None
    end._socket.send(bytes(2000))  # the driver's socket drops the connection; the rank's opens a new one
    end.close()
    assert p.driver.poll(0.3) is None


def test_waiting_burns_no_core(pair: Callable[..., Pair]) -> None:
    p = pair(LOCAL)
    p.start(0, 1)
    p.driver.wait_connected(10, lambda: None)
    before = time.process_time()
    p.driver.poll(0.5)
    assert time.process_time() - before < 0.25  # one busy thread would take 0.5 s


def test_too_many_packets_in_flight_are_a_bug_of_the_caller(pair: Callable[..., Pair]) -> None:
    p = pair(LOCAL)
    p.start(0, 1)
    p.driver.wait_connected(10, lambda: None)
    for _ in range(channel_module.MAX_IN_FLIGHT):
        p.driver.send(np.zeros(4, dtype=np.int32))
    with pytest.raises(AssertionError, match="collect some first"):
        p.driver.send(np.zeros(4, dtype=np.int32))


def test_heartbeats_are_set_on_both_ends(pair: Callable[..., Pair]) -> None:
    p = pair(LOCAL, heartbeat_s=2.5)
    socket = p.driver._sockets[0]
    assert socket.getsockopt(zmq.HEARTBEAT_TIMEOUT) == 2500
    assert socket.getsockopt(zmq.HEARTBEAT_IVL) == 500
