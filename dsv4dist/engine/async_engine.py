"""The engine for asyncio programs: one thread runs the steps, each request is an async iterator."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from dsv4dist.config.runtime import EngineConfig
from dsv4dist.engine.core import EngineCore
from dsv4dist.engine.engine import Engine
from dsv4dist.engine.prompts import Prompt
from dsv4dist.engine.request import Request, RequestOutput, SamplingParams
from dsv4dist.errors import RequestError, WorkerError

IDLE_POLL_S = 0.5


@dataclass
class _Stream:
    """A request's way back to the event loop that submitted it."""

    request_id: str
    loop: asyncio.AbstractEventLoop
    outputs: asyncio.Queue[RequestOutput | Exception] = field(default_factory=asyncio.Queue)
    request: Request = field(init=False)
    """Known once it is queued."""
    num_sent: int = 0

    def send(self, item: RequestOutput | Exception) -> bool:
        """False if that event loop has been closed, so that nobody reads any more."""
        return _call_soon(self.loop, self.outputs.put_nowait, item)


class _Outputs(AsyncIterator[RequestOutput]):
    """What `submit` returns. Also one that was never read from aborts its request when closed or dropped."""

    def __init__(self, stream: _Stream, abort: Callable[[], None]) -> None:
        self._stream, self._abort, self._finished = stream, abort, False

    async def __anext__(self) -> RequestOutput:
        if self._finished:
            raise StopAsyncIteration
        try:
            item = await self._stream.outputs.get()
        except asyncio.CancelledError:
            self.close()
            raise
        self._finished = isinstance(item, Exception) or item.finish_reason is not None
        if isinstance(item, Exception):
            raise item
        return item

    def close(self) -> None:
        """Read no further: abort the request unless it has ended."""
        if not self._finished:
            self._finished = True
            self._abort()

    async def aclose(self) -> None:
        """`close`, as of an async generator."""
        self.close()

    __del__ = close


class AsyncEngine:
    """Serves requests that come and go at any time. All device work and planning stay on one thread of its own."""

    def __init__(self, config: EngineConfig, start: Callable[[EngineConfig], EngineCore] = Engine) -> None:
        """Start the engine; blocks until it is ready.  Raises: what Engine raises."""
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._stopping = False
        self._ended: WorkerError | None = None
        self._ended_lock = threading.RLock()  # an iterator may be collected, and abort, wherever memory is taken
        self._engine = start(config)
        self._thread = threading.Thread(target=self._serve, name="engine steps", daemon=True)
        self._thread.start()

    async def submit(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Queue a request; the iterator yields its state whenever it has more tokens, the finished state last.

        A consumer that stops early or is cancelled aborts its request.
        Raises: RequestError for a request that cannot be served, or an id that a running one has; WorkerError, also
        from the iterator, when the ranks are lost or the engine was shut down.
        """
        arrived_s = time.monotonic()
        own_id = request_id if request_id is not None else f"request-{uuid.uuid4().hex}"
        loop = asyncio.get_running_loop()
        queued: asyncio.Future[None] = loop.create_future()
        stream = _Stream(own_id, loop)

        def add() -> None:
            try:
                if self._ended is not None:
                    raise self._ended
                if own_id in self._streams:
                    raise RequestError(f"a request with id {own_id!r} is running; give each an id of its own")
                stream.request = self._engine.queue_request(prompt, params, own_id)
                stream.request.arrived_s = arrived_s
            except Exception as error:
                _call_soon(loop, _set_exception, queued, error)
                return
            self._streams[own_id] = stream
            _call_soon(loop, _set_result, queued)

        self._command(add)
        outputs = _Outputs(stream, lambda: self._command(lambda: self._abort_stream(stream)))
        try:
            await queued
        except asyncio.CancelledError:
            outputs.close()
            raise
        return outputs

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator ends with finish_reason "abort"."""
        self._command(lambda: self._abort(request_id))

    async def shutdown(self) -> None:
        """End the engine; requests that run end with "abort"."""
        self._stopping = True
        self._command(lambda: None)
        await asyncio.to_thread(self._thread.join)

    def _command(self, command: Callable[[], None]) -> None:
        """Have the thread run `command` before its next step; at once, when the thread has ended."""
        with self._ended_lock:
            if self._ended is None:
                self._commands.put(command)
                return
        command()

    def _abort(self, request_id: str) -> None:
        if request_id in self._streams:
            self._abort_stream(self._streams[request_id])

    def _abort_stream(self, stream: _Stream) -> None:
        """End this request, unless it has ended: its id may be another one's by now, or from now on."""
        if self._streams.get(stream.request_id) is stream:
            self._engine.abort_request(stream.request)
            self._send_finished(self._engine.take_finished())

    def _serve(self) -> None:
        """The thread: take what was asked for, run a step, send what it gave.

        While nothing is to do it sleeps, but for a look after the ranks at every IDLE_POLL_S, which `step` then is.
        """
        ended = WorkerError("the engine was shut down")
        try:
            while not self._stopping:
                self._take_commands()
                self._send_finished(self._engine.step())
                self._send_progress()
        except Exception as error:
            ended = error if isinstance(error, WorkerError) else WorkerError(f"the engine failed: {error!r}")
            for stream in self._streams.values():
                stream.send(ended)
        finally:
            try:
                for stream in list(self._streams.values()):
                    self._abort_stream(stream)
            finally:
                try:
                    self._engine.shutdown()
                finally:
                    with self._ended_lock:
                        self._ended = ended
                    while not self._commands.empty():
                        self._commands.get()()

    def _take_commands(self) -> None:
        wait = not self._engine.has_unfinished
        while True:
            try:
                command = self._commands.get(block=wait, timeout=IDLE_POLL_S if wait else None)
            except queue.Empty:
                return
            command()
            wait = False

    def _send_finished(self, finished: list[RequestOutput]) -> None:
        for output in finished:
            stream = self._streams.pop(output.id, None)
            if stream is not None:
                stream.send(output)

    def _send_progress(self) -> None:
        for stream in list(self._streams.values()):
            if len(stream.request.output_token_ids) > stream.num_sent:
                stream.num_sent = len(stream.request.output_token_ids)
                if not stream.send(self._engine.output_of(stream.request)):
                    self._abort_stream(stream)


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *arguments: object) -> bool:
    """Have an event loop of another thread run `call`; False if it has been closed."""
    try:
        loop.call_soon_threadsafe(call, *arguments)
    except RuntimeError:  # asyncio's way to say so
        return False
    return True


def _set_result(future: asyncio.Future[None]) -> None:
    if not future.cancelled():
        future.set_result(None)


def _set_exception(future: asyncio.Future[None], error: Exception) -> None:
    if not future.cancelled():
        future.set_exception(error)
