"""How a step travels: one ZeroMQ socket per rank, held by the driver, and one on the rank's side.

Ranks on the driver's machine connect through `ipc://` in a directory that only the user can enter. Ranks elsewhere
connect through TCP with CURVE: the driver proves itself with a key made for this channel, each rank with a key of its
own whose public half reached the driver through Ray; a peer with any other key is cut off before it can send or read a
message.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import zmq
from zmq.auth.thread import ThreadAuthenticator

from dsv4dist.errors import WorkerError
from dsv4dist.workers.executor import Int32Array, StepResult
from dsv4dist.workers.messages import (
    MAX_PACKET_BYTES,
    MAX_RESULT_BYTES,
    SEQUENCE_MASK,
    Buffer,
    Header,
    Kind,
    decode_header,
    decode_result,
    decode_step,
    encode_result,
    encode_signal,
    encode_step,
)

_MAX_SOCKET_PATH = 107  # bytes that a Unix socket's path may have
_IDLE_CHECK_MS = 1000
_LINGER_MS = 500
MAX_IN_FLIGHT = 256
"""Results that may be outstanding."""


class ConnectionLostError(WorkerError):
    """The other end is not connected any more."""


class Keys(NamedTuple):
    """A CURVE key pair in ZeroMQ's text form."""

    public: bytes
    secret: bytes


@dataclass(frozen=True)
class Peer:
    """A rank as the driver expects it; `public_key` is needed for one on another machine, and None for a local one."""

    rank: int
    public_key: bytes | None = None


@dataclass(frozen=True)
class ChannelAddress:
    """Where a rank connects; `server_key` proves that the driver answers, None on the driver's machine."""

    endpoint: str
    server_key: bytes | None = None


class ReceivedStep(NamedTuple):
    """A packet and its number."""

    sequence: int
    packet: Int32Array


def make_keys() -> Keys:
    """A fresh key pair."""
    return Keys(*zmq.curve_keypair())


