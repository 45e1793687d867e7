"""A client's connection: HTTP/1.1 read strictly, requests answered in the order in which they came.

Why not a web framework: requests are relayed, not served; their target, field spelling and bytes must survive, and
a relayed chunk must cost two system calls and little else. This file knows nothing of engines or decisions.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import cast

import httptools

from sidecar.edge import errors, sockets
from sidecar.edge.body_reader import BodyReader, is_worth_its_place
from sidecar.edge.request import MAX_HEAD_BYTES, Headers, Request
from sidecar.edge.runner import Runner
from sidecar.edge.service import Service
from sidecar.exchange.failures import TABLE, Row, Stage

_log = logging.getLogger("sidecar")

MAX_PIPELINED = 8
"""Requests read ahead of the one being answered; further bytes stay in the socket."""
LINGER_S = 2.0
"""After an answer to a request that was not read to its end, what still arrives is thrown away for so long; closing
at once would reset the connection before the client has read the answer."""
WRITE_HIGH_WATER_BYTES = 65536

_NO_PARSER = cast("httptools.HttpRequestParser", None)
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def _row(fault: str) -> Row:
    return TABLE[Stage.READING, fault]


class ClientConnection(asyncio.Protocol):
    """One connection. At most one request is being answered; `deadline` is looked at by the server's sweep."""

    __slots__ = (
        "_beginning",
        "_close_when_answered",
        "_connections",
        "_deaf",
        "_head_bytes",
        "_headers",
        "_lingering",
        "_parser",
        "_paused",
        "_queue",
        "_reading",
        "_refusal",
        "_request",
        "_runner",
        "_service",
        "_target",
        "_trailers",
        "deadline",
        "transport",
    )

    def __init__(self, service: Service, connections: "set[ClientConnection]") -> None:
        self._service = service
        self._connections = connections
        self.transport: asyncio.Transport | None = None
        self.deadline = 0.0
        self._parser = httptools.HttpRequestParser(self)
        """Until the connection's end: it knows us, and only the collector would part the two."""
        self._target = b""
        self._headers: Headers = []
        self._trailers: Headers = []
        self._head_bytes = 0
        self._request: Request | None = None
        """The request that is being read, once its head is complete."""
        self._reading = False
        """Some of a request has been read, not all."""
        self._queue: deque[Request] = deque()
        self._runner: Runner | None = None
        self._beginning = False
        self._close_when_answered = False
        self._deaf = False
        """Whatever else arrives is thrown away."""
        self._refusal: tuple[Row, str] | None = None
        """Why reading ended, while answers are still owed to earlier requests."""
        self._lingering = False
        self._paused = False
        """The client does not read what it was sent; until it does, no further request of its is begun."""

    # -- asyncio -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's transports do not inherit from asyncio's
        self.transport.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)
        self._connections.add(self)
        sockets.keep_alive(transport)
        self.deadline = self._service.loop.time() + self._service.settings.client_head_timeout

    def eof_received(self) -> None:
        """The transport closes now, though first it sends what is buffered. Who computes need not wait for that."""
        self._leave()
        self._closes()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self.transport = None
        self._parser = _NO_PARSER
        self._leave()

    def _leave(self) -> None:
        self._deaf = True
        self._queue.clear()
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.client_left()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        request = self._request
        if request is None:
            self._head_bytes += len(data)
        elif self._runner is None or self._runner.request is request:
            self.body_progressed()
        size = request.size if request is not None else 0
        self._feed(data)
        if request is not None and request is self._request:  # trailers and sizes of chunks bring nothing of it
            self._head_bytes = self._head_bytes + len(data) if request.size == size else 0
        if self._request is not None and self._request.size and self._is_free:
            self._read_in_place(self._request)
        if self._reading and self._head_bytes > MAX_HEAD_BYTES + 65536:
            self._refuse(_row("head_too_large"))

    def body_progressed(self) -> None:
        if not self._deaf:
            self.deadline = self._service.loop.time() + self._service.settings.client_body_timeout

    def pause_writing(self) -> None:
        self._paused = True
        self.deadline = self._service.loop.time() + self._service.settings.client_idle_timeout
        if self._runner is not None:
            self._runner.pause()

    def resume_writing(self) -> None:
        self._paused = False
        runner = self._runner
        if runner is None:  # what is read now is the end of an answer, and the idle time runs on
            self._begin_next()
            return
        self.deadline = 0.0
        if runner.request is self._request:
            self.body_progressed()
        runner.resume()

    @property
    def _is_free(self) -> bool:
        """Whether a request that comes now may begin."""
        return self._runner is None and not self._queue and not self._paused

    # -- reading -------------------------------------------------------------------------------------------

    def _feed(self, data: bytes) -> None:
        unread: list[bytes | memoryview] = [data]
        try:
            while unread:
                part = unread.pop()
                try:
                    self._parser.feed_data(part)
                except httptools.HttpParserUpgrade as stop:
                    unread += self._upgrade_wished(memoryview(part)[stop.args[0] :])
        except httptools.HttpParserCallbackError as error:  # not the client's fault: ours
            request_id = self._runner.request.request_id.decode() if self._runner is not None else ""
            _log.error("a request ends by a bug of ours (%s)", request_id, exc_info=error.__context__)
            self.abort()
        except (httptools.HttpParserError, ValueError) as error:
            if not self._deaf:
                text = str(error)
                two_framings = "Content-Length" in text and ("Duplicate" in text or "Transfer-Encoding" in text)
                self._refuse(_row("two_framings" if two_framings else "malformed"), text[:100])

    def on_message_begin(self) -> None:
        self._target = b""
        self._headers = []
        self._trailers = []
        self._reading = True
        if not self._runner and not self._queue:
            self.deadline = self._service.loop.time() + self._service.settings.client_head_timeout

    def on_url(self, piece: bytes) -> None:
        self._target += piece

    def on_header(self, name: bytes, value: bytes) -> None:
        (self._headers if self._request is None else self._trailers).append((name, value))

    def on_headers_complete(self) -> None:
        if self._deaf:
            return
        parser, service = self._parser, self._service
        version = parser.get_http_version()
        request = Request(
            parser.get_method(),
            self._target,
            self._headers,
            http_1_0=version == "1.0",
            started_at=service.loop.time(),
        )
        request.upgrade = request.upgrade and parser.should_upgrade()  # Connection must name it too
        self._request = request
        self._head_bytes = 0
        if version not in ("1.1", "1.0"):
            self._refuse(_row("unknown_version"), f"HTTP/{version}")
            return
        refusal = request.refusal(service.settings.max_body_bytes)
        if refusal is not None:
            self._refuse(*refusal)
            return
        # Of a request that wishes to upgrade the parser reads the head alone.
        if request.has_body and not request.upgrade and self._is_free:
            self._body_may_come(request)

    def _body_may_come(self, request: Request) -> None:
        """It is this request's turn, and its body is still to be read."""
        self.body_progressed()
        if request.expects_continue and not request.http_1_0 and not request.size:
            request.expects_continue = False  # it is said once, even if the client has to read it first
            self.write((_CONTINUE,))
        if request.is_streamed and not request.size and not self._paused:
            self._start(request)

    def on_body(self, piece: bytes) -> None:
        request = self._request
        if request is None or self._deaf:
            return
        request.size += len(piece)
        runner = self._runner
        if request.is_streamed and runner is not None and runner.request is request:
            runner.body_piece(piece)
            return
        if request.size > self._service.settings.max_body_bytes:
            self._refuse(_row("too_large"), f"{self._service.settings.max_body_bytes} bytes")
            return
        request.add(piece)

    def _read_in_place(self, request: Request) -> None:
        """The rest of a large body of stated length goes from the socket to its place, not into pieces."""
        transport = self.transport
        if self._deaf or transport is None or not is_worth_its_place(request):
            return
        transport.pause_reading()
        transport.set_protocol(BodyReader(self, request))
        transport.resume_reading()

    def body_read(self, request: Request, body: bytearray) -> None:
        """All of a body that was read in place is here."""
        transport = self.transport
        if transport is None:
            return
        transport.pause_reading()
        transport.set_protocol(self)
        transport.resume_reading()
        if self._deaf:  # it was too late
            return
        request.keep_alive = self._parser.should_keep_alive()
        self._parser = httptools.HttpRequestParser(self)  # the old one still waits for the body
        self._request = None
        self._reading = False
        request.body = body
        self._start(request)

    def on_message_complete(self) -> None:
        request, self._request = self._request, None
        self._reading = False
        self._head_bytes = 0
        if request is None or self._deaf:
            return
        request.keep_alive = self._parser.should_keep_alive()
        request.is_complete = True
        request.trailers = b"".join([b"%b: %b\r\n" % trailer for trailer in self._trailers])
        if request.is_streamed and self._runner is not None and self._runner.request is request:
            if not self._paused:
                self.deadline = 0.0
            self._runner.body_end(request.trailers)
            return
        parts = request.parts
        request.body = parts[0] if len(parts) == 1 else b"".join(parts)
        request.parts = []
        if request.upgrade:
            self._queue.append(request)  # `_upgrade_wished` follows at once
        elif self._is_free:
            self._start(request)
        else:
            self._queue.append(request)
            if len(self._queue) >= MAX_PIPELINED and self.transport is not None:
                self.transport.pause_reading()

    def _upgrade_wished(self, rest: memoryview) -> tuple[bytes | memoryview, ...]:
        """The parser stopped at a head's end, `rest` follows. Returns what is to be read on, last part first."""
        if self._deaf:
            return ()
        request = self._queue.pop()
        self._parser = httptools.HttpRequestParser(self)
        if request.method == b"GET" and not request.has_body and self._is_free:
            if self.transport is not None:
                self.transport.pause_reading()  # until the engine has said what protocol it is
            self._close_when_answered = bool(rest)
            runner = self._runner = Runner(self._service, self, request)
            runner.tunnel_data(bytes(rest))
            runner.start()
            return ()
        # Some clients offer h2c with every request. A server may ignore the wish, and its body is still to come.
        return (rest, request.without_upgrade()) if rest else (request.without_upgrade(),)

    # -- answering -----------------------------------------------------------------------------------------

    def _start(self, request: Request) -> None:
        if not request.is_streamed:
            self.deadline = 0.0
        self._close_when_answered = False
        runner = self._runner = Runner(self._service, self, request)
        runner.start()
        if request.is_streamed and request.is_complete and self._runner is runner:  # it had to wait for its turn
            if request.body:
                runner.body_piece(bytes(request.body))
            runner.body_end(request.trailers)

    def write(self, parts: Sequence[bytes]) -> None:
        transport = self.transport
        if transport is not None and not transport.is_closing():
            transport.writelines(parts)

    def must_close(self, request: Request) -> bool:
        """Whether this request's answer is the connection's last."""
        unread = self._request is request
        if not request.keep_alive or unread or self._service.live.draining:
            self._close_when_answered = True
        return self._close_when_answered

    def close_when_answered(self) -> None:
        self._close_when_answered = True

    def close_after_write(self, *, reset: bool) -> None:
        """The answer cannot be completed; what is written goes out, then the connection ends. `reset`: for a client
        that would take an orderly end for that of the answer."""
        transport = self.transport
        if reset and transport is not None:
            sockets.reset_on_close(transport)
            if not transport.can_write_eof():  # TLS would say goodbye
                transport.abort()
        self._end(unread=not reset)

    def answered(self, request: Request) -> None:
        """The current request is over; the next one follows."""
        self._runner = None
        transport = self.transport
        if transport is None or transport.is_closing() or self._lingering:
            return
        if self._close_when_answered or self._request is request:
            # A socket closed unread is reset: what the client has yet to read of its answers would be lost.
            self._end(unread=request.keep_alive or self._reading or self._refusal is not None)
            return
        settings = self._service.settings
        wait_s = settings.client_body_timeout if self._reading else settings.client_idle_timeout
        self.deadline = self._service.loop.time() + wait_s
        if (request.upgrade or request.is_streamed) and len(self._queue) < MAX_PIPELINED:
            transport.resume_reading()  # the engine that it waited for may never have come
        self._begin_next()

    def _begin_next(self) -> None:
        """What is owed to the client next, once it reads what it was sent."""
        if self._beginning:  # a request that ended as soon as it began: the loop goes on
            return
        self._beginning = True
        try:
            while self._queue and self._may_begin:
                request = self._queue.popleft()
                if not self._queue and self.transport is not None:
                    self.transport.resume_reading()
                self._start(request)
        finally:
            self._beginning = False
        if self._queue or not self._may_begin:
            return
        if self._refusal is not None:
            self._write_refusal(*self._refusal)
        elif self._service.live.draining:
            self._end(unread=False)
        elif self._request is not None:  # its head came while another request was being answered
            self._body_may_come(self._request)

    @property
    def _may_begin(self) -> bool:
        transport = self.transport
        is_open = transport is not None and not transport.is_closing() and not self._lingering
        return is_open and self._runner is None and not self._paused

    def _refuse(self, row: Row, detail: str = "") -> None:
        """The request at hand cannot be read, so nothing behind it can be trusted."""
        if self._deaf:
            return
        self._deaf = True
        self._service.observer.refused(row)
        if self._runner is not None and self._runner.request is self._request:  # its body was being streamed
            self.abort()
        elif self._runner is None and not self._queue:
            self._write_refusal(row, detail)
        else:
            self._refusal = (row, detail)

    def _write_refusal(self, row: Row, detail: str) -> None:
        self.write((errors.answer(row, detail, None, b"", close=True),))
        self._end(unread=True)

    def _end(self, *, unread: bool) -> None:
        """The last answer is written. `unread`: the client may still be sending."""
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        self._deaf = True
        if unread and transport.can_write_eof():
            transport.write_eof()
            self._linger()
        else:  # with TLS what still arrives is thrown away until the client has said goodbye too
            transport.close()
            if self._reading:
                self._linger()
        if not self._lingering or transport.get_write_buffer_size():
            self._closes()

    def _linger(self) -> None:
        self._lingering = True
        if self.transport is not None:
            self.transport.resume_reading()  # a body may have had to wait
        self.deadline = self._service.loop.time() + LINGER_S

    def _closes(self) -> None:
        """What is buffered is sent first, to a client that may read no further."""
        self._lingering = True
        self.deadline = self._service.loop.time() + self._service.settings.client_idle_timeout

    def _close_idle(self) -> None:
        """Nothing is under way. TLS says goodbye and waits for the client's, which need not come."""
        self._deaf = True
        transport = self.transport
        if transport is not None and not transport.is_closing():
            transport.close()
            self._closes()
            if not transport.can_write_eof():
                self._linger()

    def pause_body(self) -> None:
        if self.transport is not None:
            self.transport.pause_reading()

    def resume_body(self) -> None:
        if self.transport is not None:
            self.transport.resume_reading()

    def tunnel_begins(self) -> None:
        """The connection's bytes are no longer read here; it still counts as open."""
        self.deadline = 0.0
        if self.transport is not None:
            self.transport.resume_reading()

    def tunnel_ended(self) -> None:
        self._connections.discard(self)
        self._runner = None
        self.transport = None
        self._parser = _NO_PARSER

    # -- time ----------------------------------------------------------------------------------------------

    def overdue(self) -> None:
        """The deadline has passed."""
        self.deadline = 0.0
        if self.transport is None:
            return
        if self._deaf or self._runner is not None or self._queue:
            self.transport.abort()  # a streamed body that stopped, or a client that reads no more of its answer
        elif self._reading:
            self._refuse(_row("too_slow"))
        else:
            self._close_idle()

    def drain(self) -> None:
        """No further request is wanted."""
        if self._runner is None and not self._queue and not self._reading:
            self._close_idle()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


__all__ = ["ClientConnection"]
