"""Knows of every prefill endpoint's side channel, and of the local engine's, which engine is behind it right now.

One task and one held connection for each endpoint: an engine that dies is noticed when the connection ends, one
that freezes at the next question. Must not know HTTP, requests or what is done about a state.
"""

import asyncio
import contextlib
import hashlib
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from transport import handshake
from transport.compatibility import Incompatible, check
from transport.handshake import FIRST, ONE, Description, HandshakeError, Rank, Ranks
from transport.link import Kind, Unanswered
from transport.req import Req

logger = logging.getLogger(__name__)

FETCH_TIMEOUT_SECONDS: Final = 1.0  # a healthy listener answers in about 1 ms
LIVE_TIMEOUT_SECONDS: Final = 0.2  # a relayed handshake or a probe: a user's request waits for it
SILENCE_SECONDS: Final = 1.0  # until the watching task has found out for itself
REFRESH_SECONDS: Final = 5.0
BACKOFF_FIRST_SECONDS: Final = 0.1
BACKOFF_MAX_SECONDS: Final = 10.0
FETCHES_AT_ONCE_MAX: Final = 64
ENDPOINTS_MAX: Final = 2048  # discovered and header-brought endpoints, and ranks behind some of them
# Payloads kept for the time that a side channel is away. Beyond this only what they say is kept, not their bytes.
REMEMBERED_BYTES_MAX: Final = 32 * 2**20


class Endpoint(NamedTuple):
    """The side channel of one engine, that is of one data-parallel rank: `port` is
    VLLM_NIXL_SIDE_CHANNEL_PORT + data-parallel rank (nixl/base_scheduler.py)."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Known:
    """An engine answers there and nothing speaks against it."""

    description: Description
    """What its first rank says."""


@dataclass(frozen=True, slots=True)
class Away:
    """Nothing usable answers there. `kind` is a bounded label, `detail` one clause, `change` what to look at."""

    kind: Kind | str
    detail: str
    change: str


State = Known | Away | Incompatible

NOT_ASKED: Final = Away("unknown", "it was not asked yet", "wait")
_CHANGES: Final = {
    "name": "check the host name",
    "refused": "check that VLLM_NIXL_SIDE_CHANNEL_HOST on the prefill engine is its pod address (the default is "
    "localhost) and that the port is VLLM_NIXL_SIDE_CHANNEL_PORT + data-parallel rank; an engine whose listener "
    "has died stays healthy over HTTP and has to be restarted",
    "unreachable": "check network policies and routes to the side-channel port",
    "closed": "wait for the prefill engine to come back",
    "silent": "check whether the prefill engine is frozen or a network policy drops its side-channel port",
    "garbage": "check that this is the side-channel port and no other service",
}


def away(error: Unanswered | HandshakeError) -> Away:
    return Away(error.kind, str(error), _CHANGES.get(error.kind, _CHANGES["garbage"]))


@dataclass(frozen=True, slots=True)
class Fetched:
    """One rank's reply. `payload` is empty where there was no room to keep it."""

    payload: bytes
    description: Description
    digest: bytes
    clock_seconds: float
    """The engine's `perf_counter` in the middle of the exchange, which was at `at_seconds` of ours."""
    at_seconds: float

    def frames(self, now_seconds: float) -> tuple[bytes, bytes]:
        """The reply as the engine would give it now: the clock frame is moved on."""
        return self.payload, handshake.encode_clock(self.clock_seconds + now_seconds - self.at_seconds)


class Changed(Exception):
    """Another engine than the one asked for answers at this endpoint."""


@dataclass(slots=True)
class Engine:
    """One start of one engine: its first rank's payload is constant from start to end and unlike any other's."""

    digest: bytes
    ranks: Ranks | None = None
    """None until a handoff has told: only rank (0, 0) is asked for until then."""
    fetched: dict[Rank, Fetched] = field(default_factory=dict)

    @property
    def description(self) -> Description:
        return self.fetched[FIRST].description

    def descriptions(self) -> list[Description]:
        """The first rank's first: it is what an engine is known by, so it was fetched before all others."""
        return [fetched.description for fetched in self.fetched.values()]