class DriverChannel:
    """The driver's end: sends every packet to all ranks, receives rank 0's results. Not for use by several threads."""

    def __init__(
        self, peers: Sequence[Peer], generation: int, *, host: str = "127.0.0.1", heartbeat_s: float = 10.0
    ) -> None:
        """Bind one socket per peer: `ipc://` without a key, TCP on `host` alone with one.

        A connection that misses heartbeats for `heartbeat_s` counts as broken.
        """
        assert [peer.rank for peer in peers] == list(range(len(peers))), "peers come in rank order"
        self._generation = generation
        self._next_sent = 0
        self._results_due = 0
        self._next_collected = 0
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._addresses: list[ChannelAddress] = []
        self._authenticator: ThreadAuthenticator | None = None
        self._directory: str | None = None
        self._cleanup: Callable[[], object] = lambda: None
        self._keys = make_keys()
        try:
            for peer in peers:
                self._sockets.append(_socket(self._context, heartbeat_s, MAX_RESULT_BYTES))
                self._addresses.append(self._bind(peer, host))
        except BaseException:
            self.close()
            raise

    def address(self, rank: int) -> ChannelAddress:
        """What a rank needs to connect."""
        return self._addresses[rank]

    @property
    def in_flight(self) -> int:
        """Results that packets sent will still bring."""
        return (self._results_due - self._next_collected) & SEQUENCE_MASK

    @property
    def oldest(self) -> int:
        """Number of the oldest result in flight, or of the next one."""
        return self._next_collected

    def wait_connected(self, timeout_s: float, check: Callable[[], None]) -> None:
        """Wait until every rank has said hello; calls `check` several times a second, which may raise.

        Raises: WorkerError naming the ranks that did not connect in time, or a refused message.
        """
        deadline = time.monotonic() + timeout_s
        missing = set(range(len(self._sockets)))
        poller = zmq.Poller()
        for socket in self._sockets:
            poller.register(socket, zmq.POLLIN)
        while missing:
            ready = dict(poller.poll(50))
            for rank in sorted(missing):
                if self._sockets[rank] in ready:
                    self._receive(rank, (Kind.HELLO,))
                    missing.remove(rank)
            check()
            if missing and time.monotonic() > deadline:
                ranks = ", ".join(map(str, sorted(missing)))
                raise ConnectionLostError(f"rank {ranks} did not connect to the driver within {timeout_s:g} s")

    def send(self, packet: Int32Array, num_results: int = 1) -> None:
        """Send a packet to every rank; the buffer may be reused afterwards.  Raises: WorkerError for a lost rank.

        num_results  results that rank 0 answers with, one for each step in the packet
        """
        due = self.in_flight + num_results
        assert due <= MAX_IN_FLIGHT, f"{due} results would be in flight; collect some first"
        for rank, socket in enumerate(self._sockets):
            frames = encode_step(packet, self._generation, self._next_sent, rank)
            try:
                socket.send_multipart(frames, zmq.NOBLOCK, copy=True)
            except zmq.Again:
                raise ConnectionLostError(f"rank {rank}: its connection is lost") from None
        self._next_sent = (self._next_sent + 1) & SEQUENCE_MASK
        self._results_due = (self._results_due + num_results) & SEQUENCE_MASK

    def poll(self, timeout_s: float) -> StepResult | None:
        """The next result, or None when none arrives in time.  Raises: WorkerError for a message that is refused."""
        self._sockets[0].rcvtimeo = max(0, round(timeout_s * 1000))  # a poll object costs more than the message
        try:
            header, frames = self._receive(0, (Kind.RESULT,))
        except zmq.Again:
            return None
        result = decode_result(header, frames, self._next_collected)
        if not self.in_flight:
            raise WorkerError(f"rank 0 sent result {header.sequence}, which no packet asked for")
        self._next_collected = (self._next_collected + 1) & SEQUENCE_MASK
        return result

    def lost_ranks(self) -> list[int]:
        """The ranks that are not connected now: of a pair of sockets, the bound one is writable only with a peer."""
        return [
            rank for rank, socket in enumerate(self._sockets) if not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT
        ]

    def stop(self) -> None:
        """Ask every rank that is still connected to leave its loop."""
        for rank, socket in enumerate(self._sockets):
            try:
                socket.send_multipart(encode_signal(Kind.STOP, self._generation, rank), zmq.NOBLOCK)
            except zmq.Again:
                continue

    def close(self) -> None:
        """Close every socket and remove the directory; a second call does nothing."""
        for socket in self._sockets:
            socket.close(linger=_LINGER_MS)
        self._sockets = []
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        self._context.term()
        self._cleanup()

    def _bind(self, peer: Peer, host: str) -> ChannelAddress:
        socket = self._sockets[peer.rank]
        if peer.public_key is None:
            endpoint = f"ipc://{self._private_directory()}/{peer.rank}"
            socket.bind(endpoint)
            return ChannelAddress(endpoint)
        self._admit(socket, peer.rank, peer.public_key)
        shown = f"[{host}]" if ":" in host else host
        socket.ipv6 = ":" in host
        port = socket.bind_to_random_port(f"tcp://{shown}")
        return ChannelAddress(f"tcp://{shown}:{port}", self._keys.public)

    def _admit(self, socket: zmq.Socket[bytes], rank: int, public_key: bytes) -> None:
        if self._authenticator is None:
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
        domain = f"rank{rank}"
        self._authenticator.configure_curve_callback(domain, credentials_provider=_OneKey(public_key))
        socket.zap_domain = domain.encode()
        socket.curve_server = True
        socket.curve_secretkey = self._keys.secret

    def _private_directory(self) -> str:
        if self._directory is None:
            base = tempfile.gettempdir()
            if len(os.fsencode(base)) > _MAX_SOCKET_PATH - 24:
                base = "/tmp"
            self._directory = tempfile.mkdtemp(prefix="dsv4-", dir=base)
            # Also when the driver ends without closing: nothing else would remove it.
            self._cleanup = weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)
        return self._directory

    def _receive(self, rank: int, allowed: tuple[Kind, ...]) -> tuple[Header, Sequence[Buffer]]:
        frames = [frame.buffer for frame in self._sockets[rank].recv_multipart(copy=False)]
        return decode_header(frames, rank, self._generation, allowed), frames


