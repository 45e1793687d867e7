"""A client made of a blocking socket: it sends the bytes it is told to and reads answers strictly.

Why not a library: the tests are about the bytes. An answer keeps them as they came, and what no HTTP/1.1 client
should accept (two framings, bytes behind the end, a cut body) is an error here.
"""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

TIMEOUT_S = 10.0

Headers = list[tuple[bytes, bytes]]
Address = tuple[str, int]


class Cut(ConnectionError):
    """The connection ended before the answer did; `answer` is as far as it came."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"cut after {len(answer.body)} bytes of the body of {answer.status}")
        self.answer = answer


@dataclass
class Answer:
    """One answer."""

    status: int = 0
    reason: bytes = b""
    version: bytes = b""
    headers: Headers = field(default_factory=list)
    body: bytes = b""
    """Without chunk framing."""
    raw_body: bytes = b""
    """As it came."""
    chunks: list[bytes] = field(default_factory=list)
    trailers: Headers = field(default_factory=list)
    interim: list[bytes] = field(default_factory=list)
    """Whole 1xx answers that came before."""

    def header(self, name: str) -> str | None:
        """The only value of that name, or None."""
        values = self.values(name)
        assert len(values) < 2, f"{name} came {len(values)} times"
        return values[0] if values else None

    def values(self, name: str) -> list[str]:
        return [value.decode("latin-1") for key, value in self.headers if key.lower() == name.lower().encode()]

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def reason_code(self) -> str:
        """`reason` of an error body of the sidecar's own; "" if it is none."""
        try:
            error = json.loads(self.body)["error"]
            return error.get("reason", "") if isinstance(error, dict) else ""
        except (ValueError, KeyError, TypeError):
            return ""

    @property
    def decision(self) -> str:
        return self.header("x-pd-decision") or ""

    @property
    def events(self) -> list[bytes]:
        """The data of each SSE event; the stream must end with a whole one."""
        return events(self.body)

    @property
    def text(self) -> str:
        """What was generated, of whatever API and whether it was streamed or not."""
        if (self.header("content-type") or "").startswith("text/event-stream"):
            return "".join(_text_of(json.loads(event)) for event in self.events if event != b"[DONE]")
        return _text_of(self.json)


def events(body: bytes) -> list[bytes]:
    *whole, rest = body.split(b"\n\n")
    assert rest == b"", f"an unfinished event: {rest!r}"
    return [
        b"\n".join(line.removeprefix(b"data: ") for line in event.split(b"\n") if line.startswith(b"data: "))
        for event in whole
    ]


def _text_of(answer: dict[str, Any]) -> str:
    if answer.get("type") == "content_block_delta":  # /v1/messages, streamed
        return answer["delta"].get("text", "")
    if answer.get("type") == "response.output_text.delta":  # /v1/responses, streamed
        return answer["delta"]
    if answer.get("type") == "message" and isinstance(answer.get("content"), list):
        return "".join(block.get("text", "") for block in answer["content"])
    if isinstance(answer.get("output"), list):
        return "".join(part.get("text", "") for item in answer["output"] for part in item.get("content") or ())
    pieces = []
    for choice in answer.get("choices") or ():
        message = choice.get("message") or choice.get("delta") or choice
        ids = choice.get("token_ids") if "text" not in choice and "content" not in message else None
        pieces.append(message.get("content") or message.get("text") or (repr(ids) if ids else ""))
    return "".join(pieces)


