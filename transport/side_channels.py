"""The side channels as the rest of the sidecar sees them: which endpoints can be pulled from, at what address.

Puts prober and relay together. Must not know HTTP or requests; every call is safe on the one event loop and none
blocks it.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final, NamedTuple

from transport import relay
from transport.compatibility import Incompatible, check_engine_id
from transport.descriptors import shortage
from transport.handshake import RANKS_MAX, Ranks
from transport.prober import (
    ENDPOINTS_MAX,
    LIVE_TIMEOUT_SECONDS,
    REFRESH_SECONDS,
    Away,
    Channel,
    Endpoint,
    Known,
    Prober,
    State,
)

logger = logging.getLogger(__name__)

ALIVE_TIMEOUT_SECONDS: Final = LIVE_TIMEOUT_SECONDS
UNASKED: Final = "unasked"
"""Kind of an `Away` that is this process's doing, and says nothing about the engine."""

_NOT_WATCHED: Final = Away(
    "unknown",
    f"it is not watched: {ENDPOINTS_MAX} others are, or it has just left",
    "narrow --discovery down if this lasts",
)

_NO_RELAY: Final = Away(
    "relay", "no loopback address could be bound for its relay", "free the relay port or choose another network"
)


class Address(NamedTuple):
    """What to write into a handoff's `remote_host` and `remote_port`."""

    host: str
    port: int


class SideChannels:
    """Made and closed on the running loop.

    `local`: the local (decode) engine's own side channel, for the comparison; None leaves endpoints unchecked.
    `on_state(endpoint, state)`: at every change. `on_handshake(outcome, seconds)`: for every question that the
    decode engine asked, and every offence against a relay's port (labels: `transport.relay.Outcome`).
    """

    def __init__(
        self,
        *,
        local: Endpoint | None = None,
        port: int = relay.PORT,
        refresh_seconds: float = REFRESH_SECONDS,
        on_state: Callable[[Endpoint, State], None] = lambda _endpoint, _state: None,
        on_handshake: Callable[[relay.Outcome, float], None] = lambda _outcome, _seconds: None,
    ) -> None:
        self.prober = Prober(on_state=on_state, refresh_seconds=refresh_seconds)
        self._relays: dict[Endpoint, relay.Relay] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._port = port
        self._on_handshake = on_handshake
        if local is not None:
            self.prober.set_local(local)

    def add(self, endpoint: Endpoint) -> bool:
        """Watch a prefill engine's side channel and listen for handshakes on its behalf. False beyond the bound."""
        channel = self.prober.add(endpoint)
        if channel is None:
            return False
        try:
            self._front(channel)
        except OSError as error:  # the next handoff may have more luck
            if not shortage(error):
                logger.error("side channel %s: no relay address: %s", endpoint, error)
        return True

    def remove(self, endpoint: Endpoint) -> None:
        """Forget it; its relay address is closed and is the first choice again should it come back."""
        self.prober.remove(endpoint)
        gone = self._relays.pop(endpoint, None)
        if gone is not None:
            task = asyncio.create_task(gone.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def state(self, endpoint: Endpoint) -> State:
        """What is known of it at this moment; costs nothing."""
        channel = self.prober.channels.get(endpoint)
        return channel.state if channel is not None else _NOT_WATCHED

    async def alive(
        self, endpoint: Endpoint, engine_id: str | None = None, timeout_seconds: float = ALIVE_TIMEOUT_SECONDS
    ) -> bool:
        """Whether its listener answers now, over a fresh connection, and for the engine named, if one is. True
        where it could not be asked: nothing is held against it.

        About 1 ms when it is healthy or refuses, `timeout_seconds` when it is frozen. Probes of one endpoint at the
        same time are one.
        """
        channel = self.prober.channels.get(endpoint)
        if channel is None:
            return False
        return await self.prober.alive(channel, timeout_seconds, engine_id) or bool(channel.unasked)

    def known_address(
        self, endpoint: Endpoint, *, engine_id: str, tp_size: int = 1, pp_size: int = 1
    ) -> Address | Away | Incompatible | None:
        """Where the decode engine may pull a handoff of this endpoint from, or why it must not; None if that cannot
        be told without asking first (`relay_address`).

        `engine_id`, `tp_size`, `pp_size`: `remote_engine_id` and the sizes that the handoff names.
        """
        channel = self.prober.channels.get(endpoint)
        if channel is None:
            return _NOT_WATCHED
        if tp_size < 1 or pp_size < 1 or tp_size * pp_size > RANKS_MAX:
            return _sizes(f"the handoff names impossible sizes, tp {tp_size} and pp {pp_size}")
        if isinstance(channel.state, Away) or _other(channel, engine_id) is not None:
            return None
        return self._address(channel, engine_id, Ranks(pp_size, tp_size))

    async def relay_address(
        self, endpoint: Endpoint, *, engine_id: str, tp_size: int = 1, pp_size: int = 1
    ) -> Address | Away | Incompatible:
        """`known_address`, after asking once more an engine that is away or another than named: about 1 ms, or
        `LIVE_TIMEOUT_SECONDS` if it is silent."""
        known = self.known_address(endpoint, engine_id=engine_id, tp_size=tp_size, pp_size=pp_size)
        if known is not None:
            return known
        channel = self.prober.channels[endpoint]
        await self.prober.refresh(channel, LIVE_TIMEOUT_SECONDS)
        if channel.unasked:
            return Away(UNASKED, channel.unasked, "")
        return self._address(channel, engine_id, Ranks(pp_size, tp_size))

    def _address(self, channel: Channel, engine_id: str, named: Ranks) -> Address | Away | Incompatible:
        if (other := _other(channel, engine_id)) is not None:
            return other
        if not isinstance(channel.state, Known):
            return channel.state
        self.prober.learn(channel, named)
        known = channel.engine.ranks if channel.engine is not None else None
        if known is not None and known != named:
            return _sizes(
                f"the handoff names tp {named.tp}, pp {named.pp}; this engine has tp {known.tp}, pp {known.pp}"
            )
        return self._where(channel)

    async def close(self) -> None:
        """End all of it. Nothing waits for the network."""
        for endpoint in list(self._relays):
            self.remove(endpoint)
        await self.prober.close()
        await asyncio.gather(*self._closing)

    def _where(self, channel: Channel) -> Address | Away:
        if self.prober.channels.get(channel.endpoint) is not channel:  # removed while it was asked
            return _NOT_WATCHED
        try:
            return Address(*self._front(channel).address)
        except OSError as error:
            problem = shortage(error)
            return Away(UNASKED, problem, "") if problem else _NO_RELAY

    def _front(self, channel: Channel) -> relay.Relay:
        """Its relay. Raises OSError if there is none yet and none can be had."""
        front = self._relays.get(channel.endpoint)
        if front is None:
            taken = {front.address[0] for front in self._relays.values()}
            sock = relay.bind(str(channel.endpoint), taken, self._port)
            front = self._relays[channel.endpoint] = relay.Relay(channel, sock, on_outcome=self._on_handshake)
        return front


def _other(channel: Channel, engine_id: str) -> Incompatible | None:
    return check_engine_id(channel.engine.description, engine_id) if channel.engine is not None else None


def _sizes(cause: str) -> Incompatible:
    return Incompatible("tp_size", cause, "check what answers on the prefill endpoint")
