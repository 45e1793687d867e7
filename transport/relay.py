"""One loopback address that answers the decode engine's handshakes for one prefill engine.

The engine keys its state by address, so an address is never shared and stays for as long as the endpoint is known.
Whatever reaches the port, the prefill engine sees nothing but well-formed questions for ranks that it has. Must not
know how the answers are found out (`Source`), nor HTTP.
"""

import asyncio
import ipaddress
import logging
import socket
import time
import zlib
from collections.abc import Callable
from typing import Final, Literal, Protocol

from transport import handshake, zmtp
from transport.handshake import HandshakeError, Rank
from transport.link import Link, Unanswered
from transport.prober import LIVE_TIMEOUT_SECONDS, Changed

logger = logging.getLogger(__name__)

Outcome = Literal["live", "remembered", "refused", "silent", "malformed", "changed", "range", "garbage", "overload"]
"""`live`: passed on as it came. `remembered`: the side channel is closed, its earlier answer served. Undecodable
frames were sent for `refused` and `silent` (no answer from the prefill engine), `malformed` (something else than an
answer), `changed` (another engine now), `range` (a rank that is not known to exist) and a well-framed `garbage`
request. Other garbage and `overload` end the connection."""

NETWORK: Final = "127.77.0.0/16"
PORT: Final = 5601
CONNECTIONS_MAX: Final = 64  # of one address: every worker of every local rank once, in the widest pods
GREETING_TIMEOUT_SECONDS: Final = 5.0
IDLE_TIMEOUT_SECONDS: Final = 30.0  # the engine closes after its last rank; it waits 5 s for each at most
_BIND_ATTEMPTS_MAX: Final = 256


class Source(Protocol):
    """Where answers come from; `transport.prober.Channel` is one."""

    def covers(self, rank: Rank) -> bool: ...

    def remembered(self, rank: Rank, now_seconds: float) -> tuple[bytes, bytes] | None: ...

    async def live(self, rank: Rank, timeout_seconds: float) -> tuple[bytes, bytes]: ...


def bind(name: str, taken: frozenset[str] | set[str], port: int = PORT) -> socket.socket:
    """A listening socket on a loopback address of its own, always the same one for a `name` where it is free.

    The choice follows from the name, so that it survives a restart of the sidecar: the decode engine, which lives
    on, finds the same prefill engine behind the same address. Raises OSError if none can be had.
    """
    net = ipaddress.ip_network(NETWORK)
    usable = net.num_addresses - 2
    start = zlib.crc32(name.encode()) % usable
    error: OSError | None = None
    for step in range(min(usable, _BIND_ATTEMPTS_MAX)):
        host = str(net.network_address + 1 + (start + step) % usable)
        if host in taken:
            continue
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
            sock.listen(CONNECTIONS_MAX)
        except OSError as failed:  # another sidecar of this network namespace has it
            sock.close()
            error = failed
            continue
        return sock
    raise error or OSError("no loopback address left for a relay")


class Relay:
    """Listens for one endpoint. `on_outcome(outcome, seconds)` is called for every question and every offence."""

    def __init__(
        self,
        source: Source,
        sock: socket.socket,
        *,
        on_outcome: Callable[[Outcome, float], None],
    ) -> None:
        self.source = source
        self.on_outcome = on_outcome
        self.connections: set[Asker] = set()
        self.closed = False
        host, port = sock.getsockname()
        self.address: tuple[str, int] = (host, port)
        self._sock = sock
        self._server: asyncio.Server | None = None
        self._opening = asyncio.create_task(self._open())

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Asker(self, loop), sock=self._sock)

    async def close(self) -> None:
        """Stop listening and end every connection, sent or not."""
        self.closed = True
        self._opening.cancel()
        await asyncio.gather(self._opening, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        self._sock.close()
        tasks = [asker.task for asker in self.connections if asker.task is not None]
        for asker in list(self.connections):
            asker.abort()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def answer(self, rank: Rank) -> tuple[tuple[bytes, bytes], Outcome]:
        """The two frames for a well-formed question, always, after at most `LIVE_TIMEOUT_SECONDS`."""
        if not self.source.covers(rank):
            return handshake.UNDECODABLE, "range"
        try:
            return await self.source.live(rank, LIVE_TIMEOUT_SECONDS), "live"
        except Changed:
            return handshake.UNDECODABLE, "changed"
        except HandshakeError:
            return handshake.UNDECODABLE, "malformed"
        except Unanswered as error:
            if error.kind == "garbage":
                return handshake.UNDECODABLE, "malformed"
            if error.kind not in ("refused", "closed", "unasked"):
                # A peer that does not react at all would hang the engine in its transfer, which has no time limit.
                return handshake.UNDECODABLE, "silent"
            # The machine is there and says that nothing listens. If only the listener has died, the pull works; if
            # the whole engine has, the pull fails at once by itself. Whom we could not ask has a connection to us.
            earlier = self.source.remembered(rank, time.perf_counter())
            return (earlier, "remembered") if earlier is not None else (handshake.UNDECODABLE, "refused")


class Asker(Link):
    """One connection of the decode engine: a REQ socket, so one question at a time."""

    socket_type = zmtp.ROUTER
    peers = frozenset({zmtp.REQ})

    def __init__(self, relay: Relay, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(frame_bytes_max=handshake.REQUEST_BYTES_MAX, parts_max=2)
        self._relay = relay
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._relay.closed:  # accepted in the very turn in which that happened
            self.abort()
        elif len(self._relay.connections) >= CONNECTIONS_MAX:
            self.abort()
            self._relay.on_outcome("overload", 0.0)
        else:
            self._relay.connections.add(self)
            self._timer = self._loop.call_later(GREETING_TIMEOUT_SECONDS, self.abort)
        super().connection_made(transport)

    def ready(self) -> None:
        self._rest()

    def received(self, message: tuple[bytes, ...]) -> None:
        assert self.transport is not None
        if self.task is not None or len(message) != 2 or message[0] or self.transport.get_write_buffer_size():
            self.fail("garbage", "not one question after the other")
            return
        try:
            rank = handshake.decode_request(message[1])
        except HandshakeError:
            self._relay.on_outcome("garbage", 0.0)
            self._reply(handshake.UNDECODABLE)
            return
        self.task = self._loop.create_task(self._find(rank))

    def ended(self, end: Unanswered) -> None:
        if end.kind == "garbage":
            self._relay.on_outcome("garbage", 0.0)
        self._relay.connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        if self.task is not None:
            self.task.cancel()

    async def _find(self, rank: Rank) -> None:
        began = time.perf_counter()
        frames = handshake.UNDECODABLE
        outcome: Outcome = "malformed"
        try:
            frames, outcome = await self._relay.answer(rank)
        except Exception:  # the engine gets its answer all the same
            logger.exception("relay %s: unexpected error", self._relay.address)
        finally:
            self.task = None
        self._reply(frames)
        self._relay.on_outcome(outcome, time.perf_counter() - began)

    def _reply(self, frames: tuple[bytes, bytes]) -> None:
        if self.end is None:
            self.send(b"", *frames)
            self._rest()

    def _rest(self) -> None:
        """Begin to wait for a question, though not for ever."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(IDLE_TIMEOUT_SECONDS, self.abort)
