"""Plays with the machine of `sidecar.exchange.life`: `>>` an event comes in, `<<` this command must go out.

A play is asserted (`assert world.remote() >> start << Prefill(world.a)`). At its end the request is closed, twice,
and whatever it held must be back: a leak is a failure of every play, not of a test of its own.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sidecar.connectors import CONNECTORS
from sidecar.connectors.connector import EngineFacts, Handoff, Rejection
from sidecar.decision.guards import Decision, Kind
from sidecar.exchange.budget import Budget
from sidecar.exchange.commands import Check, Command, Decode, Prefill
from sidecar.exchange.life import Exchange
from sidecar.prefill.address import Address, AllowList
from sidecar.prefill.breaker import Breaker
from sidecar.prefill.endpoints import Endpoint, Endpoints
from tests.unit.handoffs import BLOCK_SIZE, answer, params

LOCAL = Decode(None)
"""Decode without a handoff: the prompt is computed here."""


@dataclass(frozen=True)
class Event:
    """Something that happens to a request."""

    name: str
    act: Callable[["Play"], Command | None]


def _event(name: str, act: Callable[[Exchange], Command | None]) -> Event:
    return Event(name, lambda play: act(play.exchange))


start = _event("start", lambda exchange: exchange.start())
connected = _event("connected", lambda exchange: exchange.decode_connected())


def _send(play: "Play") -> None:
    play.world.sent.append(play.exchange.handoff)
    play.exchange.decode_sent()


sent = Event("sent", _send)


def fault(name: str, detail: str = "") -> Event:
    return _event(f"fault {name}", lambda exchange: exchange.fault(name, detail))


left = fault("client_left")


def wait(seconds: float) -> Event:
    def act(play: "Play") -> None:
        play.world.clock += seconds

    return Event(f"wait {seconds}", act)


def prefilled(status: int = 200, body: bytes | None = None, block_size: int = 0) -> Event:
    """The prefill endpoint's answer; a good one for the endpoint at hand unless `body` is given."""

    def act(play: "Play") -> Command:
        endpoint = play.exchange.prefill_endpoint
        assert endpoint is not None
        whole = answer(params(remote_host=endpoint.address.host)) if body is None else body
        return play.exchange.prefill_answered(status, whole, play.world.clock, block_size)

    return Event(f"prefilled {status}", act)


def checked(rejection: Rejection | None = None) -> Event:
    """The side channel's word on the handoff: it passes, under the relay's address, unless it is rejected."""

    def act(play: "Play") -> Command | None:
        handoff = play.exchange.handoff
        result = rejection if rejection or handoff is None else handoff.via("127.77.0.1", 5601)
        assert result is not None
        return play.exchange.handoff_checked(result)

    return Event("checked" if rejection is None else f"checked {rejection.fault}", act)


def decoded(status: int = 200, *, stream: bool = False) -> Event:
    return _event(f"decoded {status}", lambda exchange: exchange.decode_answered(status, stream))


def first_event(*, error: bool = False) -> Event:
    return _event("first event", lambda exchange: exchange.first_event(error))


