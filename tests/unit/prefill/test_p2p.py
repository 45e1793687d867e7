"""Nobody is told to dial a P2P channel that does not greet."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from sidecar.background import Background
from sidecar.connectors.connector import Handoff, Rejection
from sidecar.prefill.address import Address
from sidecar.prefill.endpoints import Endpoint
from sidecar.prefill.p2p import P2PGate, alive, greeting
from tests.scarce import no_descriptors

GREETS, SILENT, FOREIGN, HANGS_UP = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f", None, b"HTTP/1.1 400\r\n", b""
QUICK_S = 0.2


@asynccontextmanager
async def channel(says: bytes | None) -> AsyncIterator[Address]:
    """Says this to whoever connects; None: as a frozen process, whose kernel alone takes connections."""
    if says is None:
        with socket.create_server(("127.0.0.1", 0)) as frozen:
            yield Address("127.0.0.1", frozen.getsockname()[1])
        return

    async def accepted(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(says)
        writer.close()

    async with await asyncio.start_server(accepted, "127.0.0.1", 0) as server:
        yield Address("127.0.0.1", server.sockets[0].getsockname()[1])


async def refusing() -> Address:
    async with channel(GREETS) as address:
        return address


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("says", "problem"),
    [(GREETS, ""), (SILENT, "no greeting within 0.2 s"), (FOREIGN, "it does not speak ZMTP"), (HANGS_UP, "ZMTP")],
)
def test_greeting(says: bytes | None, problem: str) -> None:
    async def test() -> None:
        async with channel(says) as address:
            found = await greeting(address, QUICK_S)
            assert problem in found
            assert bool(found) is bool(problem)

    run(test)


def test_refused() -> None:
    async def test() -> None:
        address = await refusing()
        assert "refused" in (await greeting(address, QUICK_S)).lower()
        assert str(address) in await alive(Handoff(b"{}", 1, host=address.host, port=address.port), QUICK_S)

    run(test)


@pytest.mark.parametrize(
    ("own", "theirs", "fault"),
    [
        (GREETS, GREETS, ""),
        (None, GREETS, "own_channel_dead"),
        (GREETS, SILENT, "side_channel_dead"),
        (SILENT, SILENT, "own_channel_dead"),  # the prefill endpoint is not to blame
    ],
)
def test_admitted_only_if_both_greet(
    own: bytes | None, theirs: bytes | None, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with AsyncExitStack() as stack:
            mine = await stack.enter_async_context(channel(own))
            peer = await stack.enter_async_context(channel(theirs))
            gate = P2PGate(Background(), mine, QUICK_S)
            handoff = Handoff(b"{}", 40, host=peer.host, port=peer.port, blocks=2)
            result = await admitted(gate, handoff)
            if fault:
                assert isinstance(result, Rejection)
                assert result.fault == fault
                await admitted(gate, handoff)
            else:
                assert result is handoff
        said = [record for record in caplog.records if "restart the engine" in record.message]
        assert len(said) == (fault == "own_channel_dead")

    run(test)


async def admitted(gate: P2PGate, handoff: Handoff) -> Handoff | Rejection:
    found: asyncio.Future[Handoff | Rejection] = asyncio.get_running_loop().create_future()
    gate.admit(Endpoint(Address("10.0.0.5", 8000), configured=True), handoff, found.set_result)
    return await found


def test_a_source_is_asked_too_and_an_unknown_own_channel_is_not() -> None:
    async def test() -> None:
        gate = P2PGate(Background(), None, QUICK_S)
        async with channel(GREETS) as peer:
            assert await reached(gate, peer)
        assert not await reached(gate, peer)

    run(test)


def test_a_source_that_is_not_there_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Every request may name one."""

    async def test() -> None:
        gate = P2PGate(Background(), None, QUICK_S)
        async with channel(GREETS) as peer:
            pass
        for _ in range(3):
            assert not await reached(gate, peer)
        assert len([record for record in caplog.records if "is not used" in record.message]) == 1

    run(test)


def test_a_name_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unknown(*_: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(asyncio, "open_connection", unknown)
    assert asyncio.run(greeting(Address("nowhere", 1), QUICK_S)) == "Name or service not known"


def test_nobody_is_to_blame_where_we_can_ask_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """Least of all the decode engine, which would be restarted for it."""

    async def test() -> None:
        async with channel(GREETS) as mine, channel(GREETS) as peer:
            gate = P2PGate(Background(), mine, QUICK_S)
            handoff = Handoff(b"{}", 40, host=peer.host, port=peer.port, blocks=2)
            with no_descriptors():
                result = await admitted(gate, handoff)
                assert await alive(handoff, QUICK_S) == ""
                assert not await reached(gate, peer)
            assert isinstance(result, Rejection)
            assert result.fault == "unverifiable"
            assert await admitted(gate, handoff) is handoff
        assert "restart the engine" not in caplog.text

    run(test)


async def reached(gate: P2PGate, source: Address) -> bool:
    found: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    gate.reach(source, found.set_result)
    return await found
