"""What the control plane asks engines does not wait for engines that are silent."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sidecar.calls import Calls
from sidecar.prefill.address import Address
from sidecar.prefill.endpoints import Endpoint
from sidecar.settings import Settings
from sidecar.tls import Tls

SILENT = 150


async def _mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await reader.read(4096):
        pass
    writer.close()


async def _healthy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    writer.close()


def test_many_silent_prefill_endpoints_do_not_make_the_decode_engine_look_dead() -> None:
    """Nor one another: who waits for a connection would be taken for who is frozen."""

    async def main() -> None:
        mute = await asyncio.start_server(_mute, "127.0.0.1", backlog=2 * SILENT)
        healthy = await asyncio.start_server(_healthy, "127.0.0.1")
        port = healthy.sockets[0].getsockname()[1]
        settings = Settings(model_server_port=port)
        calls = Calls(settings, Tls(settings))
        calls.open()
        silent = Endpoint(Address("127.0.0.1", mute.sockets[0].getsockname()[1]), configured=True)
        other = Endpoint(Address("127.0.0.1", port), configured=True)
        asked = [asyncio.create_task(calls.prefill_probe(silent).healthy(5.0)) for _ in range(SILENT)]
        await asyncio.sleep(0.5)
        assert await calls.engine_probe(0).healthy(1.0) == ""
        assert await calls.prefill_probe(other).healthy(1.0) == ""
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await calls.close()
        for server in (mute, healthy):
            server.close()

    asyncio.run(main())


def test_calls_that_the_engine_does_not_answer_do_not_make_it_look_dead(tmp_path: Path) -> None:
    """The same for an engine on a Unix socket: its load and its models may be long in coming."""

    async def main() -> None:
        path = str(tmp_path / "engine")
        connections = 0

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            connections += 1
            if b" /health " in await reader.readuntil(b"\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                writer.close()
            else:
                await _mute(reader, writer)

        engine = await asyncio.start_unix_server(answer, path, backlog=2 * SILENT)
        settings = Settings(model_server_uds=path)
        calls = Calls(settings, Tls(settings))
        calls.open()
        asked = [asyncio.create_task(calls.engine_probe(0).load(5.0)) for _ in range(SILENT)]
        await asyncio.sleep(0.5)
        assert await calls.engine_probe(0).healthy(1.0) == ""
        assert connections == SILENT + 1
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await calls.close()
        engine.close()

    asyncio.run(main())
