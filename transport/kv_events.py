"""The local engine's KV-cache events: received, replayed where some are missing, given to an index in order.

One `KvEvents` for each data-parallel rank. The engine connects to us (its `endpoint` is a plain loopback address,
so it does not bind; vLLM 0.32 distributed/kv_events.py), and only what it says in sequence counts: as long as
something is missing, nothing is known (`batches.py`). Must not know HTTP or decisions.
"""

import asyncio
import logging
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Final

from transport import zmtp
from transport.batches import Apply, EventsError, Forget, Order, Step, decode_batch
from transport.link import Link, Unanswered, dial
from transport.prefix_index import AllBlocksCleared, BlockRemoved, BlockStored, PrefixIndex

logger = logging.getLogger(__name__)

PORT: Final = 5557  # of rank 0; rank r has this plus r (config/kv_events.py)
BATCH_BYTES_MAX: Final = 32 * 2**20  # a step that fills a whole cache of a million tokens has 5 MB
CONNECTIONS_MAX: Final = 8  # one engine, and whatever else comes to the port
GREETING_TIMEOUT_SECONDS: Final = 5.0
REPLAY_CONNECT_SECONDS: Final = 1.0
REPLAY_SILENCE_SECONDS: Final = 5.0  # the engine looks for requests every 0.1 s, between two batches
BACKLOG_BYTES_MAX: Final = 4 * 2**20  # beyond this we stop reading, and the engine's own queue fills
SLICE_SECONDS: Final = 0.001  # of work on events in one turn of the loop
_SEQUENCE_BYTES: Final = 8
_END: Final = (-1).to_bytes(8, "big", signed=True)
_SUBSCRIBE: Final = b"\x01"


