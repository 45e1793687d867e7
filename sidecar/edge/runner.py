"""Carries one exchange: turns the machine's commands into bytes and what comes back into its events.

It decides nothing: what follows a fault is the failure table's business, what a body may hold the splicer's.
A `Runner` belongs to one request of one client connection and talks to at most one engine at a time.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from sidecar.connectors.connector import Handoff, Rejection
from sidecar.decision.guards import Kind
from sidecar.edge import errors
from sidecar.edge.encoding import Decoding, Undecodable, decoded
from sidecar.edge.engine import Buffer, EngineConnection, EnginePool
from sidecar.edge.head import Head
from sidecar.edge.learning import end_turn, learn
from sidecar.edge.legs import DecodeLeg, Leg, PrefillLeg
from sidecar.edge.messages import read_body, to_client, to_decode, to_prefill
from sidecar.edge.opening import decided, opened
from sidecar.edge.release import Release
from sidecar.edge.request import Request
from sidecar.edge.service import Service, Times
from sidecar.edge.source import for_decode, for_prefill, kv_source
from sidecar.edge.tunnel import join
from sidecar.exchange import commands
from sidecar.exchange.apis import APIS, Api
from sidecar.exchange.failures import TABLE, Row, Stage
from sidecar.exchange.peek import FirstEvents
from sidecar.exchange.splice import Fields, NotAnObject, prefill_body
from sidecar.prefill.address import Address
from sidecar.prefill.served import ADAPTER_CALLS

if TYPE_CHECKING:
    from sidecar.decision.turns import Turn
    from sidecar.edge.client import ClientConnection
    from sidecar.exchange.life import Exchange

_log = logging.getLogger("sidecar")

_BAD_JSON = TABLE[Stage.READING, "bad_json"]
_UNKNOWN_RANK = TABLE[Stage.READING, "unknown_rank"]


class Runner:
    """One request from its complete head to the end of its answer."""

    __slots__ = (
        "_ahead",
        "_body",
        "_client_left",
        "_computing_here",
        "_early_tunnel_data",
        "_exchange",
        "_finished",
        "_heard_at",
        "_leg",
        "_leg_began",
        "_members",
        "_refusal",
        "_source",
        "_status",
        "_timer",
        "_times",
        "_trace",
        "_turn",
        "_unwatch",
        "api",
        "client",
        "request",
        "service",
    )

    def __init__(self, service: Service, client: "ClientConnection", request: Request) -> None:
        self.service = service
        self.client: ClientConnection | None = client
        self.request = request
        self.api: Api | None = APIS.get(request.path) if request.method == b"POST" else None
        self._times = Times(complete=time.monotonic())
        self._exchange: Exchange | None = None
        self._early_tunnel_data = b""
        self._members: Fields = {}
        self._body: Buffer = b""
        self._leg: Leg | None = None
        self._leg_began = self._heard_at = 0.0
        """When the present leg began, and when its engine (or who watches it) last said something that counts."""
        self._timer: asyncio.TimerHandle | None = None
        self._unwatch: Callable[[], None] | None = None
        self._ahead = 0
        """Prompt tokens that this request's found before it at the decode engine."""
        self._computing_here = 0
        """Prompt tokens of this request that the decode engine computes at present."""
        self._status = 0
        self._refusal: Row | None = None
        self._source: Address | None = None
        """P2P channel of a peer from which the first leg may fetch a prefix. No later leg: the peer was asked
        at the beginning, and an engine that is told to dial one that is gone never recovers (prefill/p2p.py)."""
        self._trace = service.tracer.begin(request) if service.tracer is not None else None
        self._turn: Turn | None = None
        self._finished = False
        self._client_left = False

    # -- what the client connection tells ------------------------------------------------------------------

    def start(self) -> None:
        """The request is complete, or its body will be streamed."""
        request = self.request
        service = self.service.named_by(request.read.get(b"x-data-parallel-host-port", []))
        if service is None:
            self._refuse(_UNKNOWN_RANK, f"they are {', '.join(map(str, self.service.by_port))}")
            return
        self.service = service
        if request.is_encoded:
            body, request.body = request.body, b""
            steps = decoded(body, request.content_encoding, service.settings.max_body_bytes)
            Decoding(service.loop, steps, lambda: self._finished, self._decoded)
        else:
            self._decide()

    def _decoded(self, body: Buffer | Undecodable) -> None:
        try:
            if isinstance(body, Undecodable):
                self._refuse(body.row, body.detail)
            else:
                self.request.body = body
                self.request.inflated = True
                self._decide()
        except Exception:  # in a turn of its own nobody else would end the request
            _log.exception("a request ends by a bug of ours (%s)", self.request.request_id.decode())
            if self.client is not None:
                self.client.abort()

    def _decide(self) -> None:
        request, service = self.request, self.service
        try:
            self._body, self._members = read_body(request, self.api)
            decision = decided(service, request, self.api, self._body, self._members)
        except NotAnObject as error:
            self._refuse(_BAD_JSON, str(error).splitlines()[0][:200])
            return
        service.observer.decided(decision, time.monotonic() - self._times.complete)
        self._exchange = opened(service, self.api, decision)
        source = kv_source(service, request, decision.kind) if self.api is not None else None
        if source is None or service.p2p is None or decision.kind is Kind.REFUSED:
            self._do(self._exchange.start())
        else:
            service.p2p.reach(source, partial(self._source_reached, source))

    def _source_reached(self, source: Address, is_there: bool) -> None:
        assert self._exchange is not None
        if not self._finished:
            self._source = source if is_there else None
            self._do(self._exchange.start())

    def _take_source(self) -> Address | None:
        source, self._source = self._source, None
        return source

    def body_piece(self, data: bytes) -> None:
        """A piece of a streamed request body."""
        if isinstance(self._leg, DecodeLeg):
            self._leg.body_piece(data)

    def body_end(self, trailers: bytes) -> None:
        """The streamed request body is complete."""
        if isinstance(self._leg, DecodeLeg):
            self._leg.body_end(trailers)

    def client_left(self) -> None:
        """The client's connection is gone."""
        self.client = None
        if self._finished:
            return
        self._client_left = True
        if self._exchange is None:
            self._finish()
        else:
            self._do(self._exchange.fault("client_left"))

    def pause(self) -> None:
        """The client reads no further for now."""
        if self._leg is not None:
            self._leg.pause_reading()

    def resume(self) -> None:
        if self._leg is not None:
            self._leg.resume_reading()

    def tunnel_data(self, data: bytes) -> None:
        """What the client sent behind a request that asks for an upgrade."""
        self._early_tunnel_data = data

    # -- commands ------------------------------------------------------------------------------------------

    def _do(self, command: commands.Command) -> None:
        _CARRY_OUT[type(command)](self, command)

    def _prefill(self, command: commands.Prefill) -> None:
        service = self.service
        endpoint = command.endpoint
        self._drop_leg()
        loop = service.loop
        if not self._times.prefill_sent:
            self._times.prefill_sent = time.monotonic()
        if self._timer is None:  # one deadline for the whole stage, however many endpoints are tried
            left_s = self._times.prefill_sent + service.settings.prefill_timeout - time.monotonic()
            self._timer = loop.call_later(max(left_s, 0.0), self._prefill_timed_out)
        assert self.api is not None
        assert self._exchange is not None
        exchange = self._exchange
        params = service.connector.prefill_params(exchange.transfer_id)
        params = for_prefill(params, self._take_source(), endpoint, service)
        size = len(self._body)
        body = prefill_body(self.api, self._members, size, params, wants_token_ids=exchange.wants_token_ids)
        lines = self._trace.for_prefill() if self._trace is not None else b""
        # Where nobody has told yet how many ranks there are, decode is told of the first.
        first = 0 if service.connector.names_transfers and not endpoint.facts.ranks else -1
        if (rank := max(exchange.decision.rank, exchange.prefill_rank, first)) >= 0:
            lines += b"x-data-parallel-rank: %d\r\n" % rank
        parts = to_prefill(self.request, endpoint.label, body, lines)
        # A frozen engine would keep the request for the whole of --prefill-timeout.
        self._unwatch = service.watch.watch(endpoint, None, self._peer_silent)
        self._start_leg(PrefillLeg(self, parts), service.prefill_pool(endpoint))

    def _check(self, command: commands.Check) -> None:
        gate, exchange = self.service.gate, self._exchange
        assert exchange is not None
        self._drop_leg()
        self._stop_timer()
        if gate is None or exchange.prefill_endpoint is None:
            self._handoff_checked(command.handoff)
        else:
            gate.admit(exchange.prefill_endpoint, command.handoff, self._handoff_checked)

    def _handoff_checked(self, result: Handoff | Rejection) -> None:
        assert self._exchange is not None
        if not self._finished:
            self._times.handoff_done = time.monotonic()
            self._do(self._exchange.handoff_checked(result))

    def _decode(self, command: commands.Decode) -> None:
        self._drop_leg()
        self._stop_timer()
        request, service = self.request, self.service
        handoff = command.handoff
        if handoff is None:
            self._begin_here()
        params: bytes | None
        if handoff is not None:
            params = service.connector.decode_params(handoff)
        else:
            params = for_decode(self._take_source(), service)
        trace = self._trace.for_decode() if self._trace is not None else b""
        parts = to_decode(request, self._body, params, trace, with_id=self.api is not None)
        leg = DecodeLeg(self, parts, handoff, streams_body=request.is_streamed)
        self._start_leg(leg, service.engine)

    def _relay(self, _command: commands.Relay) -> None:
        assert self._leg is not None
        self._leg.relay()

    def _peek(self, _command: commands.Peek) -> None:
        assert isinstance(self._leg, DecodeLeg)
        assert self.api is not None
        self._leg.peek(FirstEvents(self.api))

    def _answer(self, command: commands.Answer) -> None:
        self._refuse(command.row, command.detail)

    def _break_off(self, command: commands.BreakOff) -> None:
        leg = self._leg
        if isinstance(leg, DecodeLeg) and self.client is not None:
            if tail := leg.last_words(command.row):
                self.client.write((tail,))
            self.client.close_after_write(reset=leg.would_look_whole)
        self._finish()

    def _to_first_byte(self, _command: commands.ToFirstByte) -> None:
        self._timer = self.service.loop.call_later(self.service.settings.pull_timeout, self._finish)

    def _wait(self, _command: commands.Wait) -> None:
        """The event that is still to come decides."""

    def _close(self, _command: commands.Close) -> None:
        self._finish()

    # -- events from legs and timers -----------------------------------------------------------------------

    def prefill_answered(self, status: int, body: bytes, born: float, peer_host: str) -> None:
        assert self._exchange is not None
        endpoint = self._exchange.prefill_endpoint
        if endpoint is not None:
            endpoint.peer_host = peer_host
        self._heard_at = self._times.prefill_done = time.monotonic()
        self._do(self._exchange.prefill_answered(status, body, born, self.service.live.engine_facts.block_size))

    def fault(self, name: str, detail: str = "") -> None:
        exchange = self._exchange
        assert exchange is not None
        if self._client_left:  # nobody waits for what would follow
            self._finish()
            return
        self._heard_at = time.monotonic()
        if exchange.stage in (Stage.DECODE, Stage.HANDOFF) and name in ("refused", "unreachable"):
            self.service.observer.engine_gone(name, detail)
        self._do(exchange.fault(name, detail))

    def decode_connected(self) -> bool:
        """Whether the decode leg may be sent."""
        assert self._exchange is not None
        if self._client_left:
            return False
        command = self._exchange.decode_connected()
        if command is not None:
            self._do(command)
        return command is None

    def decode_sent(self, handoff: Handoff | None) -> None:
        exchange = self._exchange
        assert exchange is not None
        exchange.decode_sent()
        self._times.decode_sent = time.monotonic()
        if exchange.decision.inputs is not None and self._turn is None:  # `auto` has asked what is cached
            self.service.loop.call_soon(self._begin_turn, handoff)  # while the engine has work
        if handoff is not None and exchange.prefill_endpoint is not None:
            self._unwatch = self.service.watch.watch(exchange.prefill_endpoint, handoff, self._peer_silent)

    def _begin_turn(self, handoff: Handoff | None) -> None:
        if self.api is not None and self._exchange is not None and self._turn is None and not self._finished:
            token_ids = handoff.token_ids if handoff is not None else b""
            known = self._exchange.decision.known
            self._turn = self.service.rules.begin_turn(self.api, self._members, known, token_ids)

    def decode_answered(self, head: Head) -> None:
        assert self._exchange is not None
        self._heard_at = time.monotonic()
        self._exchange.decode_status(head.status)
        self._give_back()
        is_events = head.value(b"content-type").startswith(b"text/event-stream")
        if self._client_left and not (head.status == 200 and is_events):
            self._finish()  # it was let to its first byte, and this is it
            return
        if self._unwatch is not None and not (head.status == 200 and is_events):
            self._stop_watching()
        self._do(self._exchange.decode_answered(head.status, is_events))

    def first_event(self, is_error: bool) -> None:
        assert self._exchange is not None
        self._heard_at = time.monotonic()
        self._stop_watching()
        if self._client_left:
            self._finish()
        else:
            self._do(self._exchange.first_event(is_error))

    def _give_back(self) -> None:
        if self._exchange is None:
            return
        handoff, endpoint = self._exchange.take_release(), self._exchange.prefill_endpoint
        if handoff is not None and endpoint is not None:
            endpoints = self.service.endpoints
            endpoints.hold(endpoint)  # its side channel is needed once more
            Release(self.service, handoff, self.request.headers, partial(endpoints.let_go, endpoint))

    def _stop_watching(self) -> None:
        unwatch, self._unwatch = self._unwatch, None
        if unwatch is not None:
            unwatch()

    def _prefill_timed_out(self) -> None:
        self._timer = None
        self.fault("timeout", f"{self.service.settings.prefill_timeout:g} s")

    def _peer_silent(self, detail: str) -> None:
        self._unwatch = None
        self.fault("peer_silent", detail)

    # -- answering -----------------------------------------------------------------------------------------

    def own_headers(self) -> bytes:
        """What we add to every answer of a request that could have been split."""
        if self.api is None:
            return b""
        lines = b"x-request-id: %b\r\n" % self.request.take_request_id()
        exchange = self._exchange
        if exchange is not None and self.service.settings.decision_header == "on":
            lines += b"x-pd-decision: %b\r\n" % exchange.summary().encode("latin-1")
        return lines

    def write_head(self, head: Head, *, framing: bytes, close: bool) -> bytes:
        """The engine's head as the client gets it, as bytes; notes its status."""
        self._status = head.status
        own = self.own_headers()
        return to_client(head, framing=framing, own=own, is_api=self.api is not None, close=close)

    def first_byte(self) -> None:
        if not self._times.first_byte:
            self._times.first_byte = time.monotonic()
            self._end_here()
            if self._turn is not None and self._exchange is not None and self._exchange.is_event_stream:
                self._turn.first_byte()

    def _begin_here(self) -> None:
        assert self._exchange is not None
        tokens = self._exchange.decision.estimated_tokens
        if tokens and not self._computing_here:
            self._computing_here = tokens
            self._ahead = self.service.rules.began_here(tokens)

    def _end_here(self) -> None:
        tokens, self._computing_here = self._computing_here, 0
        if tokens:
            self.service.rules.ended_here(tokens)

    def _refuse(self, row: Row, detail: str) -> None:
        self._status = row.status
        self._refusal = row
        client = self.client
        if client is not None:
            close = client.must_close(self.request)
            client.write(
                (
                    errors.answer(
                        row,
                        detail,
                        self.api,
                        self.own_headers(),
                        close=close,
                        head_only=self.request.method == b"HEAD",
                    ),
                )
            )
        if self._exchange is None:
            self.service.observer.refused(row)
        self._finish()

    def tunnel(self, head: Head, connection: EngineConnection, rest: bytes) -> None:
        """The engine switched protocols."""
        client = self.client
        if client is None or connection.transport is None or client.transport is None:
            connection.abort()
            self._finish()
            return
        lines = b"".join([b"%b: %b\r\n" % header for header in head.headers])
        client.write((b"HTTP/1.1 101 %b\r\n%b\r\n" % (head.reason, lines), rest))
        self._status = 101
        engine_transport = connection.transport
        self._drop_leg()
        join(client.transport, engine_transport, self._tunnel_ended)
        client.tunnel_begins()
        if self._early_tunnel_data:
            engine_transport.write(self._early_tunnel_data)

    def _tunnel_ended(self) -> None:
        client, self.client = self.client, None
        if client is not None:
            client.tunnel_ended()
        self._finish()

    def finish(self, pieces: int = 0) -> None:
        """The answer is complete, in so many pieces."""
        self._times.pieces = pieces
        self._finish()

    def _finish(self) -> None:
        """Ends the request once, however it ended. What others wait for is given back first, and an error on the
        way costs only what it is about: a share of the budget that is lost is lost until the restart."""
        if self._finished:
            return
        self._finished = True
        self._times.end = time.monotonic()
        leg = self._leg
        self._body, self._members = b"", {}  # runner and leg know each other: the collector would free them late
        for step in (
            self._stop_watching,
            self._drop_leg,
            self._stop_timer,
            self._give_back,
            self._close_exchange,
            self._end_here,
            partial(self._end_turn, leg),
            self._learn,
            self._tell_observer,
            self._tell_tracer,
            self._tell_client,
        ):
            try:
                step()
            except Exception:
                _log.exception("a bug of ours at a request's end (%s)", self.request.request_id.decode())

    def _close_exchange(self) -> None:
        if self._exchange is not None:
            self._exchange.close()

    def _end_turn(self, leg: Leg | None) -> None:
        """`leg`: the last one."""
        turn, exchange = self._turn, self._exchange
        if turn is not None:
            is_stream = exchange is None or exchange.is_event_stream
            tail = leg.tail if isinstance(leg, DecodeLeg) else b""
            end_turn(self.service, turn, tail, self._status, is_stream=is_stream)

    def _learn(self) -> None:
        exchange, rules = self._exchange, self.service.rules
        if exchange is None:
            return
        if self._status == 200 and self.request.path in ADAPTER_CALLS:
            rules.models.doubt()
        if self.api is not None:
            learn(rules, self.api, exchange, self._times, self._status, self._ahead)

    def _tell_observer(self) -> None:
        if self._exchange is not None:
            self.service.observer.finished(
                self.api.name if self.api is not None else "other",
                self._exchange,
                self._status,
                self._times,
                self.request.request_id,
                self._client_left,
                self._trace.trace_id if self._trace is not None else "",
            )

    def _tell_tracer(self) -> None:
        if self._trace is not None:
            assert self.service.tracer is not None
            self.service.tracer.finished(
                self._trace,
                self.request,
                self.api,
                self._exchange,
                self._refusal,
                self._status,
                self._times,
                self._client_left,
            )

    def _tell_client(self) -> None:
        """Its next request begins in this call."""
        client, self.client = self.client, None
        if client is not None:
            try:
                client.answered(self.request)
            except Exception:
                client.abort()  # nobody would answer what it asks next
                raise

    # -- legs ----------------------------------------------------------------------------------------------

    def _start_leg(self, leg: Leg, pool: EnginePool) -> None:
        self._leg = leg
        if self._heard_at:
            self._times.engines_s += self._heard_at - self._leg_began
        self._leg_began = time.monotonic()
        self.service.observer.leg_started(leg.name)
        leg.acquire(pool)

    def _drop_leg(self) -> None:
        self._stop_watching()
        leg, self._leg = self._leg, None
        if leg is not None:
            self.service.observer.leg_ended(leg.name)
            leg.drop()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


_CARRY_OUT: dict[type, Callable[[Runner, Any], None]] = {
    commands.Prefill: Runner._prefill,
    commands.Check: Runner._check,
    commands.Decode: Runner._decode,
    commands.Relay: Runner._relay,
    commands.Peek: Runner._peek,
    commands.Answer: Runner._answer,
    commands.BreakOff: Runner._break_off,
    commands.ToFirstByte: Runner._to_first_byte,
    commands.Wait: Runner._wait,
    commands.Close: Runner._close,
}
