"""What passes between wire and application: a request as it came in, an answer as it is to go out. No I/O."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

if TYPE_CHECKING:
    from tests.engine.faults import Fault

STATUS_LINES = {int(s): f"HTTP/1.1 {int(s)} {s.phrase}\r\n".encode() for s in HTTPStatus}
EVENT_STREAM = b"text/event-stream; charset=utf-8"


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
