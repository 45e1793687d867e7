"""A port before an engine that can be shut, and a client that leaves while it is.

What clients ask there is not looked at: that is tap.py's.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from e2e.asking import ANSWER_TIMEOUT_S, COMPLETIONS, eventually, prompt_for, request_body
from e2e.engines import HOST
from e2e.pair import SOONER_THAN_A_LEASE_S
from tests.integration.client import Client

if TYPE_CHECKING:
    from e2e.engines import Engine
    from tests.integration.sidecar import Sidecar


class Door:
    """A TCP port before an engine that can be shut: connections are neither accepted nor refused then."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._socket = socket.create_server((HOST, 0), backlog=0)
        self._socket.settimeout(0.02)
        self.port: int = self._socket.getsockname()[1]
        self._is_open = True
        self._is_shut = threading.Event()
        """Nobody accepts any more."""
        self._closed = False
        self._in_the_way: dict[int, socket.socket] = {}
        """What keeps it shut, by its own port."""
        self.taken_at = 0.0
        """When the first connection since it was last shut was taken, on the monotonic clock."""
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def shut(self) -> None:
        """The kernel's queue is filled: what connects from now on waits."""
        self._is_shut.clear()
        self._is_open = False
        assert self._is_shut.wait(ANSWER_TIMEOUT_S)
        self._in_the_way.clear()
        for _ in range(4):
            one = socket.socket()
            one.setblocking(False)
            with suppress(BlockingIOError):
                one.connect((HOST, self.port))
            self._in_the_way[one.getsockname()[1]] = one
        self.taken_at = 0.0

    def open(self) -> None:
        """Empties the queue. What waits is taken when the kernel tries again, a second after its first try."""
        for one in self._in_the_way.values():
            one.close()
        self._is_open = True

    def close(self) -> None:
        self.open()
        self._closed = True
        for thread in self._threads:
            thread.join()
        self._socket.close()

    def _accept(self) -> None:
        while not self._closed:
            if not self._is_open:
                self._is_shut.set()
                time.sleep(0.02)
                continue
            with suppress(TimeoutError):
                client, (_, port) = self._socket.accept()
                client.settimeout(None)
                if port not in self._in_the_way:
                    self.taken_at = self.taken_at or time.monotonic()
                thread = threading.Thread(target=self._join, args=(client,))
                self._threads.append(thread)
                thread.start()

    def _join(self, client: socket.socket) -> None:
        with client, socket.create_connection((HOST, self._engine.port)) as engine:
            answers = threading.Thread(target=_pump, args=(engine, client))
            answers.start()
            _pump(client, engine)
            answers.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    for one in (source, sink):
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


def gone_between_the_legs(sidecar: Sidecar, prefill: Engine, door: Door) -> tuple[float, float]:
    """A client leaves with its prompt prefilled and decode not asked.

    Seconds from its leaving to the first connection that decode takes (the kernel's, see `Door.open`), and from
    that to the blocks' being free.
    """
    door.shut()
    time.sleep(0.1)  # no idle connection is left by now
    with Client((HOST, sidecar.port)) as client:
        body = request_body(COMPLETIONS, prompt_for(COMPLETIONS, 100))
        client.request("POST", COMPLETIONS.path, body)
        eventually(lambda: sidecar.metrics()("inflight", leg="decode") == 1)
        assert prefill.kv_usage() > 0.0
    gone = time.monotonic()
    door.open()
    eventually(lambda: prefill.kv_usage() == 0.0, SOONER_THAN_A_LEASE_S)
    return door.taken_at - gone, time.monotonic() - door.taken_at
