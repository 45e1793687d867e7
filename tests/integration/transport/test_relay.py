"""The relay between a libzmq REQ (the decode engine's) and a libzmq ROUTER (the prefill engine's)."""

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager

import pytest

from tests.integration.transport.peers import (
    AT_ONCE_SECONDS,
    LOCALHOST,
    Listener,
    ask,
    asked,
    black_hole,
    descriptors,
    mute,
    pack,
    run,
    speaking,
    until,
)
from tests.integration.transport.watched import Watched
from tests.ports import free_ports
from transport import relay, zmtp
from transport.prober import Endpoint, Known
from transport.side_channels import Address

READY = zmtp.GREETING + zmtp.encode_ready(zmtp.ROUTER)


@contextlib.asynccontextmanager
async def relayed(*endpoints: Endpoint) -> AsyncIterator[Watched]:
    channels = Watched(refresh_seconds=0.2)
    try:
        for endpoint in endpoints:
            assert channels.add(endpoint)
        for endpoint in endpoints:
            await channels.settled(endpoint, 1)
        yield channels
    finally:
        await channels.close()


def front(channels: Watched, endpoint: Endpoint) -> tuple[str, int]:
    return channels._relays[endpoint].address


def test_both_frames_come_through_verbatim_and_live() -> None:
    async def main() -> None:
        async with relayed(prefill.endpoint) as channels:
            address = await channels.relay_address(prefill.endpoint, engine_id="P", tp_size=2)
            assert isinstance(address, Address)
            assert address.host.startswith("127.77.")
            before = len(prefill.requests)
            replies = await asked(address, 0, 1)
            assert [reply.frames[0] for reply in replies] == [prefill.payloads[0, 0], prefill.payloads[0, 1]]
            # The second rank costs one more question: is it still the engine whose ranks are known?
            assert prefill.requests[before:].count((0, 0)) >= 2
            now = time.perf_counter()
            assert all(now - 1 < reply.clock_seconds <= now for reply in replies)
            assert channels.handshakes == {"live": 2}

    with Listener("P", ranks=2) as prefill:
        run(main())
    assert prefill.error is None


def test_ranks_that_nobody_vouched_for_are_never_asked() -> None:
    async def main() -> None:
        async with relayed(prefill.endpoint) as channels:
            address = front(channels, prefill.endpoint)
            assert [reply.decodable for reply in await asked(address, 0, 1, 7)] == [True, False, False]
            assert channels.handshakes == {"live": 1, "range": 2}
            assert await channels.alive(prefill.endpoint)

    with Listener("P", ranks=1) as prefill:
        run(main())
    assert prefill.error is None
    assert set(prefill.requests) == {(0, 0)}


def test_the_same_question_asked_directly_ends_the_listener() -> None:
    """Why ranks are checked: shown once."""
    with Listener("P", ranks=1) as prefill:
        with pytest.raises(Exception, match="Resource temporarily unavailable"):
            ask(prefill.endpoint, 1, timeout_seconds=0.2)
        assert isinstance(prefill.error, KeyError)


def test_what_was_fetched_serves_while_the_listener_is_closed_with_a_running_clock() -> None:
    async def main() -> None:
        async with relayed(prefill.endpoint) as channels:
            address = await channels.fetched(prefill.endpoint, "P", 2)
            await asyncio.to_thread(prefill.stop)
            replies = await asked(address, 0, 1)
            assert [reply.frames[0] for reply in replies] == [prefill.payloads[0, 0], prefill.payloads[0, 1]]
            assert all(reply.seconds < AT_ONCE_SECONDS for reply in replies)
            await asyncio.sleep(2.0)
            # Simulated engine and test share one clock, so the moved-on clock has to be about now.
            (late,) = await asked(address)
            assert abs(late.clock_seconds - time.perf_counter()) < 1.5
            assert channels.handshakes == {"remembered": 3}

    with Listener("P", ranks=2) as prefill:
        run(main())


