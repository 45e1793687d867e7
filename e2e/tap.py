"""Taps: HTTP servers that stand in for an engine that lies, waits or dies at a moment of the test's choosing.

A tap passes requests on to the real engine and lets the test see and change what goes by. It must not know what is
right; the tests do.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from e2e.asking import ANSWER_TIMEOUT_S
from e2e.engines import HOST

if TYPE_CHECKING:
    from e2e.engines import Engine


@dataclass
class Passed:
    """One request that went by."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads(self.body)
        return parsed


@dataclass
class Tap:
    """An HTTP server before `engine`. Hooks run in the thread of the request and may take their time."""

    engine: Engine
    asked: Callable[[Passed], None] = lambda _passed: None
    """Before a POST is passed on."""
    answered: Callable[[Passed, Any], Any] = lambda _passed, answer: answer
    """What becomes of the JSON of a POST's whole 200 answer; bytes are sent as they are."""
    seen: list[Passed] = field(default_factory=list)
    """The POSTs."""

    def __post_init__(self) -> None:
        tap = self

        class Handler(_Handler):
            owner = tap

        self._server = _Server((HOST, 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def port(self) -> int:
        port: int = self._server.server_address[1]
        return port

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._server.hang_up()

    def honest(self) -> None:
        """No hooks any more."""
        self.asked = lambda _passed: None
        self.answered = lambda _passed, answer: answer


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.connections: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self.connections.discard(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A line that broke: what a tap is for."""

    def hang_up(self) -> None:
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    owner: Tap
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    # The answer's head and body in one piece.
    wbufsize = -1

    def log_message(self, *_args: Any) -> None:
        """Silent."""

    def do_GET(self) -> None:
        self._pass(Passed("GET", self.path, dict(self.headers), b""))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        passed = Passed("POST", self.path, dict(self.headers), body)
        self.owner.seen.append(passed)
        self._pass(passed)

    def _pass(self, passed: Passed) -> None:
        self.close_connection = True
        if passed.method == "POST":
            self.owner.asked(passed)
        engine = self.owner.engine
        upstream = http.client.HTTPConnection(engine.host, engine.port, timeout=ANSWER_TIMEOUT_S)
        try:
            headers = {name: value for name, value in passed.headers.items() if name.lower() != "content-length"}
            upstream.request(passed.method, passed.path, passed.body or None, headers)
            response = upstream.getresponse()
            if response.chunked:
                self._stream(response)
                return
            body = response.read()
            if passed.method == "POST" and response.status == 200:
                answer = self.owner.answered(passed, json.loads(body))
                body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self._head(response, ("content-length", str(len(body))))
            self.wfile.write(body)
            self.wfile.flush()
            self.close_connection = False
        except (OSError, http.client.HTTPException):
            pass  # the engine or the sidecar has gone: the other one sees the connection end where it is
        finally:
            upstream.close()

    def _stream(self, response: http.client.HTTPResponse) -> None:
        self._head(response, ("transfer-encoding", "chunked"))
        self.wfile.flush()
        while data := response.read1(65536):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")
        self.wfile.flush()
        self.close_connection = False

    def _head(self, response: http.client.HTTPResponse, framing: tuple[str, str]) -> None:
        self.send_response(response.status)
        for name, value in response.getheaders():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        self.send_header(*framing)
        self.end_headers()


class Hold:
    """Keeps every answer of a tap until all have come, or the next step of the test."""

    def __init__(self, tap: Tap, count: int) -> None:
        self._all_here = threading.Semaphore(0)
        self._go = threading.Event()
        self._count = count
        tap.answered = self._wait

    def _wait(self, _passed: object, answer: object) -> object:
        self._all_here.release()
        assert self._go.wait(ANSWER_TIMEOUT_S)
        return answer

    def wait_for_all(self) -> None:
        for _ in range(self._count):
            assert self._all_here.acquire(timeout=ANSWER_TIMEOUT_S)

    def release(self) -> None:
        self._go.set()