class KvEvents:
    """Listens for one rank's events and keeps one index. Made on the running loop; `close` ends it.

    `replay`: host and port of the engine's `replay_endpoint`, None if it has none. `on_events(kind, count)`: what
    came, by kind, for a metric (`Counter` labels as in `counts`).
    """

    def __init__(
        self,
        index: PrefixIndex,
        *,
        port: int = PORT,
        replay: tuple[str, int] | None = None,
        on_events: Callable[[str, int], None] = lambda _kind, _count: None,
    ) -> None:
        self.index = index
        self.port = port
        self.counts: Counter[str] = Counter()
        """`stored`, `removed`, `cleared`, `unknown`: events. `malformed`: messages. `gap`, `restart`, `no_replay`,
        `replay_failed`: how often all was forgotten, and why. `replay`: how often one was asked for."""
        self.backlog_bytes = 0
        self._order = Order(replays=replay is not None)
        self._replay = replay
        self._on_events = on_events
        self._loop = asyncio.get_running_loop()
        self._backlog: deque[tuple[Link, Callable[[], list[Step]], int]] = deque()
        self._draining: asyncio.Handle | None = None
        self._publisher: Subscriber | None = None
        self._accepted: set[Subscriber] = set()
        self._closed = False
        self._dealer: Dealer | None = None
        self._dialling: asyncio.Task[None] | None = None
        self._said_malformed = False
        sock = socket.create_server(("127.0.0.1", port), backlog=8)  # OSError if the port is taken
        sock.setblocking(False)
        self._server_task = asyncio.create_task(
            self._loop.create_server(lambda: Subscriber(self), sock=sock), name="KV events"
        )
        self._sock = sock

    @property
    def current(self) -> bool:
        """Whether the index is what the engine holds now, as far as it has said."""
        return self._order.current and self._publisher is not None and not self._backlog

    def cached_tokens(
        self, token_ids: Sequence[int], *, lora_name: str | None = None, cache_salt: str | None = None
    ) -> int | None:
        """`PrefixIndex.cached_tokens`, or None while the engine is not heard or something is missing.

        What has arrived is followed first (for at most `SLICE_SECONDS`): events come at the end of an engine's
        step, as the next request does, and often in the same turn of the loop.
        """
        self._follow_arrived()
        if not self.current:
            return None
        return self.index.cached_tokens(token_ids, lora_name=lora_name, cache_salt=cache_salt)

    def first_held(self, blocks: Sequence[int]) -> int:
        """Which of these blocks of a `chain` is the first that the engine holds, by its place among them; -1 for
        none, and while the engine is not heard or something is missing."""
        self._follow_arrived()
        if self.current:
            for place, block in enumerate(blocks):
                if self.index.holds(block):
                    return place
        return -1

    def _follow_arrived(self) -> None:
        if self._draining is not None:
            self._draining.cancel()
            self._drain()

    async def close(self) -> None:
        """End all of it. Nothing waits for the network."""
        self._closed = True
        self._server_task.cancel()
        self._hang_up()
        if self._draining is not None:
            self._draining.cancel()
        found = await asyncio.gather(self._server_task, return_exceptions=True)
        if not isinstance(found[0], BaseException):
            found[0].close()
        self._sock.close()
        self._backlog.clear()
        for link in list(self._accepted):
            link.abort()
        if self._dialling is not None:
            await asyncio.gather(self._dialling, return_exceptions=True)

    # What the links tell

    def accepted(self, link: "Subscriber") -> bool:
        """Whether there is room for one more who may become the engine."""
        if self._closed or len(self._accepted) >= CONNECTIONS_MAX:
            return False
        self._accepted.add(link)
        return True

    def engine_connected(self, link: "Subscriber") -> None:
        """The newest connection counts: an engine that starts again does not wait for its old one to be missed."""
        old, self._publisher = self._publisher, link
        if old is not None:
            logger.warning(
                "KV events: a second engine has connected to port %s; the first is not heard any more", self.port
            )
            old.abort()
        self.queue(link, self._order.connected, 0)

    def gone(self, link: "Subscriber") -> None:
        self._accepted.discard(link)
        if self._publisher is link:
            self._publisher = None

    def batch(self, link: "Subscriber", message: tuple[bytes, ...]) -> None:
        """A live message: topic, sequence number, payload."""
        if len(message) != 3 or len(message[1]) != _SEQUENCE_BYTES:
            self._malformed("a message that is no batch of events")
            return
        sequence, payload = int.from_bytes(message[1], "big"), message[2]
        self.queue(link, lambda: self._order.live(sequence, payload), len(payload))

    def replayed(self, link: "Dealer", sequence: int, payload: bytes) -> None:
        self.queue(link, lambda: self._order.replayed(sequence, payload), len(payload))

    def replay_ended(self, link: "Dealer") -> None:
        self.queue(link, self._order.replay_ended, 0)

    def replay_failed(self, link: "Dealer", reason: str) -> None:
        """What has come of it and is not followed yet does not count any more."""
        if link is self._dealer:
            self._dealer = None
            logger.warning("KV events: no replay (%s); what the engine held before is taken as unknown", reason)
            self._take(self._order.replay_failed())

    # What is done about it, a little in each turn of the loop

    def queue(self, link: Link, decide: Callable[[], list[Step]], size_bytes: int) -> None:
        self._backlog.append((link, decide, size_bytes))
        self.backlog_bytes += size_bytes
        if self.backlog_bytes > BACKLOG_BYTES_MAX:
            self._set_reading(on=False)
        if self._draining is None:
            self._draining = self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._draining = None
        deadline = time.monotonic() + SLICE_SECONDS  # the loop's own clock stands still within a turn
        while self._backlog:
            link, decide, size_bytes = self._backlog.popleft()
            self.backlog_bytes -= size_bytes
            if link in (self._publisher, self._dealer):  # the others are history
                self._take(decide())
            if self._backlog and time.monotonic() >= deadline:
                self._draining = self._loop.call_soon(self._drain)
                break
        if self.backlog_bytes <= BACKLOG_BYTES_MAX // 2:
            self._set_reading(on=True)

    def _set_reading(self, *, on: bool) -> None:
        for link in (self._publisher, self._dealer):
            if link is not None:
                link.set_reading(on=on)

    def _take(self, steps: list[Step]) -> None:
        for step in steps:
            if isinstance(step, Apply):
                self._apply(step.payload)
            elif isinstance(step, Forget):
                self._count(step.why, 1)
                self.index.clear()
            else:
                self._count("replay", 1)
                self._hang_up()
                self._dialling = asyncio.create_task(self._dial(step.start), name="KV events replay")

    def _apply(self, payload: bytes) -> None:
        try:
            batch = decode_batch(payload)
        except EventsError as error:
            self._malformed(str(error))
            self.index.clear()  # whatever it said, we have not heard it
            return
        for event in batch.events:
            self._count(_KINDS[type(event)], 1)
            self.index.apply(event)
        if batch.unknown:
            self._count("unknown", batch.unknown)
            self.index.clear()

    async def _dial(self, start: int) -> None:
        assert self._replay is not None
        dealer = self._dealer = Dealer(self, start)
        try:
            await dial(dealer, *self._replay, REPLAY_CONNECT_SECONDS)
        except Unanswered as error:
            self.replay_failed(dealer, str(error))

    def _hang_up(self) -> None:
        """End the replay that is under way. What it has sent and is not yet followed does not count any more."""
        if self._dialling is not None:
            self._dialling.cancel()
        if self._dealer is not None:
            self._dealer.cancel()
            self._dealer = None

    def _malformed(self, what: str) -> None:
        self._count("malformed", 1)
        if not self._said_malformed:
            self._said_malformed = True
            logger.warning("KV events: %s; another vLLM version than 0.32? Said once", what)

    def _count(self, kind: str, count: int) -> None:
        self.counts[kind] += count
        self._on_events(kind, count)


