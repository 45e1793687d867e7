"""Noise against codec and listener for FUZZ_SECONDS each (2 by default, 60 in `make test`), seeded and repeatable.

However slow the machine is, they go on until enough of it has come through to mean something. Half-right input
finds more than random bytes: good streams are cut, doubled, swapped and bent.
"""

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Iterator

from tests.integration.transport.peers import Listener, asked, described, descriptors, pack, run, until
from tests.integration.transport.watched import Watched
from transport import handshake, zmtp
from transport.handshake import HandshakeError
from transport.side_channels import Address

SECONDS = float(os.environ.get("FUZZ_SECONDS", "2"))
SEED = int(os.environ.get("FUZZ_SEED", "20"))
STREAMS_MIN = 1000
ENOUGH = {"garbage": 20, "live": 5, "range": 5}
"""Outcomes of noise: refused, answered, asked for a rank that there is not."""
ROUNDS_MAX = 2000
"""Of 20 connections; far more than bring `ENOUGH`."""

REQUEST = pack((b"get_meta_msg", 0, 0))
PARTS = [
    zmtp.GREETING,
    zmtp.encode_ready(zmtp.REQ),
    zmtp.encode_ready(zmtp.DEALER),
    zmtp.encode_message(b"", REQUEST),
    zmtp.encode_message(b"", pack((b"get_meta_msg", 0, 1))),
    zmtp.encode_message(b"", pack((b"get_meta_msg", 0, 2))),
    zmtp.encode_message(b"", pack((b"get_meta_msg", 7, 7))),
    zmtp.encode_message(b"", pack(("get_meta_msg", 0, 0))),
    zmtp.encode_message(b"", b"", REQUEST),
    zmtp.encode_message(REQUEST),
    b"\x04\x0a\x04PING\x00\x0actx",
    b"\x02" + (2**40).to_bytes(8, "big"),
    b"GET / HTTP/1.1\r\n\r\n",
]
PAYLOAD = pack({"compatibility_hash": "h", "agent_metadata_bytes": pack(described("P", b"blob"))})


def bent(source: random.Random, data: bytes) -> bytes:
    """A few bytes changed, taken out or put in."""
    buffer = bytearray(data)
    for _ in range(source.choice((0, 0, 1, 1, 2, 5, 20))):
        at = source.randrange(len(buffer) + 1)
        match source.randrange(4):
            case 0:
                buffer[at:at] = source.randbytes(source.choice((1, 1, 2, 9, 70)))
            case 1:
                del buffer[at : at + source.choice((1, 1, 2, 9, 70))]
            case 2 if at < len(buffer):
                buffer[at] ^= 1 << source.randrange(8)
            case _ if at < len(buffer):
                buffer[at] = source.choice((0, 1, 2, 4, 0x7F, 0x80, 0xC1, 0xFF))
    return bytes(buffer)


def stream(source: random.Random) -> bytes:
    if source.random() < 0.1:
        return source.randbytes(source.randrange(300))
    parts = [PARTS[0], PARTS[1]] if source.random() < 0.8 else []
    parts += source.choices(PARTS, k=source.randrange(5))
    return bent(source, b"".join(parts)) if source.random() < 0.6 else b"".join(parts)


def pieces(source: random.Random, data: bytes) -> Iterator[bytes]:
    while data:
        size = source.choice((1, 2, 10, 64, 1000))
        yield data[:size]
        data = data[size:]


def test_the_codecs_raise_what_they_say_and_nothing_else() -> None:
    source = random.Random(SEED)
    deadline = time.monotonic() + SECONDS
    read = streams = 0
    while time.monotonic() < deadline or streams < STREAMS_MIN:
        for _ in range(50):
            streams += 1
            wire = zmtp.Wire(frozenset({zmtp.REQ, zmtp.DEALER}), frame_bytes_max=64, parts_max=3)
            with contextlib.suppress(zmtp.ProtocolError):
                for piece in pieces(source, stream(source)):
                    for message in wire.feed(piece):
                        assert 1 <= len(message) <= 3
                        with contextlib.suppress(HandshakeError):
                            rank = handshake.decode_request(message[-1])
                            assert 0 <= min(rank) <= max(rank) < handshake.RANKS_MAX
                            read += 1
                    assert len(wire._buffer) <= 4096 + 9  # a command may be longer than a message
            with contextlib.suppress(HandshakeError):
                found = handshake.describe(bent(source, PAYLOAD))
                assert found.geometry is None or found.geometry.logical_block_size > 0
    assert read > streams / 10  # the noise is not so loud that nothing gets through


def test_the_relay_and_the_engine_behind_it_survive() -> None:
    async def shout(source: random.Random, address: Address) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):
            reader, writer = await asyncio.open_connection(*address)
            try:
                for piece in pieces(source, stream(source)):
                    if writer.transport.is_closing():
                        break
                    writer.write(piece)
                    if source.random() < 0.1:
                        await asyncio.sleep(source.random() * 0.004)
                async with asyncio.timeout(source.choice((0, 0.002, 0.02))):
                    await reader.read(100)
            finally:
                if source.random() < 0.5:
                    writer.transport.abort()
                writer.close()

    async def rounds(channels: Watched) -> None:
        channels.add(prefill.endpoint)
        address = await channels.fetched(prefill.endpoint, "P", 2)
        await asked(address)
        before = descriptors()
        source = random.Random(SEED)
        deadline = time.monotonic() + SECONDS
        count = 0

        def lacking() -> dict[str, int]:
            """What came too seldom. Each round asks properly, too, for two ranks and for one that there is not."""
            own = {"live": 2 * count, "range": count}
            heard = {kind: channels.handshakes[kind] - own.get(kind, 0) for kind in ENOUGH}
            return {kind: found for kind, found in heard.items() if found < ENOUGH[kind]}

        while time.monotonic() < deadline or (lacking() and count < ROUNDS_MAX):
            await asyncio.gather(*(shout(source, address) for _ in range(20)))
            replies = await asked(address, 0, 1, 2)
            assert [reply.decodable for reply in replies] == [True, True, False]
            count += 1
        relay = channels._relays[prefill.endpoint]
        await until(lambda: not relay.connections)
        assert not lacking(), (lacking(), count)
        await until(lambda: descriptors() <= before)

    async def main() -> None:
        channels = Watched(refresh_seconds=0.5)
        try:
            await rounds(channels)
        finally:
            await channels.close()

    with Listener("P", ranks=2) as prefill:
        run(main())
    assert prefill.error is None
    assert set(prefill.requests) <= {(0, 0), (0, 1)}
