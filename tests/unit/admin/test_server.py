"""Nobody holds a connection of the admin port for ever, nor so many that others find no room."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

from sidecar.admin.server import AdminServer, Limits
from tests.ports import free_ports

LIMITS = Limits(head_s=0.5, answer_s=0.6, idle_s=0.9, connections=8)
LATE_S = 3.0
"""On a machine that has something else to do."""
HEAD = b"GET /now HTTP/1.1\r\nHost: a\r\n\r\n"
Connect = Callable[[], Awaitable["Peer"]]


class Peer:
    """Who is connected."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def ask(self) -> bytes:
        self.send(HEAD)
        head = await self.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        return await self.reader.readexactly(2)

    async def held_s(self) -> float:
        """How long it takes until the server ends the connection."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(10):
                await self.reader.read()
        except ConnectionResetError:
            pass
        return time.monotonic() - began

    async def received(self) -> int:
        """Bytes until the server ends the connection."""
        count = 0
        try:
            while piece := await self.reader.read(1 << 16):
                count += len(piece)
        except ConnectionResetError:
            pass
        return count

    async def is_gone(self) -> bool:
        try:
            async with asyncio.timeout(0.05):
                return await self.reader.read(1) == b""
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False


def run(main: Callable[[Connect], Awaitable[None]]) -> None:
    async def now(_request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def read(request: web.Request) -> web.Response:
        return web.Response(text=str(len(await request.read())))

    async def large(_request: web.Request) -> web.Response:
        return web.Response(body=bytes(64 << 20))

    async def within() -> None:
        app = web.Application()
        app.router.add_get("/now", now)
        app.router.add_get("/large", large)
        app.router.add_put("/read", read)
        port = free_ports()
        server = AdminServer(app, LIMITS)
        await server.listen("127.0.0.1", port)
        peers: list[Peer] = []

        async def connect() -> Peer:
            peers.append(Peer(*await asyncio.open_connection("127.0.0.1", port)))
            return peers[-1]

        await main(connect)
        for peer in peers:
            peer.writer.transport.abort()
        await asyncio.sleep(0.2)
        assert not server.open_connections
        await server.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)

    asyncio.run(within())


def test_who_says_nothing() -> None:
    async def main(connect: Connect) -> None:
        assert LIMITS.head_s - 0.05 < await (await connect()).held_s() < LIMITS.head_s + LATE_S

    run(main)


def test_who_drips_a_head() -> None:
    async def main(connect: Connect) -> None:
        async def drip(peer: Peer) -> None:
            for byte in HEAD[:-1]:
                peer.send(bytes([byte]))
                await asyncio.sleep(0.2)

        first, second = await connect(), await connect()
        assert await second.ask() == b"ok"
        drips = [asyncio.create_task(drip(peer)) for peer in (first, second)]
        assert await first.held_s() < LIMITS.head_s + LATE_S
        assert await second.held_s() < LIMITS.head_s + LATE_S, "a second request's head has no more time"
        for one in drips:
            one.cancel()

    run(main)


def test_who_drips_a_body_or_reads_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    async def main(connect: Connect) -> None:
        writes, reads_not = await connect(), await connect()
        writes.send(b"PUT /read HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\nx")
        reads_not.send(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
        assert LIMITS.answer_s - 0.05 < await writes.held_s() < LIMITS.answer_s + LATE_S
        await asyncio.sleep(LIMITS.idle_s)
        assert await reads_not.received() < 64 << 20

    run(main)
    assert not caplog.records


def test_who_asks_again_and_again_is_kept_and_who_does_not_is_not() -> None:
    async def main(connect: Connect) -> None:
        peer = await connect()
        for _ in range(4):
            assert await peer.ask() == b"ok"
            await asyncio.sleep(LIMITS.idle_s / 2)
        assert await peer.held_s() < LIMITS.idle_s + LATE_S

    run(main)


def test_of_too_many_the_one_that_has_waited_longest_goes() -> None:
    """So that a probe finds room, whoever else is connected."""

    async def main(connect: Connect) -> None:
        asking = await connect()
        silent = [await connect() for _ in range(LIMITS.connections - 1)]
        assert await asking.ask() == b"ok"
        probe = await connect()
        assert await probe.ask() == b"ok"
        gone = await asyncio.gather(*[peer.is_gone() for peer in silent])
        assert gone == [True] + [False] * (LIMITS.connections - 2)
        assert await asking.ask() == b"ok"

    run(main)


def test_who_is_being_answered_does_not_make_room() -> None:
    async def main(connect: Connect) -> None:
        busy = [await connect() for _ in range(LIMITS.connections)]
        for peer in busy:
            peer.send(b"PUT /read HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nx")
        await asyncio.sleep(0.2)
        assert await (await connect()).is_gone()
        for peer in busy:
            peer.send(b"y")
            assert (await peer.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")

    run(main)