async def ask(req: Req, rank: Rank, timeout_seconds: float) -> tuple[tuple[bytes, bytes], Fetched]:
    """One question on a connection: the reply's two frames as they came, and what they say.

    Raises Unanswered or HandshakeError. Asking for a rank that the engine does not have ends its listener for good
    (nixl/base_scheduler.py): the caller knows that it has it.
    """
    sent = time.perf_counter()
    reply = await req.ask(handshake.encode_request(rank), timeout_seconds=timeout_seconds)
    at = (sent + time.perf_counter()) / 2
    payload, clock = handshake.split_reply(reply)
    digest = hashlib.blake2b(payload, digest_size=16).digest()
    return (payload, clock), Fetched(
        payload, handshake.describe(payload), digest, handshake.decode_clock(clock), at
    )


class Channel:
    """What is known of one endpoint. Written by the prober, read by the relay and the facade."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.engine: Engine | None = None
        """The engine that answered last. Kept while its side channel is away, replaced by the next one."""
        self.state: State = NOT_ASKED
        self.task: asyncio.Task[None] | None = None
        self.wake = asyncio.Event()
        self.probe: asyncio.Task[Fetched | None] | None = None
        self.unasked = ""
        """Why this process could not ask it the last time; "" if it could, whatever came of it."""
        self._silent_until = 0.0

    def heard(self) -> None:
        """It answers."""
        self._silent_until = 0.0
        self.unasked = ""

    def covers(self, rank: Rank) -> bool:
        """Whether this rank may be asked for: (0, 0) always, others once the size is known."""
        if rank == FIRST:
            return True
        return self.engine is not None and self.engine.ranks is not None and self.engine.ranks.covers(rank)

    def remembered(self, rank: Rank, now_seconds: float) -> tuple[bytes, bytes] | None:
        """What this engine answered earlier, its clock moved on."""
        fetched = self.engine.fetched.get(rank) if self.engine is not None else None
        return fetched.frames(now_seconds) if fetched is not None and fetched.payload else None

    async def live(self, rank: Rank, timeout_seconds: float) -> tuple[bytes, bytes]:
        """A rank's reply over a fresh connection, as it came. Raises Unanswered, HandshakeError or Changed.

        A rank beyond the first is asked for on the connection on which the first has just shown that the engine is
        still the one whose size is known. Silence is remembered for a moment: the decode engine has one thread for
        all handshakes, and all that ask for a frozen engine would wait one after the other.
        """
        if time.monotonic() < self._silent_until:
            raise Unanswered("silent", "it did not answer a moment ago")
        try:
            return await self._live(rank, timeout_seconds)
        except Unanswered as error:
            if error.kind == "silent":
                self._silent_until = time.monotonic() + SILENCE_SECONDS
            self.wake.set()
            if error.kind == "unasked" and not isinstance(self.state, Known):  # nothing vouches for it
                raise Unanswered("silent", str(error)) from None
            raise

    async def _live(self, rank: Rank, timeout_seconds: float) -> tuple[bytes, bytes]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        req = await Req.connect(
            *self.endpoint, frame_bytes_max=handshake.PAYLOAD_BYTES_MAX, timeout_seconds=timeout_seconds
        )
        try:
            frames, first = await ask(req, FIRST, deadline - loop.time())
            if self.engine is None or first.digest != self.engine.digest:
                self.wake.set()
                if rank != FIRST:
                    raise Changed
            if rank != FIRST:
                frames, _ = await ask(req, rank, deadline - loop.time())
            return frames
        finally:
            req.abort()


class Prober:
    """Keeps `Channel.state` true. `on_state(endpoint, state)` is called at every change, on the loop."""

    def __init__(
        self,
        *,
        on_state: Callable[[Endpoint, State], None] = lambda _endpoint, _state: None,
        refresh_seconds: float = REFRESH_SECONDS,
    ) -> None:
        self.channels: dict[Endpoint, Channel] = {}
        self.local: Channel | None = None
        self.remembered_bytes = 0
        self._judged_by: Description | None = None
        """The local engine's when all others were last judged by it: it tells the same every few seconds."""
        self._on_state = on_state
        self._refresh_seconds = refresh_seconds
        self._slots = asyncio.Semaphore(FETCHES_AT_ONCE_MAX)

    def set_local(self, endpoint: Endpoint) -> None:
        """The local engine's side channel, once."""
        assert self.local is None
        self.local = Channel(endpoint)
        self._start(self.local)

    def add(self, endpoint: Endpoint) -> Channel | None:
        """Begin to watch; the same Channel if it is watched already, None beyond ENDPOINTS_MAX."""
        channel = self.channels.get(endpoint)
        if channel is None and len(self.channels) < ENDPOINTS_MAX:
            channel = self.channels[endpoint] = Channel(endpoint)
            self._start(channel)
        return channel

    def remove(self, endpoint: Endpoint) -> None:
        """Stop watching and forget; nothing happens if it is not watched."""
        channel = self.channels.pop(endpoint, None)
        if channel is not None:
            self._stop(channel)
            self._forget(channel)

    def learn(self, channel: Channel, ranks: Ranks) -> None:
        """Sizes that a handoff of the engine now known there has named. The other ranks are fetched soon.

        The first word on it holds for as long as that engine lives: sizes do not change, and one that is too large
        ends the engine's listener.
        """
        if channel.engine is not None and channel.engine.ranks is None:
            channel.engine.ranks = ranks
            channel.wake.set()

    async def refresh(self, channel: Channel, timeout_seconds: float) -> State:
        """Ask now, out of turn, on a fresh connection; questions at the same time share one answer."""
        if channel.probe is None or channel.probe.done():
            channel.probe = asyncio.create_task(self._probe(channel, timeout_seconds))
        await asyncio.wait([channel.probe])
        return channel.state

    async def alive(self, channel: Channel, timeout_seconds: float, engine_id: str | None = None) -> bool:
        """Whether an engine (this one, if named) answers now."""
        await self.refresh(channel, timeout_seconds)
        probe = channel.probe
        if probe is None or not probe.done() or probe.cancelled() or probe.exception() is not None:
            return False
        found = probe.result()
        return found is not None and engine_id in (None, found.description.engine_id)

    async def close(self) -> None:
        """End every task and connection; takes no longer than a loop turn."""
        channels = [*self.channels.values(), *([self.local] if self.local else [])]
        tasks = [task for channel in channels for task in (channel.task, channel.probe) if task is not None]
        for channel in channels:
            self._stop(channel)
        self.channels.clear()
        await asyncio.gather(*tasks, return_exceptions=True)

    # One endpoint's life

    def _start(self, channel: Channel) -> None:
        channel.task = asyncio.create_task(self._watch(channel), name=f"side channel {channel.endpoint}")

    def _stop(self, channel: Channel) -> None:
        for task in (channel.task, channel.probe):
            if task is not None:
                task.cancel()

    async def _watch(self, channel: Channel) -> None:
        backoff_seconds = BACKOFF_FIRST_SECONDS
        while True:
            try:
                await self._attend(channel)
            except (Unanswered, HandshakeError) as error:
                if isinstance(channel.state, Known | Incompatible):
                    backoff_seconds = BACKOFF_FIRST_SECONDS
                self._failed(channel, error)
            except Exception:  # whatever it was, this endpoint alone is out of use and is tried again
                logger.exception("side channel %s: unexpected error", channel.endpoint)
                self._set(channel, Away("error", "an unexpected error, see the log", "report it"))
            channel.wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff_seconds * random.uniform(0.5, 1.0)):  # noqa: S311
                    await channel.wake.wait()
            backoff_seconds = min(backoff_seconds * 2, BACKOFF_MAX_SECONDS)

    async def _attend(self, channel: Channel) -> None:
        """Connect and stay connected, asking at every interval and whenever woken. Ends only by raising."""
        async with self._slots:
            req = await Req.connect(
                *channel.endpoint,
                frame_bytes_max=handshake.PAYLOAD_BYTES_MAX,
                timeout_seconds=FETCH_TIMEOUT_SECONDS,
            )
        try:
            req.on_end = channel.wake.set
            while True:
                channel.wake.clear()
                if req.end is not None:
                    raise req.end
                async with self._slots:
                    await self._fetch(channel, req)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._refresh_seconds * random.uniform(0.8, 1.2)):  # noqa: S311
                        await channel.wake.wait()
        finally:
            req.on_end = None
            req.abort()

    async def _fetch(self, channel: Channel, req: Req) -> None:
        """Every known rank of the engine on this connection, then the verdict."""
        _, first = await ask(req, FIRST, FETCH_TIMEOUT_SECONDS)
        engine = self._seen(channel, first)
        for rank in (engine.ranks or ONE).all():
            if rank not in engine.fetched:
                _, fetched = await ask(req, rank, FETCH_TIMEOUT_SECONDS)
                self._remember(engine, rank, fetched)
        self._judge(channel)

    async def _probe(self, channel: Channel, timeout_seconds: float) -> Fetched | None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        try:
            req = await Req.connect(
                *channel.endpoint,
                frame_bytes_max=handshake.PAYLOAD_BYTES_MAX,
                timeout_seconds=timeout_seconds,
            )
            try:
                _, first = await ask(req, FIRST, deadline - loop.time())
            finally:
                req.abort()
        except (Unanswered, HandshakeError) as error:
            channel.wake.set()
            if error.kind != "silent":  # one slow answer is the watching task's to judge, which has more patience
                self._failed(channel, error)
            else:
                channel.unasked = ""
            return None
        changed = channel.engine is None or channel.engine.digest != first.digest
        self._seen(channel, first)
        if changed or isinstance(channel.state, Away):
            channel.wake.set()  # the held connection is another engine's, or there is none
        self._judge(channel)
        return first

    def _failed(self, channel: Channel, error: Unanswered | HandshakeError) -> None:
        channel.unasked = str(error) if error.kind == "unasked" else ""
        # Of one that could not be asked what was known holds.
        self._set(channel, channel.state if channel.unasked else away(error))

    # What is known

    def _seen(self, channel: Channel, first: Fetched) -> Engine:
        """The engine that this reply is from: the known one, or a new one in its place."""
        engine = channel.engine
        if engine is None or engine.digest != first.digest:
            self._forget(channel)
            engine = channel.engine = Engine(first.digest)
        channel.heard()
        self._remember(engine, FIRST, first)
        return engine

    def _remember(self, engine: Engine, rank: Rank, fetched: Fetched) -> None:
        old = engine.fetched.get(rank)
        if old is not None and old.digest == fetched.digest:
            # The same again: the newer clock, the older objects.
            engine.fetched[rank] = Fetched(
                old.payload, old.description, old.digest, fetched.clock_seconds, fetched.at_seconds
            )
            return
        twin = next((f for f in engine.fetched.values() if f.description == fetched.description), None)
        description = twin.description if twin is not None else fetched.description
        room = self.remembered_bytes + len(fetched.payload) <= REMEMBERED_BYTES_MAX
        payload = fetched.payload if room else b""
        self.remembered_bytes += len(payload) - (len(old.payload) if old is not None else 0)
        engine.fetched[rank] = Fetched(
            payload, description, fetched.digest, fetched.clock_seconds, fetched.at_seconds
        )

    def _forget(self, channel: Channel) -> None:
        if channel.engine is not None:
            self.remembered_bytes -= sum(len(f.payload) for f in channel.engine.fetched.values())
            channel.engine = None

    def _judge(self, channel: Channel) -> None:
        engine = channel.engine
        assert engine is not None
        if channel is self.local:
            self._set(channel, Known(engine.description))
            if engine.description == self._judged_by:
                return
            self._judged_by = engine.description
            for other in self.channels.values():
                if other.engine is not None and isinstance(other.state, Known | Incompatible):
                    self._judge(other)
            return
        local = self.local.engine.description if self.local is not None and self.local.engine is not None else None
        refusal = check(local, engine.descriptions())
        self._set(channel, refusal or Known(engine.description))

    def _set(self, channel: Channel, state: State) -> None:
        if state != channel.state:
            channel.state = state
            self._on_state(channel.endpoint, state)
