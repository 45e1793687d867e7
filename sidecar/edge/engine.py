"""Connections to engines: HTTP/1.1 from the client's side, pooled, one request at a time on each.

Why not an HTTP client library: the answer's bytes are wanted as they came (chunk framing, trailers, 1xx), in the
same loop turn, without a task or a future for each of them. What the bytes mean is the leg's business: this file
knows neither clients nor the failure table beyond the names of the faults that it reports.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import httptools

from sidecar.edge.head import Head, Headers
from sidecar.edge.unreached import connect_fault

Buffer = bytes | bytearray | memoryview

MAX_HEAD_BYTES = 65536
_END_OF_HEAD = b"\r\n\r\n"
_CHUNK_SIZES = {b"%x" % size: size for size in range(1, 4096)}
"""Size lines of small chunks, as uvicorn writes them. Any other spelling is the parser's business."""
_NO_PARSER = cast("httptools.HttpResponseParser", None)
TLS_SLICE_BYTES = 262144
"""uvloop encrypts all that it is given at once: the loop would stand still for a large body, held twice more."""


class Leg(Protocol):
    """Who sent the request and wants the answer. Every method is called from the event loop."""

    def connected(self, connection: "EngineConnection", reused: bool) -> None:
        """A connection is there; the leg sends its request on it."""

    def interim(self, raw: bytes) -> None:
        """A whole 1xx answer (never 101)."""

    def head(self, head: Head) -> None:
        """The answer's head."""

    def data(self, raw: bytes, pieces: Sequence[bytes], last: bool) -> None:
        """Body bytes as they came, and the same without chunk framing; `last` with the final ones."""

    def upgraded(self, head: Head, rest: bytes) -> None:
        """101: from here on the connection is the leg's (`connection.transport`)."""

    def failed(self, fault: str, detail: str, untouched: bool) -> None:
        """refused, unreachable, reset, garbage, or `OWN_SHORTAGE`. `untouched`: a reused connection closed before
        any byte of an answer, so the request may never have been read."""

    def pause(self) -> None:
        """The engine takes no more of the request for now."""

    def resume(self) -> None:
        """It does again."""


