"""Events in order: decoded one by one, followed in sequence, and never those of two engines mixed."""

import contextlib
from collections import deque
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transport.batches import REPLAYS_IN_A_ROW_MAX, Apply, EventsError, Forget, Order, Replay, decode_batch
from transport.prefix_index import AllBlocksCleared, BlockRemoved, BlockStored

pack = msgspec.msgpack.encode

STORED: dict[str, Any] = {
    "type": "BlockStored",
    "block_hashes": [2**64 - 1],
    "parent_block_hash": None,
    "token_ids": [1, 2],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
    "session_id": "s",
}


def batch(*events: Any) -> bytes:
    return pack([1.5, list(events), 0])


# Decoding


def test_a_batch_of_this_version() -> None:
    removed = {"type": "BlockRemoved", "block_hashes": [b"x" * 32, 7], "medium": "GPU"}
    found = decode_batch(batch(STORED, removed, {"type": "AllBlocksCleared"}))
    assert [type(event) for event in found.events] == [BlockStored, BlockRemoved, AllBlocksCleared]
    assert found.unknown == 0
    stored = found.events[0]
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == [2**64 - 1]
    assert decode_batch(pack([1.5, []])).events == []


def test_types_of_other_versions_are_counted_and_the_rest_is_read() -> None:
    found = decode_batch(batch({"type": "BlockMoved", "x": 1}, STORED, {"no": "type"}))
    assert len(found.events) == 1
    assert found.unknown == 2


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        pack({}),
        pack([1.5]),
        pack([1.5, {}]),
        batch(["BlockStored", [1], None, [1, 2], 2, None]),  # as older versions sent events
        batch({"type": "BlockStored", "block_hashes": ["text"]}),
        batch({"type": ["BlockStored"]}),
        batch({"type": "BlockRemoved"}),
        b"\x91" * 5000,
    ],
)
def test_what_cannot_be_read_is_said_to_be_so(payload: bytes) -> None:
    try:
        found = decode_batch(payload)
    except EventsError:
        return
    assert found.events == []
    assert found.unknown == 1


@given(st.binary(max_size=200))
def test_garbage_raises_nothing_else(payload: bytes) -> None:
    with contextlib.suppress(EventsError):
        decode_batch(payload)


# Order: each line is what comes and what has to be done


def test_in_sequence() -> None:
    order = Order(replays=True)
    assert not order.current
    assert order.connected() == [Replay(0)]
    assert order.replay_ended() == []
    assert order.current  # an engine that has published nothing holds nothing
    assert order.live(0, b"a") == [Apply(b"a")]
    assert order.live(1, b"b") == [Apply(b"b")]
    assert order.current


def test_a_duplicate_is_ignored() -> None:
    order = Order(replays=False)
    assert order.live(5, b"a") == [Apply(b"a")]
    assert order.live(5, b"a") == []
    assert order.live(3, b"x") == []
    assert order.live(6, b"b") == [Apply(b"b")]


def test_a_late_start_gets_everything_from_the_beginning() -> None:
    order = Order(replays=True)
    order.connected()
    assert order.replayed(0, b"a") == [Apply(b"a")]
    assert order.live(2, b"c") == []  # it will come again
    assert order.replayed(1, b"b") == [Apply(b"b")]
    assert not order.current
    assert order.replay_ended() == [Replay(1)]
    assert order.replayed(1, b"b") == []
    assert order.replayed(2, b"c") == [Apply(b"c")]
    assert order.replay_ended() == []
    assert order.current


def test_a_gap_is_replayed() -> None:
    order = Order(replays=True)
    order.live(0, b"a")
    assert order.live(3, b"d") == [Replay(0)]
    assert not order.current
    assert order.replayed(0, b"a") == []
    assert order.replayed(1, b"b") == [Apply(b"b")]
    assert order.replayed(2, b"c") == [Apply(b"c")]
    assert order.replayed(3, b"d") == [Apply(b"d")]
    assert order.replay_ended() == []
    assert order.live(4, b"e") == [Apply(b"e")]


def test_a_gap_longer_than_the_engines_buffer_forgets() -> None:
    order = Order(replays=True)
    order.live(0, b"a")
    order.live(9, b"j")
    assert order.replayed(8, b"i") == [Forget("gap"), Apply(b"i")]
    assert order.replayed(9, b"j") == [Apply(b"j")]
    assert order.replay_ended() == []
    assert order.current


def test_a_gap_without_replay_forgets() -> None:
    order = Order(replays=False)
    order.live(0, b"a")
    assert order.live(2, b"c") == [Forget("gap"), Apply(b"c")]


def test_the_same_engine_connects_again() -> None:
    order = Order(replays=True)
    order.live(0, b"a")
    order.live(1, b"b")
    assert order.connected() == [Replay(1)]
    assert order.replayed(1, b"b") == []
    assert order.replayed(2, b"c") == [Apply(b"c")]
    assert order.replay_ended() == []
    assert order.current