class World:
    """What the requests of one sidecar share. Endpoints a and b (and c) are tried in this order."""

    def __init__(
        self,
        *,
        recompute: bool = True,
        attempts: int = 2,
        max_concurrent: int = 4,
        max_tokens: int = 0,
        lease_s: float = 25.0,
        connector: str = "nixlv2",
    ) -> None:
        self.clock = 1000.0
        self.recompute = recompute
        self.attempts = attempts
        self.lease_s = lease_s
        self.connector = connector
        self.budget = Budget(max_concurrent, max_tokens)
        addresses = [Address(f"10.0.0.{n}", 8000) for n in (5, 6, 7)]
        self.endpoints = Endpoints(addresses, AllowList([]), lambda: self.clock)
        self.endpoints._random.seed(0)
        self.a, self.b, self.c = self.endpoints.configured
        for endpoint in self.endpoints:
            endpoint.breaker = Breaker(random.Random(0))
            endpoint.facts = EngineFacts(block_size=BLOCK_SIZE, num_blocks=1000)
        self.outcomes: list[str] = []
        """Of prefill attempts, in order."""
        self.sent: list[Any] = []
        """What decode legs carried."""

    def exchange(self, decision: Decision) -> Exchange:
        return Exchange(
            decision,
            connector=CONNECTORS[self.connector],
            endpoints=self.endpoints,
            budget=self.budget,
            now=lambda: self.clock,
            attempts=self.attempts,
            recompute=self.recompute,
            lease_s=self.lease_s,
            on_attempt=self.outcomes.append,
        )

    def play(self, decision: Decision) -> "Play":
        return Play(self, self.exchange(decision))

    def remote(self, *candidates: Endpoint, tokens: int = 40, ordered: bool = True) -> "Play":
        """A request that was decided to go to one of `candidates` (default a, b)."""
        return self.play(Decision(Kind.REMOTE, "long", "", tokens, candidates or (self.a, self.b), ordered))

    def local(self) -> "Play":
        return self.play(Decision(Kind.LOCAL, "short", "", 10))

    def budgeted(self, tokens: int = 40) -> "Play":
        """A long prompt for which no prefill endpoint is usable."""
        return self.play(Decision(Kind.LOCAL, "no_usable_prefill", "a: breaker open", tokens, budgeted=True))

    def refused(self, reason: str, detail: str = "10.9.9.9:80") -> "Play":
        return self.play(Decision(Kind.REFUSED, reason, detail))

    def broken(self, endpoint: Endpoint) -> None:
        """Its breaker opens."""
        self.endpoints.failed(endpoint, at_once=True, trial=0)

    def assert_nothing_held(self) -> None:
        assert (self.budget.in_flight, self.budget.tokens) == (0, 0)
        for endpoint in self.endpoints:
            assert (endpoint.in_flight, endpoint.users) == (0, 0), endpoint.label
            assert not endpoint.breaker._trial, f"{endpoint.label} will never be tried again"


class Play:
    """One request, told event by event."""

    def __init__(self, world: World, exchange: Exchange) -> None:
        self.world = world
        self.exchange = exchange
        self._due: Command | None = None
        self._told = ""

    def __rshift__(self, event: Event) -> "Play":
        assert self._due is None, f"{self._told} led to {self._due}, which the play does not expect"
        self._told = event.name
        self._due = event.act(self)
        return self

    def __lshift__(self, expected: Command | type | None) -> "Play":
        command, self._due = self._due, None
        if isinstance(expected, type):
            assert isinstance(command, expected), f"{self._told} led to {command}"
        else:
            assert command == expected, f"{self._told} led to {command}"
        return self

    @property
    def handoff(self) -> Handoff:
        assert self.exchange.handoff is not None
        return self.exchange.handoff

    def open(self) -> "Play":
        """The play so far, with the request still running: for plays of several requests."""
        assert self._due is None, f"{self._told} led to {self._due}, which the play does not expect"
        return self

    def __bool__(self) -> bool:
        self.open()
        self.exchange.close()
        self.exchange.close()
        self.world.assert_nothing_held()
        return True


def handed_over(world: World, *candidates: Endpoint) -> Play:
    """A request whose handoff has passed; the decode leg is to be connected."""
    first = candidates[0] if candidates else world.a
    play = world.remote(*candidates) >> start << Prefill(first) >> prefilled()
    play = play << Check(play.handoff) >> checked()
    return play << Decode(play.handoff)


def pulling(world: World, *candidates: Endpoint) -> Play:
    """A request whose decode leg is on its way with a handoff."""
    return handed_over(world, *candidates) >> connected << None >> sent << None


def recomputing(world: World, *candidates: Endpoint) -> Play:
    """A request whose remote prefill failed and that holds recompute budget."""
    first = candidates[0] if candidates else world.a
    return world.remote(*candidates) >> start << Prefill(first) >> fault("timeout") << Decode(None)