class Client:
    """One connection."""

    def __init__(
        self, address: Address, *, timeout_s: float = TIMEOUT_S, tls: ssl.SSLContext | None = None
    ) -> None:
        self.socket = socket.create_connection(address, timeout=timeout_s)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname=address[0])
        self._buffer = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    # -- sending

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def request(
        self,
        method: str,
        target: str,
        body: Any = None,
        headers: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Sends a whole request."""
        self.send(request(method, target, body, headers))

    def half_close(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)

    # -- reading

    def answer(self, method: str = "GET") -> Answer:
        """The next answer, whole. Raises `Cut` if it is not."""
        answer = self.head()
        self.body(answer, method)
        return answer

    def head(self) -> Answer:
        """The next answer's head; 1xx answers before it are kept."""
        answer = Answer()
        while True:
            block = self._until(b"\r\n\r\n", answer)
            status_line, *lines = block[:-4].split(b"\r\n")
            version, status, *reason = status_line.split(b" ", 2)
            assert version in (b"HTTP/1.1", b"HTTP/1.0"), status_line
            answer.version, answer.status = version, int(status)
            answer.reason = reason[0] if reason else b""
            answer.headers = _parsed(lines)
            if not 100 <= answer.status < 200 or answer.status == 101:
                return answer
            answer.interim.append(block)

    def body(self, answer: Answer, method: str = "GET") -> None:
        """Reads the body that belongs to the head."""
        length = answer.header("content-length")
        chunked = answer.header("transfer-encoding")
        assert not (length and chunked), "two framings"
        if method == "HEAD" or answer.status in (101, 204, 304):
            return
        if chunked:
            assert chunked == "chunked"
            for _ in self.pieces(answer):
                pass
        elif length is not None:
            self._take(answer, int(length))
        else:
            assert answer.header("connection") == "close" or answer.version == b"HTTP/1.0"
            while self._receive():
                pass
            answer.body += self._buffer
            answer.raw_body += self._buffer
            self._buffer.clear()

    def pieces(self, answer: Answer) -> Iterator[bytes]:
        """The chunks of the body, one by one as they come."""
        while True:
            line = self._until(b"\r\n", answer)
            answer.raw_body += line
            size = int(line.split(b";")[0], 16)
            if size == 0:
                break
            before = len(answer.body)
            self._take(answer, size)
            end = self._until(b"\r\n", answer)
            assert end == b"\r\n", end
            answer.raw_body += end
            chunk = answer.body[before:]
            answer.chunks.append(chunk)
            yield chunk
        while (line := self._until(b"\r\n", answer)) != b"\r\n":
            answer.raw_body += line
            answer.trailers += _parsed([line[:-2]])
        answer.raw_body += line

    def at_end(self) -> bool:
        """Waits for the end of the connection; False if bytes come instead."""
        if self._buffer:
            return False
        try:
            return not self._receive()
        except ConnectionResetError:
            return True

    def rest(self) -> bytes:
        """Everything up to the end of the connection."""
        try:
            while self._receive():
                pass
        except ConnectionResetError:
            pass
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest

    def is_silent(self, seconds: float) -> bool:
        """Whether neither bytes nor the end of the connection come for so long."""
        if self._buffer:
            return False
        self.socket.settimeout(seconds)
        try:
            self._receive()
        except TimeoutError:
            return True
        finally:
            self.socket.settimeout(TIMEOUT_S)
        return False

    def exactly(self, size: int) -> bytes:
        """So many raw bytes."""
        while len(self._buffer) < size:
            if not self._receive():
                raise ConnectionError(f"the connection ended after {len(self._buffer)} of {size} bytes")
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    def _receive(self) -> bool:
        data = self.socket.recv(262144)
        self._buffer += data
        return bool(data)

    def _until(self, mark: bytes, answer: Answer) -> bytes:
        while (end := self._buffer.find(mark)) < 0:
            self._receive_or_cut(answer)
        end += len(mark)
        block = bytes(self._buffer[:end])
        del self._buffer[:end]
        return block

    def _take(self, answer: Answer, size: int) -> None:
        while len(self._buffer) < size:
            try:
                self._receive_or_cut(answer)
            except Cut:
                answer.body += self._buffer
                raise
        answer.body += self._buffer[:size]
        answer.raw_body += self._buffer[:size]
        del self._buffer[:size]

    def _receive_or_cut(self, answer: Answer) -> None:
        try:
            if self._receive():
                return
        except ConnectionResetError:
            pass
        raise Cut(answer)


def _parsed(lines: Iterable[bytes]) -> Headers:
    headers = []
    for line in lines:
        name, colon, value = line.partition(b":")
        assert colon, line
        headers.append((name, value.strip()))
    return headers


def request(method: str, target: str, body: Any = None, headers: Iterable[tuple[str, str]] = ()) -> bytes:
    """A whole request as bytes. A body that is no bytes is encoded as JSON; its type is JSON unless told."""
    given = list(headers)
    names = {name.lower() for name, _ in given}
    if "host" not in names:
        given.insert(0, ("Host", "sidecar"))
    if body is not None:
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
        if "content-type" not in names:
            given.append(("Content-Type", "application/json"))
        if not {"content-length", "transfer-encoding"} & names:
            given.append(("Content-Length", str(len(body))))
    lines = "".join(f"{name}: {value}\r\n" for name, value in given)
    return f"{method} {target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + (body or b"")


def chunked(*pieces: bytes, trailers: bytes = b"") -> bytes:
    """`pieces` in chunked framing."""
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n" + trailers + b"\r\n"