def test_an_endpoint_that_never_answered_is_refused_in_milliseconds() -> None:
    async def main(endpoint: Endpoint) -> None:
        async with relayed(endpoint) as channels:
            (reply,) = await asked(front(channels, endpoint))
            assert not reply.decodable
            assert len(reply.frames) == 2
            assert reply.seconds < AT_ONCE_SECONDS
            assert channels.handshakes == {"refused": 1}

    run(main(Endpoint(LOCALHOST, free_ports())))


def test_a_frozen_engine_is_given_up_after_a_fifth_of_a_second_whatever_is_remembered() -> None:
    async def main() -> None:
        async with relayed(prefill.endpoint) as channels:
            prefill.running.clear()
            (reply,) = await asked(front(channels, prefill.endpoint))
            assert not reply.decodable
            assert 0.19 < reply.seconds < AT_ONCE_SECONDS
            # And the next ones need not wait for the same again.
            replies = await asked(front(channels, prefill.endpoint), *[0] * 5)
            assert not any(reply.decodable for reply in replies)
            assert min(reply.seconds for reply in replies) < 0.19
            assert channels.handshakes == {"silent": 6}
            prefill.running.set()
            assert await channels.alive(prefill.endpoint)
            (reply,) = await asked(front(channels, prefill.endpoint))
            assert reply.decodable

    with Listener("P") as prefill:
        run(main())


PEERS: list[tuple[str, Callable[[], AbstractContextManager[Endpoint]]]] = [
    ("silent", black_hole),
    ("silent", mute),
    ("malformed", lambda: speaking(b"HTTP/1.1 400 Bad Request\r\n\r\n")),
    ("malformed", lambda: speaking(READY, b"\x02" + (100 * 2**20).to_bytes(8, "big"))),
]


@pytest.mark.parametrize(("outcome", "peer"), PEERS)
def test_whatever_stands_behind_the_endpoint_the_engine_gets_its_answer(
    outcome: str, peer: Callable[[], AbstractContextManager[Endpoint]]
) -> None:
    async def main(endpoint: Endpoint) -> None:
        async with relayed(endpoint) as channels:
            (reply,) = await asked(front(channels, endpoint))
            assert not reply.decodable
            assert reply.seconds < AT_ONCE_SECONDS
            assert dict(channels.handshakes) == {outcome: 1}

    with peer() as endpoint:
        run(main(endpoint))


@pytest.mark.parametrize("frames", [(b"one",), (b"{}", b"\xc1"), (b"{}", pack(1.0), b"three")])
def test_a_reply_that_is_none_is_not_passed_on(frames: tuple[bytes, ...]) -> None:
    async def main() -> None:
        class Source:
            def covers(self, rank: object) -> bool:
                return True

            def remembered(self, rank: object, now_seconds: float) -> None:
                return None

            async def live(self, rank: object, timeout_seconds: float) -> tuple[bytes, bytes]:
                from transport.handshake import split_reply

                return split_reply(frames)

        outcomes: list[str] = []
        one = relay.Relay(
            Source(), relay.bind("x", set(), port=free_ports()), on_outcome=lambda o, _: outcomes.append(o)
        )
        (reply,) = await asked(one.address)
        assert not reply.decodable
        assert outcomes == ["malformed"]
        await one.close()

    run(main())


def test_another_engine_at_the_address_is_not_asked_for_the_old_ones_ranks() -> None:
    port = free_ports()

    async def main() -> None:
        first = Listener("P1", port=port, ranks=4)
        async with relayed(first.endpoint) as channels:
            assert isinstance(await channels.relay_address(first.endpoint, engine_id="P1", tp_size=4), Address)
            first.stop()
            with Listener("P2", port=port, ranks=1) as second:
                replies = await asked(front(channels, first.endpoint), 3, 0)
                assert [reply.decodable for reply in replies] == [False, True]
                assert second.error is None
                assert set(second.requests) == {(0, 0)}
                assert channels.handshakes["changed"] + channels.handshakes["range"] == 1

    run(main())


# What reaches the port that is not a decode engine


