"""The admin port's listener: aiohttp's server, with a time limit for every step of a connection, and a bound on how
many there are. Knows nothing of what is served.

aiohttp 3.14 limits nothing but how long a connection is idle, to an hour: one that says nothing, or half a head, is
held for so long. Here each is passed through a protocol that has a clock.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple, cast

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Limits(NamedTuple):
    head_s: float = 30.0
    """From a connection's beginning, or a later request's first byte, until the request's head is complete."""
    answer_s: float = 30.0
    """From there until there is an answer, the request's body included."""
    idle_s: float = 75.0
    """From there until the next request's first byte. Longer than scrapes are apart."""
    connections: int = 128
    """At once. Prometheus and the kubelet have a few."""


class AdminServer:
    """Serves an application on one port. Made on the running loop."""

    def __init__(self, app: web.Application, limits: Limits | None = None) -> None:
        app.middlewares.insert(0, _timed)
        self.limits = limits or Limits()
        self._runner = web.AppRunner(app, access_log=None)
        self._server: asyncio.Server | None = None
        self._open: set[_Connection] = set()
        self._waiting: dict[_Connection, None] = {}
        """Those of which no request is being answered, by how long that has been so."""

    async def listen(self, host: str, port: int) -> None:
        """`host` "": every address. Raises `OSError` if the port cannot be had."""
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), host or None, port, backlog=128)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()

    @property
    def open_connections(self) -> int:
        return len(self._open)

    # -- for connections --

    def handler(self) -> asyncio.Protocol:
        """aiohttp's side of a new connection."""
        assert self._runner.server is not None
        return self._runner.server()

    def opened(self, connection: "_Connection") -> bool:
        """Whether there is room; who has waited longest makes some."""
        if len(self._open) >= self.limits.connections:
            longest = next(iter(self._waiting), None)
            if longest is None:
                return False
            self.ended(longest)
            longest.abort()
        self._open.add(connection)
        self.waits(connection)
        return True

    def waits(self, connection: "_Connection") -> None:
        """For a request to answer."""
        self._waiting[connection] = None

    def answers(self, connection: "_Connection") -> None:
        self._waiting.pop(connection, None)

    def ended(self, connection: "_Connection") -> None:
        self._open.discard(connection)
        self._waiting.pop(connection, None)


class _Connection(asyncio.Protocol):
    """Hands everything on to aiohttp's protocol, and ends the connection when a step takes too long."""

    def __init__(self, server: AdminServer) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._handler = server.handler()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_idle = False

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    def _within(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self.abort)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- from the middleware: the head is complete, and there is an answer --

    def begins(self) -> None:
        self._is_idle = False
        self._server.answers(self)
        self._within(self._server.limits.answer_s)

    def ends(self) -> None:
        if self._transport is None:
            return
        self._is_idle = True
        self._server.waits(self)
        self._within(self._server.limits.idle_s)

    # -- asyncio --

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports do not inherit from asyncio's
        self._handler.connection_made(transport)
        if self._server.opened(self):
            self._within(self._server.limits.head_s)
        else:
            self.abort()

    def data_received(self, data: bytes) -> None:
        if self._is_idle:
            self._is_idle = False
            self._within(self._server.limits.head_s)
        self._handler.data_received(data)

    def eof_received(self) -> bool | None:
        return self._handler.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._server.ended(self)
        if self._timer is not None:
            self._timer.cancel()
        self._handler.connection_lost(exc)

    def pause_writing(self) -> None:
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._handler.resume_writing()


@web.middleware
async def _timed(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Tells the request's connection of it."""
    transport = request.transport
    connection = cast("_Connection", transport.get_protocol()) if transport is not None else None
    if connection is None:
        return await handler(request)
    connection.begins()
    try:
        return await handler(request)
    except ConnectionError:  # whoever asked left in the middle of the body, or was too slow with it
        if connection.is_open:
            raise
        return web.Response(status=408)  # nobody reads it
    finally:
        connection.ends()
