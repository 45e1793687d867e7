"""Listens, sweeps overdue connections, drains. One for each rank's port."""

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Any

from sidecar.edge.client import ClientConnection
from sidecar.edge.service import Service

_log = logging.getLogger("sidecar")

SWEEP_S = 0.5
"""How late a deadline may be noticed. One timer for all connections costs less than one for each."""


class Server:
    """One serving port."""

    def __init__(
        self,
        service: Service,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
        *,
        shares_port: bool = False,
    ) -> None:
        """`shares_port`: other processes listen on it too; the kernel deals connections out (SO_REUSEPORT)."""
        self._service = service
        self._host = host or None
        self._port = port
        self._tls = tls
        self._shares_port = shares_port
        self._server: asyncio.Server | None = None
        self._connections: set[ClientConnection] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._all_gone = asyncio.Event()

    async def listen(self) -> None:
        """Raises `OSError` if the port cannot be had."""
        loop = self._service.loop
        options: dict[str, Any] = {"reuse_port": True} if self._shares_port else {}
        if self._tls is not None:
            settings = self._service.settings
            options |= {
                "ssl": self._tls,
                "ssl_handshake_timeout": settings.client_head_timeout,
                # Bounds how long what is buffered may take to a client that reads it after the end.
                "ssl_shutdown_timeout": settings.client_body_timeout,
            }
        self._server = await loop.create_server(
            lambda: ClientConnection(self._service, self._connections),
            self._host,
            self._port,
            backlog=4096,
            **options,
        )
        self._timer = loop.call_later(SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        loop = self._service.loop
        now = loop.time()
        for connection in [one for one in self._connections if 0.0 < one.deadline < now]:
            _attended(connection, connection.overdue)
        self._service.engine.sweep(now)
        if self._service.live.draining:
            for connection in list(self._connections):
                _attended(connection, connection.drain)
            if not self._connections:
                self._all_gone.set()
        self._timer = loop.call_later(0.05 if self._service.live.draining else SWEEP_S, self._sweep)

    async def drain(self, timeout_s: float) -> int:
        """Takes no new connection, closes idle ones and waits for open answers; returns how many were cut off.
        `live.draining` has been set."""
        assert self._server is not None
        self._server.close()
        if self._timer is not None:
            self._timer.cancel()
        self._sweep()
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_gone.wait()
        except TimeoutError:
            pass
        cut = len(self._connections)
        for connection in list(self._connections):
            connection.abort()
        return cut

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.abort()
        self._service.engine.close()

    @property
    def open_connections(self) -> int:
        return len(self._connections)


def _attended(connection: ClientConnection, attend: Callable[[], None]) -> None:
    try:
        attend()
    except Exception:  # one connection's trouble must not end the sweep of all
        _log.exception("a client connection that was due")
        connection.abort()