@pytest.mark.parametrize(
    "replayed",
    [
        [],  # it has published fewer batches than the old one
        [(2, b"other")],  # it has published as many
        [(3, b"other")],  # and more than fit its buffer
    ],
)
def test_another_engine_begins_anew(replayed: list[tuple[int, bytes]]) -> None:
    order = Order(replays=True)
    for sequence, payload in enumerate((b"a", b"b", b"c")):
        order.live(sequence, payload)
    assert order.connected() == [Replay(2)]
    for sequence, payload in replayed[:-1]:
        assert order.replayed(sequence, payload) == []
    steps = order.replayed(*replayed[-1]) if replayed else order.replay_ended()
    assert steps == [Forget("restart"), Replay(0)]
    assert order.replayed(0, b"A") == [Apply(b"A")]
    assert order.replay_ended() == []
    assert order.current


def test_a_new_connection_without_replay_forgets() -> None:
    order = Order(replays=False)
    assert order.connected() == []
    order.live(0, b"a")
    assert order.connected() == [Forget("no_replay")]
    assert not order.current
    assert order.live(7, b"x") == [Apply(b"x")]


def test_a_dead_replay_endpoint_means_unknown_and_not_an_end() -> None:
    order = Order(replays=True)
    order.live(0, b"a")
    order.live(2, b"c")
    assert order.replay_failed() == [Forget("replay_failed")]
    assert not order.current
    assert order.live(3, b"d") == [Apply(b"d")]
    assert order.current


def test_replays_in_a_row_are_bounded() -> None:
    order = Order(replays=True)
    order.live(0, b"a")
    steps: list[Any] = order.live(2, b"")
    for _ in range(REPLAYS_IN_A_ROW_MAX - 1):
        assert steps == [Replay(0)]
        order.live(2, b"")
        steps = order.replay_ended()
    order.live(2, b"")
    assert order.replay_ended() == [Forget("replay_failed")]


# The same against a model of engine and network


class World:
    """An engine that publishes, restarts, and forgets old batches; a network that loses; a subscriber."""

    def __init__(self, *, replays: bool, buffer_steps: int) -> None:
        self.order = Order(replays=replays)
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self.process = 0
        self.newest = -1
        self.asked: Replay | None = None
        self.followed: list[tuple[int, int]] = []  # (process, sequence) since the last Forget
        self.do(self.order.connected())

    def do(self, steps: list[Any]) -> None:
        for step in steps:
            match step:
                case Apply(payload):
                    process, sequence = msgspec.msgpack.decode(payload)
                    self.followed.append((process, sequence))
                case Forget():
                    self.followed.clear()
                case Replay():
                    self.asked = step
        processes = {process for process, _ in self.followed}
        sequences = [sequence for _, sequence in self.followed]
        assert len(processes) <= 1
        assert sequences == list(range(sequences[0], sequences[0] + len(sequences))) if sequences else True

    def publish(self, *, lost: bool) -> None:
        self.newest += 1
        payload = pack((self.process, self.newest))
        self.buffer.append((self.newest, payload))
        if not lost:
            self.do(self.order.live(self.newest, payload))

    def connect(self) -> None:
        self.do(self.order.connected())

    def restart(self) -> None:
        self.process += 1
        self.newest = -1
        self.buffer.clear()
        self.connect()

    def repeat(self) -> None:
        if self.newest >= 0:
            self.do(self.order.live(self.newest, pack((self.process, self.newest))))

    def serve(self, publish_meanwhile: int, *, fail: bool) -> None:
        """Answer the replay that was asked for last; an unanswered older one is hung up on."""
        if self.asked is None:
            return
        asked, self.asked = self.asked, None
        items = [item for item in self.buffer if item[0] >= asked.start]
        for number, (sequence, payload) in enumerate(items):
            if number < publish_meanwhile:
                self.publish(lost=False)
            if fail and number == len(items) // 2:
                self.do(self.order.replay_failed())
                return
            self.do(self.order.replayed(sequence, payload))
            if self.asked is not None:
                return
        self.do(self.order.replay_failed() if fail else self.order.replay_ended())


events = st.one_of(
    st.tuples(st.just("publish"), st.booleans()),
    st.tuples(st.just("publish"), st.just(False)),
    st.tuples(st.sampled_from(["connect", "restart", "repeat"]), st.just(False)),
    st.tuples(st.just("serve"), st.booleans()),
    st.tuples(st.just("serve"), st.just(False)),
)


@settings(max_examples=400)
@given(st.booleans(), st.integers(1, 8), st.lists(events, max_size=60), st.integers(0, 3))
def test_no_history_mixes_engines_or_leaves_holes(
    replays: bool, buffer_steps: int, history: list[tuple[str, bool]], meanwhile: int
) -> None:
    world = World(replays=replays, buffer_steps=buffer_steps)
    for what, flag in history:
        match what:
            case "publish":
                world.publish(lost=flag)
            case "serve":
                world.serve(meanwhile, fail=flag)
            case "connect":
                world.connect()
            case "restart":
                world.restart()
            case _:
                world.repeat()
    # Then it is quiet, save for one more batch that arrives, and the replays are answered.
    world.publish(lost=False)
    for _ in range(REPLAYS_IN_A_ROW_MAX * 2):
        world.serve(0, fail=False)
    assert world.asked is None
    if world.order.current:
        assert world.followed[-1] == (world.process, world.newest)