class EngineConnection(asyncio.Protocol):
    """One connection. `leg` is set while a request is on it."""

    __slots__ = (
        "_at_boundary",
        "_complete",
        "_encrypts",
        "_goodbye",
        "_head",
        "_headers",
        "_is_head_request",
        "_parser",
        "_paused",
        "_pieces",
        "_pool",
        "_reason",
        "_surplus",
        "_touched",
        "_unread_head",
        "_unsent",
        "idle_since",
        "leg",
        "peer_host",
        "relay",
        "reused",
        "transport",
    )

    def __init__(self, pool: "EnginePool") -> None:
        self._pool = pool
        self.transport: asyncio.Transport | None = None
        self.leg: Leg | None = None
        self.relay: Callable[[bytes], None] | None = None
        """Where whole chunks go as they are, once the leg has said so: a token is nearly always one read that is
        one chunk, and the parser need not see what leaves it where it was."""
        self.peer_host = ""
        """IP address at the other end, or "" for a Unix socket."""
        self.idle_since = 0.0
        self.reused = False
        self._parser = _NO_PARSER
        """From the connection's beginning to its end: it knows us, and only the collector would part the two."""
        self._headers: Headers = []
        self._reason = b""
        self._pieces: list[bytes] = []
        self._unread_head = b""
        self._head: Head | None = None
        self._complete = False
        self._surplus = False
        self._touched = False
        self._is_head_request = False
        self._at_boundary = True
        self._encrypts = False
        self._unsent: deque[memoryview] | None = None
        """What a TLS connection could not take yet, while it is paused; None where it takes everything."""
        self._paused = False
        self._goodbye = False
        """The engine said that nothing more comes. A TLS connection that just ends may have been cut by anyone."""

    # -- for the leg --

    def send(self, leg: Leg, parts: Sequence[Buffer], *, is_head_request: bool = False) -> None:
        """Sends a request, of which `parts` are the first bytes; `write` sends more."""
        assert self.transport is not None
        self.leg = leg
        self._is_head_request = is_head_request
        self._touched = False
        self._head = None
        self._complete = False
        if self._encrypts and sum(map(len, parts)) > TLS_SLICE_BYTES:
            views = [memoryview(part) for part in parts]
            slices = [
                view[at : at + TLS_SLICE_BYTES] for view in views for at in range(0, len(view), TLS_SLICE_BYTES)
            ]
            self._unsent = deque(slices)
            self._send_on()
        else:
            self.transport.writelines(parts)

    def write(self, parts: Sequence[Buffer]) -> None:
        if self._unsent is not None:
            self._unsent.extend([memoryview(part) for part in parts])
        elif self.transport is not None:
            self.transport.writelines(parts)

    def _send_on(self) -> None:
        """Until the transport pauses us, which it does within `write`."""
        unsent, transport = self._unsent, self.transport
        while unsent and transport is not None and not transport.is_closing():
            if self._paused:
                return
            transport.write(unsent.popleft())
        self._unsent = None

    def abort(self) -> None:
        """Closes at once; the leg hears nothing more."""
        self.leg = self.relay = self._unsent = None
        if self.transport is not None:
            self.transport.abort()

    @property
    def at_chunk_boundary(self) -> bool:
        """Whether what has been handed on ends with a whole chunk."""
        return self._at_boundary

    # -- asyncio --

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        peer = transport.get_extra_info("peername")
        self.peer_host = str(peer[0]).partition("%")[0] if isinstance(peer, tuple) else ""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's transports do not inherit from asyncio's
        self._parser = httptools.HttpResponseParser(self)
        if transport.get_extra_info("ssl_object") is not None:
            self._encrypts = True
            self.transport.set_write_buffer_limits(high=TLS_SLICE_BYTES)

    def eof_received(self) -> None:
        self._goodbye = True
        if self._encrypts and self.transport is not None:
            self.transport.abort()  # else uvloop would first send what is buffered, to an engine that reads no more

    def data_received(self, data: bytes) -> None:
        relay = self.relay
        if relay is not None and self._at_boundary:
            end = data.find(b"\r\n", 1, 5)
            size = _CHUNK_SIZES.get(data[:end])
            if size is not None and len(data) == end + size + 4 and data.endswith(b"\r\n"):
                relay(data)
                return
        leg = self.leg
        if leg is None:  # an engine that speaks unasked
            self._close()
            return
        self._touched = True
        if self._head is None:
            self._read_head(leg, self._unread_head + data if self._unread_head else data)
        else:
            self._read_body(leg, self._head, data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        self.transport = self._unsent = None
        self._parser = _NO_PARSER
        leg, self.leg, self.relay = self.leg, None, None
        if leg is None:
            return
        if self._head is not None and self._head.until_close and exc is None and self._goodbye:
            leg.data(b"", (), True)
            return
        detail = "closed by the engine" if exc is None else (getattr(exc, "strerror", None) or type(exc).__name__)
        leg.failed("reset", detail, self.reused and not self._touched)

    def pause_writing(self) -> None:
        self._paused = True
        if self.leg is not None:
            self.leg.pause()

    def resume_writing(self) -> None:
        self._paused = False
        if self._unsent is not None:
            self._send_on()
        if self.leg is not None and not self._paused:
            self.leg.resume()

    # -- reading --

    def _read_head(self, leg: Leg, data: bytes) -> None:
        end = data.find(_END_OF_HEAD)
        if end < 0:
            if len(data) > MAX_HEAD_BYTES or not (data[:7] == b"HTTP/1." or b"HTTP/1.".startswith(data[:7])):
                self._fail(leg, "garbage", "no HTTP/1.x head")
            else:
                self._unread_head = data
            return
        self._unread_head = b""
        end += len(_END_OF_HEAD)
        self._headers = []
        self._reason = b""
        try:
            self._parser.feed_data(data[:end])
        except httptools.HttpParserUpgrade:
            head = self._make_head()
            self.leg = None
            self._parser = _NO_PARSER
            self._pool.forget(self)
            leg.upgraded(head, data[end:])
            return
        except (httptools.HttpParserError, ValueError) as error:
            self._fail(leg, "garbage", str(error))
            return
        head = self._make_head()
        if head.status < 200:
            self._complete = False
            leg.interim(data[:end])
            if self._has(leg) and len(data) > end:
                self._read_head(leg, data[end:])
            return
        if head.coding not in (b"", b"chunked", b"identity"):
            self._fail(leg, "garbage", "a transfer coding that nobody asked for")
            return
        if self._is_head_request and not self._complete:
            self._complete = True
            self._parser = httptools.HttpResponseParser(self)  # the old one waits for a body that never comes
        head.no_body = self._complete
        head.with_more = self._complete or len(data) > end
        self._headers = head.trailers  # what fields come from here on
        self._head = head
        self._at_boundary = True
        leg.head(head)
        if head.with_more and self._has(leg):
            self._read_body(leg, head, data[end:])

    def _has(self, leg: Leg) -> bool:
        """Whether the leg is still there; any call to it may have ended it."""
        return self.leg is leg

    def _make_head(self) -> Head:
        http_1_0 = self._parser.get_http_version() == "1.0"
        return Head(self._parser.get_status_code(), self._reason, self._headers, http_1_0=http_1_0)

    def _read_body(self, leg: Leg, head: Head, data: bytes) -> None:
        if self._complete:  # the head was all; bytes behind it come from an engine that cannot be trusted further
            self._finish(leg, b"", (), reusable=not data and (not head.http_1_0))
            return
        pieces: list[bytes] = []
        self._pieces = pieces
        was_at_boundary = self._at_boundary
        error = self._feed(data) or ("bytes behind the end of the answer" if self._surplus else "")
        if head.trailers and sum(len(name) + len(value) for name, value in head.trailers) > MAX_HEAD_BYTES:
            error = "endless trailers"
        if error and self._ended() and head.length >= 0:  # it is whole; what follows it is not ours to pass on
            self._finish(leg, b"".join(pieces), pieces, reusable=False)
        elif error:
            self._at_boundary = was_at_boundary  # the leg does not get what ends here
            self._fail(leg, "garbage", error)
        elif self._ended():
            self._finish(leg, data, pieces, reusable=not head.http_1_0)
        else:
            # A size line that has only begun has called nobody back yet.
            self._at_boundary = self._at_boundary and data.endswith(b"\r\n")
            leg.data(data, pieces, False)

    def _feed(self, data: bytes) -> str:
        """Runs the parser; returns what is wrong with the bytes, or ""."""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade, ValueError) as error:
            return str(error) or type(error).__name__
        return ""

    def _ended(self) -> bool:
        return self._complete

    def _finish(self, leg: Leg, raw: bytes, pieces: Sequence[bytes], *, reusable: bool) -> None:
        head = self._head
        self.leg = self.relay = None
        self._head = None
        self._is_head_request = False
        stays = reusable and head is not None and b"close" not in head.value(b"connection").lower()
        if stays and self._unsent is None:
            self._pool.put_back(self)
        else:
            self._close()
        leg.data(raw, pieces, True)

    def _fail(self, leg: Leg, fault: str, detail: str) -> None:
        self.leg = self.relay = None
        self._close()
        leg.failed(fault, detail, False)

    def _close(self) -> None:
        self._pool.forget(self)
        if self.transport is not None:
            self.transport.abort()

    # -- httptools --

    def on_status(self, reason: bytes) -> None:
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_body(self, piece: bytes) -> None:
        self._at_boundary = False
        self._pieces.append(piece)

    def on_chunk_header(self) -> None:
        self._at_boundary = False

    def on_chunk_complete(self) -> None:
        self._at_boundary = True

    def on_message_begin(self) -> None:
        self._surplus = self._complete

    def on_message_complete(self) -> None:
        self._complete = True


