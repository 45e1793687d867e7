"""HTTP/1.1 as uvicorn speaks it (httptools implementation), with a hook at every place where a wire can break.

Head and body leave in separate writes, chunks are framed one per event, an idle connection is closed after 5 s,
a client that leaves cancels its request. Knows nothing of engines or of JSON beyond "an answer may have some".
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import hashlib
import itertools
import json
import random
import socket
import struct
import time
import zlib
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import unquote

import httptools

from tests.engine.faults import Fault, Faults
from tests.engine.gate import Gate

# Bytes in the socket buffer above which a writer waits (asyncio's own default).
_LINGER_RESET = struct.pack("ii", 1, 0)
_STATUS_LINES = {int(s): f"HTTP/1.1 {int(s)} {s.phrase}\r\n".encode() for s in HTTPStatus}
_WEBSOCKET_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, section 1.3

EVENT_STREAM = b"text/event-stream; charset=utf-8"

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(eq=False)
class Received:
    """One request as it came in, and what became of it."""

    connection: int
    method: str = ""
    target: str = ""
    http_version: str = "1.1"
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""
    # time.perf_counter() at the first byte, at the last byte of the body, at the head and at the end of the answer.
    began_at: float = 0.0
    received_at: float | None = None
    head_at: float | None = None
    answered_at: float | None = None
    status: int | None = None
    bytes_sent: int = 0
    events_sent: int = 0
    # The client closed before the answer was complete.
    client_gone: bool = False
    # All that a fault lets through has been sent, and nothing more will be.
    silent: bool = False
    fault: Fault | None = None
    # An exception that broke the answer off.
    error: Exception | None = None
    _json: Any = None

    @property
    def path(self) -> str:
        return unquote(self.target.split("?", 1)[0])

    def header(self, name: str) -> str | None:
        """The first value of that name; None if there is none."""
        wanted = name.lower().encode()
        return next((value.decode("latin-1") for key, value in self.headers if key.lower() == wanted), None)

    @property
    def json(self) -> Any:
        if self._json is None:
            self._json = json.loads(self.body)
        return self._json

    @property
    def complete(self) -> bool:
        return self.answered_at is not None


@dataclass
class Answer:
    """What an application returns: JSON or bytes at once, or a stream of events."""

    status: int = 200
    # Given headers come first, then the length and the type, then those that a middleware appends.
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    content_type: bytes | None = None
    appended: list[tuple[bytes, bytes]] = field(default_factory=list)
    json: Any = None
    body: bytes | None = None
    events: AsyncGenerator[bytes, None] | None = None
    websocket: bool = False

    @property
    def type_headers(self) -> list[tuple[bytes, bytes]]:
        kind = [(b"content-type", self.content_type)] if self.content_type is not None else []
        return kind + self.appended

    def encoded(self) -> bytes:
        if self.body is not None:
            return self.body
        if self.json is None:
            return b""
        return json_bytes(self.json)


def json_bytes(value: Any) -> bytes:
    """As starlette's JSONResponse and pydantic's `model_dump_json` write it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


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
        self._websocket: _WebSocket | None = None

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
        if self._websocket is not None:
            self._websocket.feed(data)
            return
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._feed_websocket(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse_garbage()

    def _feed_websocket(self, data: bytes) -> None:
        if self._websocket is not None:
            self._websocket.feed(data)

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
            self._websocket = _WebSocket(self)
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
            ended = await _Sender(self, received, keep_alive).serve()
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
        elif self._websocket is None:
            self._idle_timer = self.loop.call_later(self.server.keep_alive_seconds, self.transport.close)

    def _stop_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _refuse_garbage(self) -> None:
        # uvicorn, httptools_impl.py: send_400_response
        self.transport.write(
            _STATUS_LINES[400]
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


_NO_FAULT = Fault()


class _Sender:
    """One answer on its way out, with the fault that strikes it."""

    def __init__(self, connection: Connection, received: Received, keep_alive: bool) -> None:
        self.connection = connection
        self.received = received
        self.fault = received.fault or _NO_FAULT
        self.keep_alive = keep_alive
        self.body_bytes = 0

    async def serve(self) -> bool:
        """True if the connection can take another request."""
        fault = self.fault
        if fault.delay_head_seconds:
            await asyncio.sleep(fault.delay_head_seconds)
        while fault.hold is not None and not fault.hold.is_set():  # noqa: ASYNC110 it is set by another thread
            await asyncio.sleep(0.002)
        if fault.silence:
            await self.connection.gone(self.received)
        if fault.reset == "before_head":
            self.connection.reset()
            return False
        if fault.raw is not None:
            await self.connection.write(fault.raw)
            if fault.raw_close:
                return False
            await self.connection.gone(self.received)
        if fault.status is not None:
            answer = _forced(fault)
        elif fault.error_event_first:
            answer = Answer(content_type=EVENT_STREAM, events=_error_stream())
        else:
            answer = await self.connection.server.application(self.received)
        if self.connection._websocket is not None:
            if answer.websocket:
                return await self._switch()
            self.connection._websocket = None
            self.keep_alive = False
        try:
            if answer.events is not None:
                await self._send_events(answer)
            else:
                await self._send_whole(answer)
        finally:
            if answer.events is not None:
                await answer.events.aclose()
        self.received.answered_at = self.received.answered_at or time.perf_counter()
        if fault.extra_after_end:
            await self.connection.write(fault.extra_after_end)
        return self.keep_alive and not fault.close_after and not fault.close_delimited and not fault.http_1_0

    # -- head

    async def _send_head(self, answer: Answer, headers: list[tuple[bytes, bytes]]) -> None:
        if self.fault.interim:
            await self.connection.write(self.fault.interim)
        headers = [*self.connection.server.default_headers(), *headers]
        if (self.received.header("connection") or "").lower() == "close":
            headers.append((b"connection", b"close"))
        line = _STATUS_LINES.get(answer.status) or b"HTTP/1.1 %d \r\n" % answer.status
        if self.fault.http_1_0:
            line = line.replace(b"HTTP/1.1", b"HTTP/1.0")
        head = line + b"".join(b"%s: %s\r\n" % header for header in headers) + b"\r\n"
        # Noted before it leaves: whoever has read an answer finds it recorded.
        self.received.status = answer.status
        self.received.head_at = time.perf_counter()
        await self.connection.write(head)
        if self.fault.reset == "after_head":
            self.connection.reset()
            raise ConnectionResetError

    # -- whole bodies

    async def _send_whole(self, answer: Answer) -> None:
        fault = self.fault
        self._edit(answer)
        body = answer.encoded()
        headers = list(answer.headers)
        if fault.pad_bytes:
            body = _padded(body, fault.pad_bytes)
        if fault.gzip:
            body = gzip.compress(body)
            headers.append((b"content-encoding", b"gzip"))
        if not fault.close_delimited and answer.status not in (204, 304):
            headers.append((b"content-length", b"%d" % (len(body) + fault.content_length_delta)))
        headers += answer.type_headers
        await self._send_head(answer, headers)
        if self.received.method == "HEAD":
            return
        if fault == _NO_FAULT:
            self.received.answered_at = time.perf_counter()
        await self._send_body_bytes(body)

    def _edit(self, answer: Answer) -> None:
        fault = self.fault
        if not isinstance(answer.json, dict):
            return
        if fault.handoff_absent and "kv_transfer_params" in answer.json:
            answer.json["kv_transfer_params"] = None
        if fault.handoff is not None and isinstance(answer.json.get("kv_transfer_params"), dict):
            answer.json["kv_transfer_params"] = fault.handoff(answer.json["kv_transfer_params"])
        if fault.edit is not None:
            answer.json = fault.edit(answer.json)

    async def _send_body_bytes(self, data: bytes) -> None:
        """Body bytes as they are, up to where the fault cuts or stalls; dripping if it says so."""
        fault = self.fault
        limit = fault.cut_after_bytes if fault.cut_after_bytes is not None else fault.stall_after_bytes
        if limit is not None and self.body_bytes + len(data) >= limit:
            await self._drip(data[: max(0, limit - self.body_bytes)])
            if fault.cut_after_bytes is None:
                await self.connection.gone(self.received)
            self._cut()
        await self._drip(data)

    async def _drip(self, data: bytes) -> None:
        size = self.fault.drip_bytes or len(data) or 1
        for start in range(0, len(data), size):
            if start and self.fault.drip_seconds:
                await asyncio.sleep(self.fault.drip_seconds)
            piece = data[start : start + size]
            await self.connection.write(piece)
            self.body_bytes += len(piece)
            self.received.bytes_sent += len(piece)

    def _cut(self) -> None:
        if self.fault.reset == "at_cut":
            self.connection.reset()
        else:
            self.connection.transport.close()
        raise ConnectionResetError

    # -- streams

    async def _send_events(self, answer: Answer) -> None:
        fault = self.fault
        assert answer.events is not None
        framing = [] if fault.close_delimited or fault.http_1_0 else [(b"transfer-encoding", b"chunked")]
        packer = None
        if fault.gzip:
            packer = zlib.compressobj(wbits=31)
            answer.headers.append((b"content-encoding", b"gzip"))
        # uvicorn adds its own framing last.
        await self._send_head(answer, [*answer.headers, *answer.type_headers, *framing])
        source = _ragged(answer.events) if fault.ragged else answer.events
        async for event in source:
            if fault.cut_after_events is not None and self.received.events_sent >= fault.cut_after_events:
                self._cut()
            if fault.stall_after_events is not None and self.received.events_sent >= fault.stall_after_events:
                await self.connection.gone(self.received)
            if fault.error_event_after is not None and self.received.events_sent >= fault.error_event_after:
                async for last in _error_stream():
                    await self._send_chunk(last, framing)
                break
            if packer is not None:
                event = packer.compress(event) + packer.flush(2)
            await self._send_chunk(event, framing)
            self.received.events_sent += 1
        if packer is not None:
            await self._send_chunk(packer.flush(), framing)
        if framing:
            trailers = "".join(f"{name}: {value}\r\n" for name, value in fault.trailers).encode()
            self.received.answered_at = time.perf_counter()
            await self.connection.write(b"0\r\n" + trailers + b"\r\n")

    async def _send_chunk(self, data: bytes, framing: Headers) -> None:
        if framing:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        await self._send_body_bytes(data)

    async def _switch(self) -> bool:
        websocket = self.connection._websocket
        assert websocket is not None
        key = (self.received.header("sec-websocket-key") or "").encode()
        accept = base64.b64encode(hashlib.sha1(key + _WEBSOCKET_GUID).digest())
        head = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        await self.connection.write(head + b"Sec-WebSocket-Accept: " + accept + b"\r\n\r\n")
        self.received.status = 101
        self.received.head_at = self.received.answered_at = time.perf_counter()
        websocket.open()
        return True


class _WebSocket:
    """Echoes text and binary frames (RFC 6455), answers pings, ends with the client's close."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._buffer = bytearray()
        self._is_open = False

    def open(self) -> None:
        self._is_open = True
        self.feed(b"")

    def feed(self, data: bytes) -> None:
        self._buffer += data
        while self._is_open and self._frame():
            pass

    def _frame(self) -> bool:
        buffer = self._buffer
        if len(buffer) < 2:
            return False
        first, length, at = buffer[0], buffer[1] & 0x7F, 2
        masked = buffer[1] & 0x80
        if length == 126:
            length, at = int.from_bytes(buffer[2:4], "big"), 4
        elif length == 127:
            length, at = int.from_bytes(buffer[2:10], "big"), 10
        mask = bytes(buffer[at : at + 4]) if masked else bytes(4)
        at += 4 if masked else 0
        if len(buffer) < at + length:
            return False
        payload = bytes(byte ^ mask[i % 4] for i, byte in enumerate(buffer[at : at + length]))
        del buffer[: at + length]
        opcode = first & 0x0F
        answer = {0x9: 0x8A, 0x8: 0x88}.get(opcode, first)
        if opcode == 0xA:
            return True
        if length < 126:
            head = bytes([answer, length])
        elif length < 65536:
            head = bytes([answer, 126]) + length.to_bytes(2, "big")
        else:
            head = bytes([answer, 127]) + length.to_bytes(8, "big")
        self.connection.transport.write(head + payload)
        if opcode == 0x8:
            self.connection.transport.close()
            return False
        return True


def _forced(fault: Fault) -> Answer:
    assert fault.status is not None
    headers = [(name.encode(), value.encode()) for name, value in fault.headers]
    if fault.body is not None:
        return Answer(fault.status, headers, body=fault.body)
    phrase = HTTPStatus(fault.status).phrase if fault.status in _STATUS_LINES else "Fault"
    error = {"message": f"injected {fault.status}", "type": phrase, "param": None, "code": fault.status}
    return Answer(fault.status, headers, b"application/json", json={"error": error})


async def _error_stream() -> AsyncGenerator[bytes, None]:
    error = {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}
    yield b"data: " + json.dumps({"error": error}).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


async def _ragged(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The same bytes in pieces of 1 to 40 bytes, whatever the events' ends."""
    dice = random.Random(1)
    kept = b""
    async for event in events:
        kept += event
        while len(kept) > 40:
            size = dice.randint(1, 40)
            yield kept[:size]
            kept = kept[size:]
    if kept:
        yield kept


def _padded(body: bytes, size: int) -> bytes:
    """`size` bytes more, still JSON if it was an object."""
    if body.endswith(b"}"):
        return body[:-1] + b',"padding":"' + b"x" * size + b'"}'
    return body + b" " * size