async def raw(
    address: tuple[str, int], *pieces: bytes, pause_seconds: float = 0.0, patience_seconds: float = 0.2
) -> bytes:
    """Say something on a plain connection and return all that comes back until it is closed."""
    reader, writer = await asyncio.open_connection(*address)
    heard = b""
    with contextlib.suppress(ConnectionError, TimeoutError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_seconds)
        async with asyncio.timeout(patience_seconds):
            while data := await reader.read(65536):
                heard += data
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return heard


OPENING = zmtp.GREETING + zmtp.encode_ready(zmtp.REQ)
GOOD = zmtp.encode_message(b"", pack((b"get_meta_msg", 0, 0)))
OFFENCES = {
    "http": [b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"],
    "tls": [b"\x16\x03\x01\x02\x00" + bytes(200)],
    "another socket type": [zmtp.GREETING + zmtp.encode_ready(b"SUB")],
    "a message of 100 MB": [OPENING, b"\x02" + (100 * 2**20).to_bytes(8, "big"), bytes(300_000)],
    "a message of 65 bytes": [OPENING, zmtp.encode_message(b"", bytes(65))],
    "one part": [OPENING, zmtp.encode_message(pack((b"get_meta_msg", 0, 0)))],
    "three parts": [OPENING, zmtp.encode_message(b"", b"", pack((b"get_meta_msg", 0, 0)))],
    "no delimiter": [OPENING, zmtp.encode_message(b"x", pack((b"get_meta_msg", 0, 0)))],
    "two questions at once": [OPENING, GOOD + GOOD],
    "noise": [OPENING, random.Random(5).randbytes(5000)],
}


@pytest.mark.parametrize("offence", OFFENCES)
def test_offences_end_their_connection_are_counted_and_hurt_nobody(offence: str) -> None:
    async def main() -> None:
        async with relayed(prefill.endpoint) as channels:
            address = front(channels, prefill.endpoint)
            patient = asyncio.create_task(asked(address, 0, 0, 0))
            began = time.perf_counter()
            await raw(address, *OFFENCES[offence], pause_seconds=0.01, patience_seconds=8)
            assert time.perf_counter() - began < 4  # closed, not left to its own devices
            assert all(reply.decodable for reply in await patient)
            assert channels.handshakes["garbage"] == 1
            assert (await asked(address))[0].decodable

    with Listener("P") as prefill:
        run(main())
    assert prefill.error is None
    assert set(prefill.requests) == {(0, 0)}


@pytest.mark.parametrize("body", [b"", b"\xc1", pack(("get_meta_msg", 0, 0)), pack((b"get_meta_msg", 0, 0, 0))])
def test_a_well_framed_question_that_is_none_is_answered_undecodably(body: bytes) -> None:
    """An engine of another version that asks something else must not wait for 5 s."""

    async def main() -> None:
        async with relayed(prefill.endpoint) as channels:
            address = front(channels, prefill.endpoint)
            heard = await raw(address, OPENING, zmtp.encode_message(b"", body), GOOD, pause_seconds=0.02)
            assert b"\xc1" in heard
            assert prefill.payloads[0, 0] in heard
            assert channels.handshakes == {"garbage": 1, "live": 1}

    with Listener("P") as prefill:
        run(main())
    assert prefill.error is None


def test_slow_and_silent_connections_are_bounded() -> None:
    async def main() -> None:
        async with relayed(prefill.endpoint) as channels:
            address = front(channels, prefill.endpoint)
            connections = [await asyncio.open_connection(*address) for _ in range(relay.CONNECTIONS_MAX + 6)]
            await until(lambda: channels.handshakes["overload"] == 6)
            for _, writer in connections:
                writer.close()
            await until(lambda: not channels._relays[prefill.endpoint].connections)
            assert (await asked(address))[0].decodable

    with Listener("P") as prefill:
        run(main())


def test_connections_that_say_nothing_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "GREETING_TIMEOUT_SECONDS", 0.05)
    monkeypatch.setattr(relay, "IDLE_TIMEOUT_SECONDS", 0.05)

    async def main() -> None:
        async with relayed(prefill.endpoint) as channels:
            address = front(channels, prefill.endpoint)
            for opening in (b"", zmtp.GREETING[:20], OPENING):
                reader, writer = await asyncio.open_connection(*address)
                writer.write(opening)
                async with asyncio.timeout(1):
                    with contextlib.suppress(ConnectionError):
                        while await reader.read(1000):
                            pass
                writer.close()
                await writer.wait_closed()

    with Listener("P") as prefill:
        run(main())