class EnginePool:
    """Connections to one engine: the most recently used first, as many as are asked for."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        host: str,
        port: int,
        *,
        uds: str = "",
        tls: ssl.SSLContext | None = None,
        connect_timeout_s: float,
        idle_timeout_s: float,
    ) -> None:
        """`tls`: TLS is spoken, and the certificate must be `host`'s as far as the context checks that."""
        self.label = uds or (f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        self._loop = loop
        self._host, self._port, self._uds, self._tls = host, port, uds, tls
        self._connect_timeout_s = connect_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._idle: dict[EngineConnection, None] = {}
        self._open: set[EngineConnection] = set()
        self._connecting: set[asyncio.Task[None]] = set()

    def acquire(self, leg: Leg, *, fresh: bool = False) -> Callable[[], None]:
        """Calls `leg.connected` (at once if an idle connection is there) or `leg.failed`; the function that is
        returned calls the request off while neither has happened."""
        oldest = self._loop.time() - self._idle_timeout_s
        while self._idle and not fresh:
            connection, _ = self._idle.popitem()
            if connection.transport is None or connection.transport.is_closing():
                continue
            if connection.idle_since < oldest:
                connection.abort()
                continue
            connection.reused = True
            leg.connected(connection, True)
            return _nothing_to_call_off
        task = self._loop.create_task(self._connect(leg))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return task.cancel  # type: ignore[return-value]

    async def _connect(self, leg: Leg) -> None:
        connection = EngineConnection(self)
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                if self._uds:
                    await self._loop.create_unix_connection(lambda: connection, self._uds)
                else:
                    await self._loop.create_connection(lambda: connection, self._host, self._port, ssl=self._tls)
        except TimeoutError:
            leg.failed("unreachable", f"{self.label}: no connection within {self._connect_timeout_s:g} s", False)
            return
        except OSError as error:
            leg.failed(*connect_fault(error, self.label), False)
            return
        if connection.transport is None:  # accepted and reset in one breath
            leg.failed("reset", f"{self.label}: closed right after it was accepted", False)
            return
        self._open.add(connection)
        leg.connected(connection, False)

    def put_back(self, connection: EngineConnection) -> None:
        connection.idle_since = self._loop.time()
        self._idle[connection] = None

    def forget(self, connection: EngineConnection) -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)

    def sweep(self, now: float) -> None:
        """Closes what has been idle too long; called now and then."""
        while self._idle:
            oldest = next(iter(self._idle))
            if oldest.idle_since >= now - self._idle_timeout_s:
                return
            del self._idle[oldest]
            oldest.abort()

    def close(self) -> None:
        for task in self._connecting:
            task.cancel()
        for connection in list(self._open):
            connection.abort()
        self._idle.clear()

    @property
    def is_empty(self) -> bool:
        return not self._open and not self._connecting

    @property
    def busy(self) -> int:
        """Connections with a request on them."""
        return len(self._open) - len(self._idle)


def _nothing_to_call_off() -> None:
    """The connection was there already."""
