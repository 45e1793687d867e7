"""KV events as a real engine published them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq

from tests.engine.record import send
from tests.unit.engine.client import complete, prefilled

if TYPE_CHECKING:
    from tests.engine import ThreadedEngine
    from tests.unit.engine.conftest import Start


class Subscriber:
    def __init__(self) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.subscribe(b"")
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.term()

    def next(self, timeout_ms: int = 2000) -> tuple[int, list[dict[str, Any]]]:
        """Number and events of the next batch."""
        assert self.socket.poll(timeout_ms)
        _topic, number, payload = self.socket.recv_multipart()
        _stamp, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        return int.from_bytes(number, "big"), events


@pytest.fixture
def subscriber() -> Iterator[Subscriber]:
    subscriber = Subscriber()
    yield subscriber
    subscriber.close()


def engine_for(start: Start, subscriber: Subscriber, **options: Any) -> ThreadedEngine:
    engine = start(kv_events_endpoint=f"tcp://127.0.0.1:{subscriber.port}", block_size=32, **options)
    # PUB drops what it sends before the connection stands.
    for _ in range(100):
        engine.call(engine.engine.cores[0].pool.reset_prefix_cache)
        if subscriber.socket.poll(50):
            break
    while subscriber.socket.poll(100):
        subscriber.socket.recv_multipart()
    return engine


def test_hashes_and_shapes_are_those_of_the_real_engine(
    start: Start, subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    engine = engine_for(start, subscriber)
    ids = list(range(100, 170))
    complete(engine, ids, max_tokens=1)  # type: ignore[arg-type]
    # Recorded from vLLM 0.32 with blocks of 32 tokens.
    assert subscriber.next()[1] == [
        {
            "type": "BlockStored",
            "block_hashes": [702757842669265042, 12727516518541667169],
            "parent_block_hash": None,
            "token_ids": ids[:64],
            "block_size": 32,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None, None],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
    ]
    complete(engine, ids, max_tokens=1, cache_salt="abc")  # type: ignore[arg-type]
    (event,) = subscriber.next()[1]
    assert event["block_hashes"] == [865511473190270614, 14285577282896715762]
    assert event["extra_keys"] == [["abc"], None]
    complete(engine, ids, max_tokens=1)  # type: ignore[arg-type]
    assert not subscriber.socket.poll(100)


def test_generated_blocks_and_pulled_ones_are_told_too(start: Start, subscriber: Subscriber) -> None:
    engine = engine_for(start, subscriber)
    complete(engine, "word" * 70, max_tokens=30, ignore_eos=True)
    first = subscriber.next()[1][0]
    (second,) = subscriber.next()[1]
    assert second["parent_block_hash"] == first["block_hashes"][-1]
    assert second["token_ids"][:6] == list(array("I", b"word" * 6))
    complete(engine, "pull" * 70, max_tokens=1, kv_transfer_params=prefilled(start(block_size=32), "pull" * 70))
    assert len(subscriber.next()[1][0]["block_hashes"]) == 2


def test_evictions_and_resets_are_told(start: Start, subscriber: Subscriber) -> None:
    engine = engine_for(start, subscriber, num_blocks=4)
    complete(engine, "one " * 70, max_tokens=1)
    first = subscriber.next()[1][0]
    complete(engine, "two " * 100, max_tokens=1)
    events = subscriber.next()[1]
    assert [event["type"] for event in events] == ["BlockRemoved", "BlockRemoved", "BlockStored"]
    assert [event["block_hashes"][0] for event in events[:2]] == first["block_hashes"][::-1]
    engine.call(engine.engine.cores[0].pool.reset_prefix_cache)
    assert subscriber.next()[1] == [{"type": "AllBlocksCleared"}]


def test_lost_batches_are_replayed(start: Start, subscriber: Subscriber) -> None:
    replay_port = 21000 + subscriber.port % 5000
    engine = engine_for(start, subscriber, kv_events_replay_endpoint=f"tcp://127.0.0.1:{replay_port}")
    events = engine.engine.cores[0].events
    assert events is not None
    events.lose_batches = 2
    for number in range(3):
        complete(engine, f"{number}aaa" * 40, max_tokens=1)
    number, _ = subscriber.next()
    socket = subscriber.context.socket(zmq.DEALER)
    socket.connect(f"tcp://127.0.0.1:{replay_port}")
    socket.send_multipart([b"", (number - 2).to_bytes(8, "big")])
    replayed = []
    while (frames := socket.recv_multipart())[2] != (-1).to_bytes(8, "big", signed=True):
        replayed.append(int.from_bytes(frames[2], "big"))
    socket.close(linger=0)
    assert replayed == [number - 2, number - 1, number]
    assert frames == [b"", b"", (-1).to_bytes(8, "big", signed=True), b""]


def test_the_sources_are_shown(start: Start, subscriber: Subscriber) -> None:
    engine = start(kv_events_endpoint=f"tcp://127.0.0.1:{subscriber.port}", kv_events_topic="t")
    assert send(engine.url, "/kv_event_sources", method="GET").json == {
        "0": {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://127.0.0.1:{subscriber.port}",
            "replay_endpoint": None,
            "buffer_steps": 10000,
            "hwm": 100000,
            "max_queue_size": 100000,
            "topic": "t",
        }
    }