_KINDS: Final = {BlockStored: "stored", BlockRemoved: "removed", AllBlocksCleared: "cleared"}


class _Paused(Link):
    _reading = True

    def set_reading(self, *, on: bool) -> None:
        if on is self._reading or self.transport is None or self.over:
            return
        self._reading = on
        if on:
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()


class Subscriber(_Paused):
    """An engine's PUB socket that has connected to us."""

    socket_type = zmtp.SUB
    peers = frozenset({zmtp.PUB, b"XPUB"})

    def __init__(self, events: KvEvents) -> None:
        super().__init__(frame_bytes_max=BATCH_BYTES_MAX, parts_max=3, message_bytes_max=BATCH_BYTES_MAX)
        self._events = events
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._events.accepted(self):
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(GREETING_TIMEOUT_SECONDS, self.abort)
        else:
            self.abort()
        super().connection_made(transport)

    def ready(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.send(_SUBSCRIBE)
        self._events.engine_connected(self)

    def received(self, message: tuple[bytes, ...]) -> None:
        self._events.batch(self, message)

    def ended(self, end: Unanswered) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._events.gone(self)


class Dealer(_Paused):
    """One replay: a request, then batches, then the mark of the end (kv_events.py `_service_replay`)."""

    socket_type = zmtp.DEALER
    peers = frozenset({zmtp.ROUTER})

    def __init__(self, events: KvEvents, start: int) -> None:
        super().__init__(frame_bytes_max=BATCH_BYTES_MAX, parts_max=4, message_bytes_max=BATCH_BYTES_MAX)
        self._events = events
        self._start = start
        self._done = False
        self._timer: asyncio.TimerHandle | None = None

    def cancel(self) -> None:
        """Nobody wants the rest."""
        self._done = True
        self.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wait()
        super().connection_made(transport)

    def ready(self) -> None:
        self.send(b"", self._start.to_bytes(_SEQUENCE_BYTES, "big"))

    def received(self, message: tuple[bytes, ...]) -> None:
        if len(message) != 4 or len(message[2]) != _SEQUENCE_BYTES:
            self.fail("garbage", "an answer that is no replay")
            return
        if message[2] == _END:
            self._done = True
            self._events.replay_ended(self)
            self.abort()
            return
        self._events.replayed(self, int.from_bytes(message[2], "big"), message[3])
        self._wait()

    def ended(self, end: Unanswered) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._done:
            self._done = True
            self._events.replay_failed(self, str(end))

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(
            REPLAY_SILENCE_SECONDS, self.fail, "silent", "the replay endpoint did not answer within the time"
        )
