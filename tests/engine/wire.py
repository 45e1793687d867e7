"""HTTP/1.1 as uvicorn speaks it (httptools implementation), with a hook at every place where a wire can break.

Head and body leave in separate writes, chunks are framed one per event, an idle connection is closed after 5 s,
a client that leaves cancels its request. Knows nothing of engines or of JSON beyond "an answer may have some".
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable
from email.utils import formatdate
from typing import TYPE_CHECKING, cast

import httptools

from tests.engine.gate import Gate
from tests.engine.http_messages import STATUS_LINES, Answer, Received
from tests.engine.sender import Sender
from tests.engine.websocket import WebSocket

if TYPE_CHECKING:
    from tests.engine.faults import Faults

_LINGER_RESET = struct.pack("ii", 1, 0)

Application = Callable[[Received], Awaitable[Answer]]


class Server:
    """What all connections of one engine share."""

    def __init__(self, application: Application, faults: Faults, keep_alive_seconds: float = 5.0) -> None:
        self.application = application
        self.faults = faults
        self.keep_alive_seconds = keep_alive_seconds
        self.requests: list[Received] = []
        self.connections: set[Connection] = set()
        self.connections_total = 0
        self.thawed = Gate()
        self._date = (0, b"")

    def default_headers(self) -> list[tuple[bytes, bytes]]:
        now = int(time.time())
        if self._date[0] != now:
            self._date = (now, formatdate(now, usegmt=True).encode())
        return [(b"date", self._date[1]), (b"server", b"uvicorn")]

    def freeze(self) -> None:
        self.thawed.close()
        for connection in self.connections:
            connection.hold()

    def thaw(self) -> None:
        self.thawed.open()
        for connection in list(self.connections):
            connection.let_go()

    def abort_all(self) -> None:
        for connection in list(self.connections):
            connection.transport.abort()


class Connection(asyncio.Protocol):
    transport: asyncio.Transport
    _numbers = itertools.count(1)

    def __init__(self, server: Server) -> None:
        self.server = server
        self.number = next(Connection._numbers)
        self.parser = httptools.HttpRequestParser(self)
        self.loop = asyncio.get_running_loop()
        self._received: Received | None = None
        self._body: list[bytes] = []
        self._queue: deque[tuple[Received, bool]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._current: Received | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._writable: asyncio.Future[None] | None = None
        self._paused = False
        self._held = False
        self._deaf = False
        self._eof = False
        self.websocket: WebSocket | None = None

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses.
        self.transport = cast("asyncio.Transport", transport)
        self.server.connections.add(self)
        self.server.connections_total += 1
        if self.server.faults.reset_on_accept:
            self.reset()
        elif self.server.faults.silent_on_accept:
            self._deaf = True
        elif not self.server.thawed.is_open:
            self.hold()

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.connections.discard(self)
        self._stop_idle_timer()
        if self._current is not None and not self._current.complete:
            self._current.client_gone = True
        if self._received is not None and self._received.received_at is None:
            self._received.client_gone = True
        if self._task is not None:
            self._task.cancel()
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        for received, _ in self._queue:
            received.client_gone = True
        self._queue.clear()

    def eof_received(self) -> bool:
        # uvicorn closes when the client half-closes; that is a disconnect to the application.
        return False

    def pause_writing(self) -> None:
        self._paused = True
        if self._writable is None or self._writable.done():
            self._writable = self.loop.create_future()

    def resume_writing(self) -> None:
        self._paused = False
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    def data_received(self, data: bytes) -> None:
        self._stop_idle_timer()
        if self._deaf:
            return
        if self.websocket is not None:
            self.websocket.feed(data)
            return
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._feed_websocket(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse_garbage()

    def _feed_websocket(self, data: bytes) -> None:
        if self.websocket is not None:
            self.websocket.feed(data)

    # -- httptools callbacks

    def on_message_begin(self) -> None:
        self._received = Received(self.number, began_at=time.perf_counter())
        self._body = []

    def on_url(self, url: bytes) -> None:
        assert self._received is not None
        self._received.target += url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self._received is not None
        self._received.headers.append((name, value))

    def on_headers_complete(self) -> None:
        received = self._received
        assert received is not None
        received.method = self.parser.get_method().decode()
        received.http_version = self.parser.get_http_version()
        self.server.requests.append(received)
        received.fault = self.server.faults.choose(received)
        if self.parser.should_upgrade() and (received.header("upgrade") or "").lower() == "websocket":
            self.websocket = WebSocket(self.transport)
        if (received.header("expect") or "").lower() == "100-continue":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if received.fault is not None and received.fault.early and received.fault.replaces_answer:
            self._deaf = True
            self._start(received, keep_alive=False)

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        received = self._received
        if received is None or self._deaf:
            return
        self._received = None
        received.body = b"".join(self._body)
        received.received_at = time.perf_counter()
        self._start(received, keep_alive=self.parser.should_keep_alive())

    # -- requests, one after the other

    def _start(self, received: Received, *, keep_alive: bool) -> None:
        if self._task is not None:
            self._queue.append((received, keep_alive))
            return
        self._current = received
        self._task = self.loop.create_task(self._serve(received, keep_alive))

    async def _serve(self, received: Received, keep_alive: bool) -> None:
        ended = False
        try:
            await self.server.thawed.wait()
            ended = await Sender(self, received, keep_alive).serve()
        except (asyncio.CancelledError, ConnectionError):
            pass
        except Exception as error:
            # uvicorn: the connection is closed, in the middle of the body if there was one.
            received.error = error
        finally:
            self._task = None
        if not ended:
            self.transport.close()
        elif not self.transport.is_closing():
            self._next()

    def _next(self) -> None:
        if self._queue:
            self._start(self._queue[0][0], keep_alive=self._queue.popleft()[1])
        elif self.websocket is None:
            self._idle_timer = self.loop.call_later(self.server.keep_alive_seconds, self.transport.close)

    def _stop_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _refuse_garbage(self) -> None:
        # uvicorn, httptools_impl.py: send_400_response
        self.transport.write(
            STATUS_LINES[400]
            + b"".join(b"%s: %s\r\n" % header for header in self.server.default_headers())
            + b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\n\r\n"
            + b"Invalid HTTP request received."
        )
        self.transport.close()

    # -- the socket

    async def write(self, data: bytes) -> None:
        if not self.server.thawed.is_open:
            await self.server.thawed.wait()
        if self.transport.is_closing():
            raise ConnectionResetError
        self.transport.write(data)
        while self._paused and self._writable is not None:
            await self._writable

    @property
    def busy(self) -> bool:
        return self._task is not None

    def reset(self) -> None:
        """End the connection with a TCP reset instead of an orderly close."""
        raw = self.transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
        self.transport.abort()

    def hold(self) -> None:
        if not self._held and not self.transport.is_closing():
            self._held = True
            self.transport.pause_reading()

    def let_go(self) -> None:
        if self._held:
            self._held = False
            if not self.transport.is_closing():
                self.transport.resume_reading()

    async def gone(self, received: Received) -> None:
        """Until the client closes (its request is cancelled then)."""
        received.silent = True
        await self.loop.create_future()
