"""What the tests say to engines: JSON in a request of its own, or raw bytes on a socket."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any, Self

from tests.engine.record import Reply, send

if TYPE_CHECKING:
    from tests.engine import ThreadedEngine

PROMPT = "The quick brown fox jumps over the lazy dog, and then it does so again. " * 6


def complete(engine: ThreadedEngine, prompt: str = PROMPT, **more: Any) -> Reply:
    headers = more.pop("headers", ())
    body = {"prompt": prompt, "max_tokens": 8, **more}
    return send(engine.url, "/v1/completions", body, headers=headers, timeout_seconds=10)


def text_of(reply: Reply) -> str:
    assert reply.status == 200, reply.body
    text: str = reply.json["choices"][0]["text"]
    return text


def prefilled(engine: ThreadedEngine, prompt: str = PROMPT, **more: Any) -> dict[str, Any]:
    """The handoff of a prefill."""
    reply = complete(engine, prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True}, **more)
    assert reply.status == 200, reply.body
    params: dict[str, Any] = reply.json["kv_transfer_params"]
    return params


def completion_bytes(prompt: str = "hello", close: bool = False, **more: Any) -> bytes:
    body = json.dumps({"prompt": prompt, "max_tokens": 4, **more}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n"
    return head.encode() + (b"Connection: close\r\n" if close else b"") + b"\r\n" + body


class Wire:
    """A raw connection."""

    def __init__(self, engine: ThreadedEngine, timeout_seconds: float = 5.0) -> None:
        self.socket = socket.create_connection((engine.host, engine.port), timeout_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def until(self, mark: bytes) -> bytes:
        """Everything up to and including `mark`."""
        got = b""
        while mark not in got:
            piece = self.socket.recv(65536)
            if not piece:
                raise EOFError(got)
            got += piece
        return got

    def rest(self) -> bytes:
        """Everything until the other side closes; ConnectionResetError if it resets."""
        got = b""
        while piece := self.socket.recv(65536):
            got += piece
        return got
