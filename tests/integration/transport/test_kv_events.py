"""KV events from a publisher on libzmq that does what vLLM's does (distributed/kv_events.py), and worse."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Self

import msgspec
import pytest
import zmq

from tests.integration.transport.peers import AT_ONCE_SECONDS, LOCALHOST, descriptors, mute, run, speaking, until
from tests.ports import free_ports
from transport import zmtp
from transport.kv_events import CONNECTIONS_MAX, KvEvents
from transport.prefix_index import PrefixIndex

BLOCK = 4
BATCHES = 900
"""Of a flood: a ROUTER drops what exceeds 1,000 messages when its reader is slow, the engine's too."""
END = (-1).to_bytes(8, "big", signed=True)


class Publisher:
    """One engine process: PUB connects, ROUTER binds for replays; one thread for both, as in vLLM."""

    def __init__(self, port: int, replay_port: int = 0, *, buffer_steps: int = 1000) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.linger = 0
        self._pub.reconnect_ivl = 20
        self._pub.connect(f"tcp://{LOCALHOST}:{port}")
        self._replay: zmq.Socket[bytes] | None = None
        if replay_port:
            self._replay = self._context.socket(zmq.ROUTER)
            self._replay.linger = 0
            self._replay.bind(f"tcp://{LOCALHOST}:{replay_port}")
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._queue: deque[tuple[bytes, bool]] = deque()
        self._stopping = threading.Event()
        self.serving = threading.Event()
        self.serving.set()
        self.next_sequence = 0
        self._hash = random.getrandbits(32)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def store(self, ids: list[int], *, lost: bool = False) -> list[int]:
        """Publish (or lose on the way) one batch that stores a prompt; returns its block hashes."""
        hashes = [self._hash + n for n in range(1, len(ids) // BLOCK + 1)]
        self._hash += 1000
        event = {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": None,
            "token_ids": ids[: len(hashes) * BLOCK],
            "block_size": BLOCK,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        self.publish([event], lost=lost)
        return hashes

    def publish(self, events: list[Any], *, lost: bool = False) -> None:
        self._queue.append((msgspec.msgpack.encode([time.time(), events, 0]), lost))

    def publish_raw(self, payload: bytes) -> None:
        self._queue.append((payload, False))

    def skip_to(self, sequence: int) -> None:
        self.next_sequence = sequence

    def _serve(self) -> None:
        while not self._stopping.is_set():
            if self._replay is not None and self.serving.is_set() and self._replay.poll(0):
                self._serve_replay(self._replay)
            if not self._queue:
                time.sleep(0.002)
                continue
            payload, lost = self._queue.popleft()
            sequence = self.next_sequence
            self.next_sequence += 1
            if not lost:
                self._pub.send_multipart((b"kv", sequence.to_bytes(8, "big"), payload))
            self._buffer.append((sequence, payload))
        self._context.destroy(linger=0)

    def _serve_replay(self, socket: zmq.Socket[bytes]) -> None:
        client, _, start = socket.recv_multipart()
        for sequence, payload in self._buffer:
            if sequence >= int.from_bytes(start, "big"):
                socket.send_multipart((client, b"", b"kv", sequence.to_bytes(8, "big"), payload))
        socket.send_multipart((client, b"", b"", END, b""))


@contextlib.asynccontextmanager
async def listening(port: int, replay_port: int = 0, **options: Any) -> AsyncIterator[KvEvents]:
    events = KvEvents(PrefixIndex(), port=port, replay=(LOCALHOST, replay_port) if replay_port else None, **options)
    try:
        yield events
    finally:
        await events.close()


def prompt(number: int, blocks: int = 3) -> list[int]:
    return [number * 100 + n for n in range(blocks * BLOCK + 1)]


async def holds(events: KvEvents, *numbers: int) -> None:
    """Wait until it is known that these prompts are held."""
    await until(lambda: all(events.cached_tokens(prompt(number)) == 3 * BLOCK for number in numbers))


def test_an_engine_that_has_published_nothing_is_known_to_hold_nothing() -> None:
    async def main() -> None:
        async with listening(port, replay) as events:
            assert events.cached_tokens(prompt(1)) is None
            with Publisher(port, replay) as engine:
                await until(lambda: events.current)
                assert events.cached_tokens(prompt(1)) == 0
                engine.store(prompt(1))
                await holds(events, 1)
                assert events.counts["stored"] == 1
            await until(lambda: not events.current)
            assert events.cached_tokens(prompt(1)) is None

    port, replay = free_ports(), free_ports()
    run(main())


def test_a_sidecar_that_starts_late_learns_all_of_it() -> None:
    async def main() -> None:
        with Publisher(port, replay) as engine:
            for number in range(20):
                engine.store(prompt(number))
            await until(lambda: engine.next_sequence == 20)
            async with listening(port, replay) as events:
                await holds(events, *range(20))
                engine.store(prompt(30))
                await holds(events, *range(20), 30)
                assert "gap" not in events.counts

    port, replay = free_ports(), free_ports()
    run(main())


def test_what_has_arrived_is_followed_before_anything_is_said() -> None:
    """A batch and a request that come in the same turn of the loop: the request is not told "unknown"."""

    async def main() -> None:
        async with listening(port, replay) as events:
            with Publisher(port, replay) as engine:
                engine.store(prompt(1))
                await holds(events, 1)
                link = events._publisher
                assert link is not None
                payload = msgspec.msgpack.encode([0.0, [{"type": "AllBlocksCleared"}], 0])
                events.batch(link, (b"kv", (1).to_bytes(8, "big"), payload))
                assert events.cached_tokens(prompt(1)) == 0
                assert events.current
                events.batch(link, (b"kv", (3).to_bytes(8, "big"), payload))  # one is missing
                assert events.cached_tokens(prompt(1)) is None

    port, replay = free_ports(), free_ports()
    run(main())


def test_a_gap_is_filled() -> None:
    async def main() -> None:
        async with listening(port, replay) as events:
            with Publisher(port, replay) as engine:
                await until(lambda: events.current)
                engine.store(prompt(1))
                hashes = engine.store(prompt(2), lost=True)
                engine.publish(
                    [{"type": "BlockRemoved", "block_hashes": hashes[2:], "medium": "GPU", "group_idx": 0}]
                )
                await holds(events, 1)
                await until(lambda: events.cached_tokens(prompt(2)) == 2 * BLOCK)
                assert events.counts["replay"] >= 2
                assert "gap" not in events.counts

    port, replay = free_ports(), free_ports()
    run(main())


def test_a_gap_beyond_the_engines_buffer_is_forgotten_about() -> None:
    async def main() -> None:
        async with listening(port, replay) as events:
            with Publisher(port, replay, buffer_steps=2) as engine:
                await until(lambda: events.current)
                engine.store(prompt(1))
                await holds(events, 1)
                for number in (2, 3, 4):
                    engine.store(prompt(number), lost=True)
                engine.store(prompt(5))
                await holds(events, 4, 5)
                assert events.cached_tokens(prompt(1)) == 0
                assert events.counts["gap"] == 1

    port, replay = free_ports(), free_ports()
    run(main())


@pytest.mark.parametrize("replayable", [True, False])
def test_a_restarted_engine_holds_nothing_of_the_old_one(replayable: bool) -> None:
    async def main() -> None:
        async with listening(port, replay) as events:
            with Publisher(port, replay) as engine:
                engine.store(prompt(1))
                engine.store(prompt(2))
                if replayable:
                    await holds(events, 1, 2)
                else:
                    await until(lambda: events.counts["stored"] > 0 or engine.next_sequence == 2)
            await until(lambda: not events.current)
            with Publisher(port, replay) as engine:
                await until(lambda: events._publisher is not None)
                engine.store(prompt(3))
                await asyncio.sleep(0.05)
                engine.store(prompt(4))
                await holds(events, 4)
                assert events.cached_tokens(prompt(1)) == 0
                assert events.cached_tokens(prompt(2)) == 0

    port, replay = free_ports(), free_ports() if replayable else 0
    run(main())


def test_a_replay_endpoint_that_is_dead_or_mute_means_unknown_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transport.kv_events.REPLAY_SILENCE_SECONDS", 0.1)

    async def main(replay: int) -> None:
        async with listening(port, replay) as events:
            with Publisher(port) as engine:
                await until(lambda: events.counts["replay_failed"] == 1)
                assert events.cached_tokens(prompt(1)) is None
                engine.store(prompt(1))
                await holds(events, 1)
                engine.store(prompt(2), lost=True)
                engine.store(prompt(3))
                await until(lambda: events.counts["replay_failed"] == 2)
                engine.store(prompt(4))
                await holds(events, 4)
                assert events.cached_tokens(prompt(1)) == 0

    port = free_ports()
    run(main(free_ports()))
    port = free_ports()
    with mute() as endpoint:
        run(main(endpoint.port))


@pytest.mark.parametrize(
    "answer",
    [
        (b"", b"kv", (0).to_bytes(8, "big")),
        (b"", b"kv", b"\0", b"payload"),
        (b"", b"kv", (0).to_bytes(8, "big"), b"payload", b"more"),
    ],
)
def test_a_replay_that_is_none_is_no_replay(answer: tuple[bytes, ...]) -> None:
    async def main(replay: int) -> None:
        async with listening(port, replay) as events:
            with Publisher(port):
                await until(lambda: events.counts["replay_failed"] == 1)
                assert events.counts["malformed"] == 0
                assert not events.current

    port = free_ports()
    with speaking(zmtp.GREETING + zmtp.encode_ready(zmtp.ROUTER), zmtp.encode_message(*answer)) as endpoint:
        run(main(endpoint.port))


def test_what_is_not_understood_is_never_taken_as_cached(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with listening(port, replay) as events:
            with Publisher(port, replay) as engine:
                for unknown in ([{"type": "BlockMoved"}], [["BlockStored", [1], None, [1], 1, None]]):
                    engine.store(prompt(1))
                    await holds(events, 1)
                    engine.publish(unknown)
                    await until(lambda: events.cached_tokens(prompt(1)) == 0)
                engine.store(prompt(1))
                await holds(events, 1)
                engine.publish_raw(b"\xc1")
                await until(lambda: events.cached_tokens(prompt(1)) == 0)
                assert events.counts["unknown"] >= 1
                assert events.counts["malformed"] >= 1
                engine.store(prompt(2))
                await holds(events, 2)

    port, replay = free_ports(), free_ports()
    run(main())
    assert caplog.text.count("another vLLM version") <= 1


def test_garbage_on_the_port_is_dropped_and_the_engine_is_still_heard() -> None:
    async def main() -> None:
        async with listening(port, replay) as events:
            with Publisher(port, replay) as engine:
                engine.store(prompt(1))
                await holds(events, 1)
                before = descriptors()
                for words in (
                    b"GET / HTTP/1.1\r\n\r\n",
                    zmtp.GREETING + zmtp.encode_ready(b"REQ"),
                    zmtp.GREETING[:30],
                    random.Random(1).randbytes(1000),
                ):
                    _, writer = await asyncio.open_connection(LOCALHOST, port)
                    writer.write(words)
                    await asyncio.sleep(0.01)
                    writer.close()
                    with contextlib.suppress(ConnectionError):
                        await writer.wait_closed()
                assert events.current
                engine.store(prompt(2))
                await holds(events, 1, 2)
                await until(lambda: descriptors() <= before)

    port, replay = free_ports(), free_ports()
    run(main())


def test_connections_that_say_nothing_are_few_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with listening(port) as events:
            writers = [(await asyncio.open_connection(LOCALHOST, port))[1] for _ in range(CONNECTIONS_MAX + 4)]
            await until(lambda: len(events._accepted) == CONNECTIONS_MAX)
            monkeypatch.setattr("transport.kv_events.GREETING_TIMEOUT_SECONDS", 0.05)
            for writer in writers:
                writer.close()
            await until(lambda: not events._accepted)
            reader, writer = await asyncio.open_connection(LOCALHOST, port)
            async with asyncio.timeout(2):
                with contextlib.suppress(ConnectionError):
                    while await reader.read(1000):
                        pass
            writer.close()
            await until(lambda: not events._accepted)
            monkeypatch.undo()
            with Publisher(port) as engine:
                await until(lambda: events._publisher is not None)
                engine.store(prompt(1))
                await holds(events, 1)

    port = free_ports()
    run(main())


def test_a_flood_is_followed_without_holding_the_loop() -> None:
    async def main() -> None:
        lags: list[float] = []

        async def tick() -> None:
            while True:
                began = time.perf_counter()
                await asyncio.sleep(0.001)
                lags.append(time.perf_counter() - began - 0.001)

        with Publisher(port, replay, buffer_steps=10_000) as engine:
            for number in range(BATCHES):
                engine.store(prompt(number, 64))
            await until(lambda: engine.next_sequence == BATCHES, 10)
            async with listening(port, replay) as events:
                ticking = asyncio.create_task(tick())
                await until(lambda: events.counts["stored"] >= BATCHES and events.current, 20)
                ticking.cancel()
                assert len(events.index) == BATCHES * 64
                assert events.backlog_bytes == 0
                # 57,600 blocks take half a second, and everybody had a turn after each millisecond or message.
                assert len(lags) > 30

    port, replay = free_ports(), free_ports()
    run(main())


def test_closing_at_any_moment_leaves_nothing() -> None:
    async def main() -> None:
        await asyncio.sleep(0)
        with Publisher(port, replay) as engine:
            for number in range(200):
                engine.store(prompt(number))
            await until(lambda: engine.next_sequence == 200)
            before = descriptors(), len(asyncio.all_tasks())
            for delay_seconds in (0, 0.001, 0.005, 0.02, 0.05, 0.1, 0.2):
                events = KvEvents(PrefixIndex(), port=port, replay=(LOCALHOST, replay))
                await asyncio.sleep(delay_seconds)
                began = time.perf_counter()
                await events.close()
                assert time.perf_counter() - began < AT_ONCE_SECONDS
                await until(lambda: (descriptors(), len(asyncio.all_tasks())) <= before)

    port, replay = free_ports(), free_ports()
    run(main())


def test_a_taken_port_is_said_at_once() -> None:
    async def main() -> None:
        async with listening(port):
            with pytest.raises(OSError, match="in use"):
                KvEvents(PrefixIndex(), port=port)

    port = free_ports()
    run(main())
