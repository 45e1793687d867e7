"""Batches of KV-cache events: what one says, and which one counts next. Pure: bytes and numbers in, steps out.

The payload is vLLM 0.32's (distributed/kv_events.py). Must not know sockets or what is made of the events.
"""

import hashlib
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import msgspec

from transport.prefix_index import AllBlocksCleared, BlockRemoved, BlockStored

REPLAYS_IN_A_ROW_MAX: Final = 8


class EventsError(ValueError):
    """Not a batch of events that this version of the protocol has."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The events of one engine step, in order. `unknown`: events of types that are not known here."""

    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    unknown: int


_batch_decoder: Final = msgspec.msgpack.Decoder(list[msgspec.Raw])
_events_decoder: Final = msgspec.msgpack.Decoder(list[msgspec.Raw])
_event_decoder: Final = msgspec.msgpack.Decoder(BlockStored | BlockRemoved | AllBlocksCleared)
_all_decoder: Final = msgspec.msgpack.Decoder(list[BlockStored | BlockRemoved | AllBlocksCleared])
_tag_decoder: Final = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_KNOWN: Final = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})
_UNREADABLE: Final = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)


def decode_batch(payload: bytes) -> Batch:
    """The payload frame: msgpack array `[timestamp, [event, ...], data_parallel_rank?]`, events as tagged maps.

    Raises EventsError if a known type of event has not the known form, as in versions that send events as arrays.
    """
    try:
        parts = _batch_decoder.decode(payload)
        if len(parts) < 2:
            raise EventsError("a batch has a timestamp and events")
        try:
            return Batch(_all_decoder.decode(parts[1]), 0)
        except _UNREADABLE:
            return _one_by_one(_events_decoder.decode(parts[1]))
    except _UNREADABLE as error:
        raise EventsError(str(error)[:100]) from None


def _one_by_one(raws: list[msgspec.Raw]) -> Batch:
    events = []
    unknown = 0
    for raw in raws:
        tag = msgspec.msgpack.decode(_tag_decoder.decode(raw).get("type", b"\xc0"))
        if isinstance(tag, str) and tag in _KNOWN:
            events.append(_event_decoder.decode(raw))
        else:
            unknown += 1
    return Batch(events, unknown)


class Replay(NamedTuple):
    """Ask for all batches from this sequence number on."""

    start: int


class Apply(NamedTuple):
    """Follow the events of this payload."""

    payload: bytes


class Forget(NamedTuple):
    """All that was known is out of date."""

    why: Literal["gap", "restart", "no_replay", "replay_failed"]


Step = Replay | Apply | Forget


class Order:
    """What to do with what comes, so that events are followed in sequence, each once, and of one engine only. Pure.

    A connection is one process, so a restart shows as a new connection on which what was followed last can't be
    replayed as it was. `replays`: whether the engine has a replay endpoint.
    """

    def __init__(self, *, replays: bool) -> None:
        self.replays = replays
        self.last: int | None = None
        """Sequence number that was followed last, -1 before the first; None while nothing is known."""
        self.replaying = False
        self._digest = b""
        self._same = True
        """Whether the engine that is connected is certain to be the one that `last` is of."""
        self._behind = -1
        self._row = 0

    @property
    def current(self) -> bool:
        """Whether all is followed that is known to have been published."""
        return not self.replaying and self.last is not None

    def connected(self) -> list[Step]:
        """An engine has connected: the first one, the same again, or another."""
        self._same = self.last is None or self.last < 0
        self._behind = -1
        self._row = 0
        if self.replays:
            return self._replay()
        known, self.last = self.last, None
        return [Forget("no_replay")] if known is not None else []

    def live(self, sequence: int, payload: bytes) -> list[Step]:
        """A batch as it is published."""
        if self.replaying:
            self._behind = max(self._behind, sequence)
            return []
        if self.last is None or sequence == self.last + 1:
            return self._follow(sequence, payload)
        if sequence <= self.last:
            return []
        if self.replays:
            self._behind = sequence
            self._row = 0
            return self._replay()
        return [Forget("gap"), *self._follow(sequence, payload)]

    def replayed(self, sequence: int, payload: bytes) -> list[Step]:
        """A batch that comes again."""
        if not self.replaying:
            return []
        if not self._same and self.last is not None:
            if sequence < self.last:
                return []
            if sequence > self.last or _digest(payload) != self._digest:
                return self._another_engine()
            self._same = True
        if self.last is None or sequence == self.last + 1:
            return self._follow(sequence, payload)
        if sequence <= self.last:
            return []
        # What lies between is no longer in the engine's buffer.
        return [Forget("gap"), *self._follow(sequence, payload)]

    def replay_ended(self) -> list[Step]:
        """The engine has sent all that it has."""
        if not self.replaying:
            return []
        self.replaying = False
        if not self._same:
            return self._another_engine()  # it does not have what was followed last
        if self.last is None:
            self.last = -1  # it has published nothing yet: that is known
        return self._replay() if self._behind > self.last else []

    def replay_failed(self) -> list[Step]:
        """No answer. What comes next is followed, what was before is not known."""
        self.replaying = False
        self._same = True
        self.last = None
        return [Forget("replay_failed")]

    def _follow(self, sequence: int, payload: bytes) -> list[Step]:
        self.last, self._digest = sequence, _digest(payload)
        return [Apply(payload)]

    def _replay(self) -> list[Step]:
        self._row += 1
        if self._row > REPLAYS_IN_A_ROW_MAX:
            return self.replay_failed()
        self.replaying = True
        # Beginning with what was followed last: if it comes as it was, this is the same engine.
        return [Replay(max(self.last or 0, 0))]

    def _another_engine(self) -> list[Step]:
        self.last = None
        self._same = True
        return [Forget("restart"), *self._replay()]


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=8).digest()
