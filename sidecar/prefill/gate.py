"""Which prefill endpoints the local engine can pull from, and at what address: what the transport room knows,
in terms of prefill endpoints and handoffs.

The side channel's port is only certain once a handoff has named it. Until then the usual port is asked: an answer
counts, silence says nothing.
"""

import logging
from collections.abc import Callable
from typing import Protocol

from sidecar.background import Background
from sidecar.connectors.connector import EngineFacts, Handoff, Rejection
from sidecar.prefill.endpoints import Endpoint
from sidecar.prefill.ranks import rank_of_engine
from transport.compatibility import Incompatible
from transport.prober import NOT_ASKED, Away, Known, State
from transport.prober import Endpoint as SideChannel
from transport.side_channels import UNASKED, Address, SideChannels

_log = logging.getLogger("sidecar")

MAX_SIDE_CHANNELS = 64
"""Of one endpoint: the data-parallel ranks behind one HTTP port."""

Admitted = Callable[[Handoff | Rejection], None]
Located = Callable[[Address | Rejection], None]


class Holder(Protocol):
    """The engine that holds a handoff's blocks, and its side channel."""

    @property
    def engine_id(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...


class Named(Holder, Protocol):
    """What a handoff names of it."""

    @property
    def tp_size(self) -> int: ...
    @property
    def pp_size(self) -> int: ...


class Gate:
    """Checks handoffs against the side channels; blocks endpoints from which nothing can be pulled."""

    def __init__(
        self, background: Background, usual_port: int, changed: Callable[[Endpoint], None] = lambda _endpoint: None
    ) -> None:
        """`changed` hears of every endpoint of which a side channel has told something, or is watched no more:
        what `locate` has said of it before may hold no longer."""
        self._changed = changed
        self._background = background
        self._usual_port = usual_port
        self._channels: SideChannels | None = None
        self._endpoints: dict[SideChannel, dict[Endpoint, None]] = {}
        """Who is behind a side channel; two engines of one host share the usual port as long as it is a guess."""

    def attach(self, channels: SideChannels) -> None:
        """The channels report to `state_changed`, so they are made after the gate."""
        self._channels = channels

    def learn(self, endpoint: Endpoint) -> None:
        """Begins to watch an endpoint's usual side channel."""
        self._watch(endpoint, SideChannel(endpoint.address.host, self._usual_port), certain=False)

    def forget(self, endpoint: Endpoint) -> None:
        for side in list(endpoint.side_channels):
            self._drop(endpoint, side)

    def admit(self, endpoint: Endpoint, handoff: Handoff, admitted: Admitted) -> None:
        """Calls `admitted` with the handoff as the local engine may have it, or with why it may not: at once where
        the side channel's state is known, else after one question (1 ms, or the time limit if it is silent)."""
        self.locate(endpoint, handoff, lambda where: admitted(moved(handoff, where)))

    def locate(self, endpoint: Endpoint, handoff: Named, located: Located) -> None:
        """The same for who knows only what the handoff names: calls `located` with the address for it."""
        if endpoint.forgotten:
            located(Rejection("side_channel_dead", "the endpoint has made room for others meanwhile"))
            return
        side = SideChannel(handoff.host, handoff.port)
        endpoint.has_ranks = rank_of_engine(handoff.engine_id) >= 0
        self._watch(endpoint, side, certain=True)
        assert self._channels is not None
        where = self._channels.known_address(
            side, engine_id=handoff.engine_id, tp_size=handoff.tp_size, pp_size=handoff.pp_size
        )
        if where is not None:
            located(_result(where))
        else:
            self._background.start(f"side channel of {endpoint.label}", self._ask(side, handoff, located))

    async def _ask(self, side: SideChannel, handoff: Named, located: Located) -> None:
        assert self._channels is not None
        try:
            where = await self._channels.relay_address(
                side, engine_id=handoff.engine_id, tp_size=handoff.tp_size, pp_size=handoff.pp_size
            )
            result = _result(where)
        except Exception as error:  # whatever it was, a request waits for the answer
            _log.exception("asking side channel %s", side)
            result = Rejection("side_channel_dead", f"asking it failed: {type(error).__name__}")
        located(result)

    def is_undecided(self, endpoint: Endpoint) -> bool:
        """Whether nothing at all has been heard of the endpoint's side channels yet, good or bad."""
        channels = self._channels
        return channels is None or any(channels.state(side) is NOT_ASKED for side in endpoint.side_channels)

    async def alive(self, handoff: Holder, timeout_s: float) -> str:
        """ "" if the side channel that the handoff names answers for its engine, or cannot be asked."""
        assert self._channels is not None
        side = SideChannel(handoff.host, handoff.port)
        ok = await self._channels.alive(side, handoff.engine_id, timeout_s)
        return "" if ok else f"side channel {side} does not answer"

    # -- what the side channels report --

    def state_changed(self, side: SideChannel, state: State) -> None:
        for endpoint in list(self._endpoints.get(side, ())):
            self._tell(endpoint, side, state)

    def _tell(self, endpoint: Endpoint, side: SideChannel, state: State) -> None:
        certain = endpoint.side_channels.get(side, False)
        if isinstance(state, Known) and state.description.geometry is not None:
            geometry, engine_id = state.description.geometry, state.description.engine_id or ""
            endpoint.facts = EngineFacts(
                geometry.logical_block_size, geometry.logical_blocks, engine_id, endpoint.facts.ranks
            )
        was = endpoint.blocked
        endpoint.blocked = self._blocked(endpoint)
        if endpoint.blocked and endpoint.blocked != was:
            problem = state.cause if isinstance(state, Incompatible) else getattr(state, "detail", "")
            change = getattr(state, "change", "")
            _log.warning(
                "prefill endpoint %s: not used, %s (side channel %s: %s); %s",
                endpoint.label,
                endpoint.blocked,
                side,
                problem,
                change,
            )
        elif was and not endpoint.blocked:
            _log.info("prefill endpoint %s: used again, its side channel answers", endpoint.label)
        elif isinstance(state, Away) and certain and state is not NOT_ASKED:
            _log.warning("prefill endpoint %s: side channel %s: %s", endpoint.label, side, state.detail)
        self._changed(endpoint)

    def _blocked(self, endpoint: Endpoint) -> str:
        """Why nothing can be pulled from any engine behind the endpoint, or ""."""
        assert self._channels is not None
        problems = []
        for side, certain in endpoint.side_channels.items():
            state = self._channels.state(side)
            if isinstance(state, Incompatible):
                problems.append("incompatible")
            elif isinstance(state, Away) and certain and state is not NOT_ASKED:  # unasked is unknown, not dead
                problems.append("side_channel_dead")
            elif isinstance(state, Known):
                return ""
        if endpoint.has_ranks and len(problems) == 1 and problems[0] == "side_channel_dead":
            return ""  # of several ranks one is known, and the others are not: requests to them find out
        return problems[0] if problems else ""

    # -- which side channels are watched --

    def _watch(self, endpoint: Endpoint, side: SideChannel, *, certain: bool) -> None:
        assert self._channels is not None
        known = endpoint.side_channels.get(side)
        if known is certain or known:
            self._channels.add(side)  # there may have been no room for it before
            return
        if certain and known is None:
            self._make_room(endpoint)
        endpoint.side_channels[side] = certain
        sharers = self._endpoints.setdefault(side, {})
        if not sharers:
            self._channels.add(side)
        sharers[endpoint] = None
        self._tell(endpoint, side, self._channels.state(side))  # what is known may mean more now

    def _make_room(self, endpoint: Endpoint) -> None:
        """A certain port replaces the guess, and the oldest of too many."""
        for side, certain in list(endpoint.side_channels.items()):
            if not certain or len(endpoint.side_channels) >= MAX_SIDE_CHANNELS:
                self._drop(endpoint, side)

    def _drop(self, endpoint: Endpoint, side: SideChannel) -> None:
        endpoint.side_channels.pop(side, None)
        self._changed(endpoint)
        sharers = self._endpoints.get(side)
        if sharers is None:
            return
        sharers.pop(endpoint, None)
        if not sharers:
            del self._endpoints[side]
            if self._channels is not None:
                self._channels.remove(side)


def moved(handoff: Handoff, where: Address | Rejection) -> Handoff | Rejection:
    """The handoff as the local engine may have it."""
    return where if isinstance(where, Rejection) else handoff.via(where.host, where.port)


def _result(where: Address | Away | Incompatible) -> Address | Rejection:
    if isinstance(where, Address):
        return where
    if isinstance(where, Incompatible):
        return Rejection("incompatible", f"{where.cause}; {where.change}")
    if where.kind == UNASKED:
        return Rejection("unverifiable", where.detail)
    return Rejection("side_channel_dead", f"{where.detail}; {where.change}")