class RankChannel:
    """A rank's end: receives packets in order, and sends results if it is rank 0."""

    def __init__(
        self, address: ChannelAddress, rank: int, generation: int, keys: Keys, *, heartbeat_s: float = 10.0
    ) -> None:
        """Start to connect; `keys` are this rank's own, unused without a server key."""
        self._rank = rank
        self._generation = generation
        self._expected = 0
        self._next_reply = 0
        self._context = zmq.Context()
        self._socket = _socket(self._context, heartbeat_s, MAX_PACKET_BYTES)
        if address.server_key is not None:
            self._socket.curve_serverkey = address.server_key
            self._socket.curve_publickey = keys.public
            self._socket.curve_secretkey = keys.secret
        self._socket.ipv6 = "[" in address.endpoint
        self._socket.rcvtimeo = _IDLE_CHECK_MS
        self._socket.connect(address.endpoint)

    def hello(self, timeout_s: float) -> None:
        """Tell the driver that this rank listens.  Raises: WorkerError when there is no connection in time."""
        self._socket.sndtimeo = max(1, round(timeout_s * 1000))
        try:
            self._socket.send_multipart(encode_signal(Kind.HELLO, self._generation, self._rank))
        except zmq.Again:
            raise WorkerError(f"no connection to the driver within {timeout_s:g} s") from None

    def receive(self) -> ReceivedStep | None:
        """The next packet, or None when the driver says stop; sleeps until a message arrives.

        Raises: WorkerError for a message that is refused, a missing packet, or a lost driver.
        """
        while (frames := self._arrived()) is None:
            self._check_connected()
        header = decode_header(frames, self._rank, self._generation, (Kind.STEP, Kind.STOP))
        if header.kind is Kind.STOP:
            return None
        if header.sequence != self._expected:
            raise WorkerError(f"packet {header.sequence} arrived; expected {self._expected}")
        self._expected = (self._expected + 1) & SEQUENCE_MASK
        return ReceivedStep(header.sequence, decode_step(header, frames))

    def _arrived(self) -> Sequence[Buffer] | None:
        try:
            return [frame.buffer for frame in self._socket.recv_multipart(copy=False)]
        except zmq.Again:
            return None

    def reply(self, result: StepResult) -> None:
        """Send the next result; its arrays must not change afterwards.  Raises: WorkerError."""
        frames = encode_result(result, self._generation, self._next_reply, self._rank)
        self._next_reply = (self._next_reply + 1) & SEQUENCE_MASK
        try:
            self._socket.send_multipart(frames, copy=False)
        except zmq.Again:
            raise ConnectionLostError("the connection to the driver is lost") from None

    def close(self) -> None:
        """Close the socket; a second call does nothing."""
        self._socket.close(linger=_LINGER_MS)
        self._context.term()

    def _check_connected(self) -> None:
        # With `immediate` set, a connecting socket is writable only while its connection stands.
        events = int(self._socket.getsockopt(zmq.EVENTS))
        if not events & (zmq.POLLOUT | zmq.POLLIN):
            raise ConnectionLostError("the connection to the driver is lost")


class _OneKey:
    """Admits one public key; ZeroMQ's authenticator asks it."""

    def __init__(self, public_key: bytes) -> None:
        self._public_key = public_key

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public_key


def _socket(context: zmq.Context[zmq.Socket[bytes]], heartbeat_s: float, max_bytes: int) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)  # of sockets that are dropped without `close`
    milliseconds = max(1, round(heartbeat_s * 1000))
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, milliseconds // 5))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, milliseconds)
    socket.setsockopt(zmq.HEARTBEAT_TTL, min(milliseconds, 6_000_000))
    return socket