def test_an_engine_that_leaves_in_the_middle_leaves_nothing() -> None:
    async def main(endpoint: Endpoint) -> None:
        async with relayed(endpoint) as channels:
            before = descriptors()
            for _ in range(20):
                _, writer = await asyncio.open_connection(*front(channels, endpoint))
                writer.write(OPENING)
                await asyncio.sleep(0.002)
                writer.write(GOOD)
                await asyncio.sleep(0.002)
                writer.close()
                await writer.wait_closed()
            await until(lambda: not channels._relays[endpoint].connections)
            await until(lambda: descriptors() <= before + 2)

    with mute(backlog=64) as endpoint:
        run(main(endpoint))


def test_closing_is_not_held_up_by_anyone() -> None:
    async def main(endpoint: Endpoint) -> None:
        before = descriptors()
        channels = Watched()
        channels.add(prefill.endpoint)
        channels.add(endpoint)
        await channels.settled(prefill.endpoint, 1)
        # One that does not read a large answer, one that waits for a silent peer, one that has said half a word.
        for target, words in (
            (prefill.endpoint, [OPENING, GOOD]),
            (endpoint, [OPENING, GOOD]),
            (prefill.endpoint, [OPENING[:30]]),
        ):
            deaf = socket.create_connection(channels._relays[target].address)
            deafs.append(deaf)
            for word in words:
                deaf.sendall(word)
                await asyncio.sleep(0.02)
        began = time.perf_counter()
        await channels.close()
        assert time.perf_counter() - began < AT_ONCE_SECONDS
        for deaf in deafs:
            deaf.close()
        await until(lambda: descriptors() == before)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*channels_address)

    deafs: list[socket.socket] = []
    channels_address = (LOCALHOST, free_ports())
    with Listener("P", padding_bytes=7_000_000) as prefill, mute() as endpoint:
        run(main(endpoint))


# Addresses


def test_addresses_are_stable_unshared_and_step_aside_for_other_sidecars() -> None:
    port = free_ports()
    first = relay.bind("10.0.0.1:5600", set(), port=port)
    again = relay.bind("10.0.0.1:5600", set(), port=port)  # as another sidecar on the same host network
    other = relay.bind("10.0.0.2:5600", set(), port=port)
    hosts = [sock.getsockname()[0] for sock in (first, again, other)]
    assert len(set(hosts)) == 3
    for sock in (first, again, other):
        sock.close()
    back = relay.bind("10.0.0.1:5600", set(), port=port)
    assert back.getsockname()[0] == hosts[0]
    aside = relay.bind("10.0.0.1:5600", {hosts[0]}, port=port)
    assert aside.getsockname()[0] != hosts[0]
    back.close()
    aside.close()


def test_when_no_address_is_left_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "NETWORK", "127.88.0.0/30")
    port = free_ports()
    taken = [relay.bind("a", set(), port) for _ in range(2)]
    with pytest.raises(OSError, match="in use"):
        relay.bind("a", set(), port)
    with pytest.raises(OSError, match="no loopback address"):
        relay.bind("a", {"127.88.0.1", "127.88.0.2"}, port)

    async def main() -> None:
        channels = Watched(port=port)
        assert channels.add(prefill.endpoint)
        assert isinstance(await channels.settled(prefill.endpoint, 1), Known)
        found = await channels.relay_address(prefill.endpoint, engine_id="P")
        assert not isinstance(found, Address)
        # Out of descriptors, say, in the moment in which the endpoint came: that passes.
        for sock in taken:
            sock.close()
        found = await channels.relay_address(prefill.endpoint, engine_id="P")
        assert isinstance(found, Address)
        assert (await asked(found))[0].decodable
        channels.remove(prefill.endpoint)
        assert not isinstance(channels.known_address(prefill.endpoint, engine_id="P"), Address)
        await channels.close()

    with Listener("P") as prefill:
        run(main())
