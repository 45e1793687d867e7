"""What every request of one serving port shares. Put together in serving.py; decides nothing, does nothing."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from sidecar.connectors import Connector
from sidecar.connectors.connector import EngineFacts, Handoff, Rejection
from sidecar.decision.guards import Decision, Mode
from sidecar.decision.rules import Rules
from sidecar.edge.engine import EnginePool
from sidecar.edge.request import Request
from sidecar.exchange.apis import Api
from sidecar.exchange.budget import Recomputes
from sidecar.exchange.failures import Row
from sidecar.exchange.life import Exchange
from sidecar.prefill.address import Address
from sidecar.prefill.endpoints import Endpoint, Endpoints
from sidecar.settings import Settings
from sidecar.tracing.context import Trace


@dataclass(slots=True)
class Live:
    """What may change while requests run; read once per request."""

    mode: Mode
    draining: bool = False
    engine_facts: EngineFacts = field(default_factory=EngineFacts)


@dataclass(slots=True)
class Times:
    """When one request passed which point; seconds of `time.monotonic` (uvloop's own
    clock counts whole milliseconds); 0.0: it did not."""

    complete: float = 0.0
    """The request was read."""
    prefill_sent: float = 0.0
    prefill_done: float = 0.0
    handoff_done: float = 0.0
    """The side channel said whether the handoff can be pulled."""
    decode_sent: float = 0.0
    first_byte: float = 0.0
    """The first byte of the answer's body went to the client."""
    end: float = 0.0
    engines_s: float = 0.0
    """What the legs before the one that is answered took, failed ones too."""
    pieces: int = 0
    """Of an answer that is whole; 0: unknown."""


class Observer(Protocol):
    """Hears of every step once; metrics, log and `/decisions` are made from it, so they cannot disagree."""

    def decided(self, decision: Decision, elapsed_s: float) -> None: ...

    def prefill_attempt(self, outcome: str) -> None: ...

    def refused(self, row: Row) -> None:
        """Answered before there was anything to decide."""

    def finished(
        self,
        api: str,
        exchange: Exchange,
        status: int,
        times: Times,
        request_id: bytes,
        client_left: bool,
        trace_id: str = "",
    ) -> None:
        """`trace_id`: "" if the request is not traced."""

    def leg_started(self, leg: str) -> None: ...

    def leg_ended(self, leg: str) -> None: ...

    def engine_gone(self, fault: str, detail: str) -> None:
        """The local engine takes no connection."""


class Tracer(Protocol):
    """See `sidecar.tracing.tracer.Tracer`."""

    def begin(self, request: Request) -> Trace | None: ...

    def finished(
        self,
        trace: Trace,
        request: Request,
        api: Api | None,
        exchange: Exchange | None,
        refusal: Row | None,
        status: int,
        times: Times,
        client_left: bool,
    ) -> None: ...


class PeerWatch(Protocol):
    """Watches a prefill peer while the decode engine waits for its KV."""

    def watch(
        self, endpoint: Endpoint, handoff: Handoff | None, silent: Callable[[str], None]
    ) -> Callable[[], None]:
        """Calls `silent` once the peer has not answered for `--pull-timeout`; returns how to stop watching."""


class HandoffGate(Protocol):
    """Knows whether the local engine can pull from a prefill engine."""

    def admit(self, endpoint: Endpoint, handoff: Handoff, admitted: Callable[[Handoff | Rejection], None]) -> None:
        """Calls `admitted`, at once or soon, with the handoff as the local engine may have it."""


class SourceGate(Protocol):
    """Knows whether the engines may fetch blocks from a peer."""

    @property
    def own(self) -> Address | None:
        """The local engine's channel, if it is known."""

    def reach(self, source: Address, reached: Callable[[bool], None]) -> None:
        """Calls `reached`, soon, with whether it answers."""


@dataclass(slots=True)
class Service:
    """One serving port (one rank)."""

    loop: asyncio.AbstractEventLoop
    settings: Settings
    live: Live
    connector: Connector
    endpoints: Endpoints
    budget: Recomputes
    engine: EnginePool
    prefill_pool: Callable[[Endpoint], EnginePool]
    observer: Observer
    watch: PeerWatch
    gate: HandoffGate | None
    """None: handoffs are passed on with the address that the prefill engine gave."""
    rules: Rules
    p2p: SourceGate | None = None
    """None: nothing is fetched from peers."""
    tracer: Tracer | None = None
    """None: tracing is off."""
    by_port: dict[int, "Service"] = field(default_factory=dict)
    """Those of all local ranks, by the ports that clients know them by; shared by all of them."""

    def named_by(self, values: list[bytes]) -> "Service | None":
        """The rank that `x-data-parallel-host-port` names, this one without the header; None: no rank is there.

        The header is deprecated: gateways name a rank's port themselves. Its host is that of the pod, so of the
        value the port counts. With one rank it means nothing.
        """
        if not values or len(self.by_port) < 2:
            return self
        port = values[-1].rpartition(b":")[2].strip()
        return self.by_port.get(int(port)) if port.isdigit() and len(port) <= 5 else None
