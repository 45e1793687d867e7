"""An engine that writes exactly the bytes that it is told to, in exactly the pieces."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from tests.integration.client import TIMEOUT_S
from tests.ports import free_ports

HEALTHY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


class Stub:
    """Answers every request but GET /health with `pieces`; `closes` says whether the connection ends then."""

    def __init__(self) -> None:
        self.port = free_ports()
        self.pieces: Sequence[bytes | threading.Event] = ()
        """An event among them is waited for."""
        self.closes = False
        self.pause_s = 0.0
        self.requests: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=64)
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for one in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(5)

    def _start(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets.append(connection)
                self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while request := self._request(connection):
                if request.startswith(b"GET /health "):
                    connection.sendall(HEALTHY)
                    continue
                self.requests.append(request)
                for piece in self.pieces:
                    if isinstance(piece, threading.Event):
                        piece.wait(TIMEOUT_S)
                        continue
                    connection.sendall(piece)
                    time.sleep(self.pause_s)
                if self.closes:
                    break
        connection.close()

    def _request(self, connection: socket.socket) -> bytes:
        """A head and, if it states its length, a body; b"" at the end of the connection."""
        data = b""
        while b"\r\n\r\n" not in data:
            received = connection.recv(65536)
            if not received:
                return b""
            data += received
        head, _, body = data.partition(b"\r\n\r\n")
        length = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        while len(body) < length:
            body += connection.recv(65536)
        return head + b"\r\n\r\n" + body
