"""One answer on its way out as uvicorn writes it, and every fault that can strike it there. Knows no engine."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import time
import zlib
from collections.abc import AsyncGenerator, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING

from tests.engine.faults import Fault
from tests.engine.http_messages import EVENT_STREAM, STATUS_LINES, Answer, Received
from tests.engine.websocket import accepted

if TYPE_CHECKING:
    from tests.engine.wire import Connection

Headers = Sequence[tuple[bytes, bytes]]
_NO_FAULT = Fault()


class Sender:
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
        if self.connection.websocket is not None:
            if answer.websocket:
                return await self._switch()
            self.connection.websocket = None
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
        line = STATUS_LINES.get(answer.status) or b"HTTP/1.1 %d \r\n" % answer.status
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
        websocket = self.connection.websocket
        assert websocket is not None
        accept = accepted(self.received.header("sec-websocket-key") or "")
        head = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        await self.connection.write(head + b"Sec-WebSocket-Accept: " + accept + b"\r\n\r\n")
        self.received.status = 101
        self.received.head_at = self.received.answered_at = time.perf_counter()
        websocket.open()
        return True


def _forced(fault: Fault) -> Answer:
    assert fault.status is not None
    headers = [(name.encode(), value.encode()) for name, value in fault.headers]
    if fault.body is not None:
        return Answer(fault.status, headers, body=fault.body)
    phrase = HTTPStatus(fault.status).phrase if fault.status in STATUS_LINES else "Fault"
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
