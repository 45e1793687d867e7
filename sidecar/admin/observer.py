"""Hears of every step of every request once, and makes metrics, log lines and `/decisions` from it.

One place for all three, so that they cannot disagree. Nothing that a client sent gets here but the request id,
which has a fixed alphabet; prompts and keys never do.
"""

import asyncio
import logging
import platform
import time
from collections import deque
from collections.abc import Callable, Iterable, Sized
from typing import TYPE_CHECKING, Any

import msgspec

from sidecar import __version__
from sidecar.admin.endpoints import shown
from sidecar.admin.metrics import Collection, Counter, Gauge, Histogram
from sidecar.decision.guards import Decision, Kind
from sidecar.edge.service import Times
from sidecar.exchange.budget import Recomputes
from sidecar.exchange.failures import Row, Stage
from sidecar.exchange.life import Exchange
from sidecar.log import Limited
from sidecar.prefill.breaker import State
from sidecar.prefill.endpoints import Endpoint, Endpoints

if TYPE_CHECKING:
    from sidecar.prefill.discovery.discovery import Discovery

DECISIONS_KEPT = 256

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_OVERHEAD_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5)

_GAP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_RATIOS = (0.25, 0.5, 0.67, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 4.0)

_NO_NEWS = frozenset({"client_left", "rejected"})
"""Faults that are the client's own affair: counted, not logged."""

_log = logging.getLogger("sidecar")


_Finished = tuple[float, str, Exchange, int, Times, bytes, bool]
"""Kept as it is and only written out when asked for: most are never looked at."""


class Observer:
    """The observer of one process, shared by all its ranks."""

    def __init__(self, endpoints: Endpoints, budget: Recomputes) -> None:
        self._endpoints = endpoints
        self._budget = budget
        self._limited = Limited(_log)
        self._recent: deque[_Finished] = deque(maxlen=DECISIONS_KEPT)
        self.in_flight = {"prefill": 0, "decode": 0, "release": 0}
        self._breakers: dict[str, State] = {}
        self._was_effective = True
        self.prefix_indexes: list[Sized] = []
        """One for each rank whose KV events are followed."""
        self.certificate_ends: Callable[[], float] = lambda: 0.0
        """When the serving certificate ends, as Unix time; 0.0: there is none."""
        self.discovery: Discovery | None = None
        """Where endpoints are found, if anywhere. It reports its failures here, so it is made later."""

        self.requests: Counter[tuple[str, str, str, str]] = Counter(
            "requests",
            "Requests by API, decision, its reason and the status sent",
            ("api", "decision", "reason", "status"),
        )
        self.attempts: Counter[tuple[str]] = Counter("prefill_attempts", "Prefill legs by outcome", ("outcome",))
        self.fallbacks: Counter[tuple[str, str]] = Counter(
            "fallbacks", "Remote prefills that ended as a local recompute", ("stage", "reason")
        )
        self.handoffs: Counter[tuple[str]] = Counter("handoffs", "Handoffs by what became of them", ("outcome",))
        self.ttft: Histogram[tuple[str]] = Histogram(
            "ttft_seconds",
            "From the complete request to the first byte of a 200 answer's body",
            ("decision",),
            _SECONDS,
        )
        self.itl: Histogram[tuple[str]] = Histogram(
            "itl_seconds",
            "Inter-token latency of a whole stream: from its first byte to its end, over its events but the first",
            ("decision",),
            _GAP_SECONDS,
        )
        self.prefill_time: Histogram[tuple[()]] = Histogram(
            "prefill_seconds", "From the prefill leg's start to its whole answer", (), _SECONDS
        )
        self.decode_time: Histogram[tuple[()]] = Histogram(
            "decode_first_byte_seconds", "From the decode leg's start to the first byte to the client", (), _SECONDS
        )
        self.overhead: Histogram[tuple[()]] = Histogram(
            "overhead_seconds", "Time to first byte less what the engines took", (), _OVERHEAD_SECONDS
        )
        self.handshakes: Counter[tuple[str]] = Counter(
            "nixl_handshakes", "Handshakes of the decode engine, and offences, at the relay", ("outcome",)
        )
        self.handshake_time: Histogram[tuple[()]] = Histogram(
            "nixl_handshake_seconds", "From a handshake's question to its answer", (), _OVERHEAD_SECONDS
        )
        self.kv_events: Counter[tuple[str]] = Counter(
            "kv_events", "The decode engine's KV events by type, and what went wrong with their stream", ("type",)
        )
        self.static_decisions: Counter[tuple[str]] = Counter(
            "static_decisions",
            "Decisions without the cost rule, by cause: off, stale, unfitted, unseen",
            ("cause",),
        )
        self.prediction: Histogram[tuple[str]] = Histogram(
            "prediction_ratio",
            "Time to first byte of a stream over what the cost rule had predicted for the way it took",
            ("decision",),
            _RATIOS,
        )
        self.warmups: Counter[tuple[str]] = Counter(
            "warmups", "Tiny requests that make a new pair of engines connect", ("outcome",)
        )
        self.tls_handshakes: Counter[tuple[str]] = Counter(
            "tls_handshakes", "TLS handshakes of clients on the serving port by outcome", ("outcome",)
        )
        self.traces: Counter[tuple[str]] = Counter(
            "traces", "Traced requests by what became of their spans: exported, failed, overflow", ("outcome",)
        )
        self.discovery_errors: Counter[tuple[str]] = Counter(
            "discovery_errors", "Failed attempts to hear of prefill endpoints", ("reason",)
        )
        self.decision_time: Histogram[tuple[()]] = Histogram(
            "decision_seconds", "From the complete request to the decision", (), _OVERHEAD_SECONDS
        )
        self.pauses: Histogram[tuple[str]] = Histogram(
            "pause_seconds",
            "Time in which the process did nothing but tidy its memory: a generation of the collector, or trim",
            ("cause",),
            _OVERHEAD_SECONDS,
        )
        self.collection = Collection(
            (
                self.requests,
                self.attempts,
                self.fallbacks,
                self.handoffs,
                self.ttft,
                self.itl,
                self.prefill_time,
                self.decode_time,
                self.overhead,
                self.decision_time,
                self.pauses,
                self.handshakes,
                self.handshake_time,
                self.kv_events,
                Gauge(
                    "prefix_index_blocks",
                    "KV blocks that the decode engine is known to hold",
                    (),
                    lambda: [((), float(sum(map(len, self.prefix_indexes))))],
                ),
                self.static_decisions,
                self.prediction,
                self.warmups,
                self.tls_handshakes,
                self.traces,
                Gauge(
                    "tls_certificate_not_after_seconds",
                    "Unix time at which the serving port's certificate ends; none without TLS",
                    (),
                    lambda: [((), ends)] if (ends := self.certificate_ends()) else [],
                ),
                self.discovery_errors,
                Gauge(
                    "discovery_endpoints",
                    "Prefill endpoints that --discovery tells of; only ready ones get requests",
                    ("state",),
                    self._read_discovered,
                ),
                Gauge(
                    "discovery_age_seconds",
                    "Since --discovery last told or confirmed anything",
                    (),
                    lambda: [((), self.discovery.age_s)] if self.discovery is not None else [],
                ),
                Gauge(
                    "inflight", "Open legs", ("leg",), lambda: [((leg,), n) for leg, n in self.in_flight.items()]
                ),
                Gauge("tasks", "asyncio tasks of the process", (), lambda: [((), _tasks())]),
                Gauge("recompute_inflight", "Recomputes that hold budget", (), lambda: [((), budget.in_flight)]),
                Gauge("breaker_state", "0 closed, 1 half open, 2 open", ("prefill",), self._read_breakers),
                Gauge(
                    "prefill_inflight",
                    "Open prefill legs by endpoint, of those that have any",
                    ("prefill",),
                    lambda: [((one.label,), float(one.in_flight)) for one in endpoints if one.in_flight],
                ),
                Gauge(
                    "prefill_blocked",
                    "1 for an endpoint from which nothing can be pulled at present",
                    ("prefill", "reason"),
                    self._read_blocked,
                ),
                Gauge(
                    "effective",
                    "0 when remote prefills are paid for and bring no KV",
                    (),
                    lambda: [((), float(endpoints.effective))],
                ),
                Gauge(
                    "build_info",
                    "Always 1",
                    ("version", "python"),
                    lambda: [((__version__, platform.python_version()), 1.0)],
                ),
            )
        )

    def _read_discovered(self) -> Iterable[tuple[tuple[str, ...], float]]:
        if self.discovery is None:
            return []
        return [((standing.value,), float(count)) for standing, count in self.discovery.counts()]

    def _read_breakers(self) -> Iterable[tuple[tuple[str, ...], float]]:
        return [((endpoint.label,), float(endpoint.breaker.state)) for endpoint in self._endpoints]

    def kv_event(self, kind: str, count: int) -> None:
        """So many KV events of one type, or one trouble with their stream."""
        self.kv_events.add((kind,), count)

    def handshake(self, outcome: str, elapsed_s: float) -> None:
        """The relay answered a handshake, or was offended."""
        self.handshakes.add((outcome,))
        self.handshake_time.observe((), elapsed_s)

    def warmed_up(self, outcome: str) -> None:
        """A warm-up of a pair ended."""
        self.warmups.add((outcome,))

    def traced(self, outcome: str, requests: int) -> None:
        """The spans of so many requests were sent, or not."""
        self.traces.add((outcome,), requests)

    def tls_handshake(self, outcome: str, detail: str) -> None:
        """A client's TLS handshake ended."""
        self.tls_handshakes.add((outcome,))
        if outcome != "ok":
            self._limited.warning(f"tls {outcome}", "TLS handshake with a client failed: %s", detail)

    def discovery_failed(self, reason: str) -> None:
        """The source of endpoints could not tell."""
        self.discovery_errors.add((reason,))

    def forget(self, endpoint: Endpoint) -> None:
        """Nothing is kept for the endpoint any more."""
        self._breakers.pop(endpoint.label, None)

    def _read_blocked(self) -> Iterable[tuple[tuple[str, ...], float]]:
        return [((endpoint.label, endpoint.blocked), 1.0) for endpoint in self._endpoints if endpoint.blocked]

    # -- sidecar.edge.service.Observer --

    def decided(self, decision: Decision, elapsed_s: float) -> None:
        self.decision_time.observe((), elapsed_s)
        if decision.reason == "no_usable_prefill":
            why = decision.detail
            self._limited.warning(
                f"no usable prefill: {why}", "no usable prefill, so what --on-prefill-failure says: %s", why
            )
        elif decision.reason == "model":  # perhaps meant so: said once an hour, not all the time
            self._limited.warning(f"model: {decision.detail}", "%s", decision.detail, again_after_s=3600.0)
        if decision.verdict is not None and decision.verdict.static:
            self.static_decisions.add((decision.verdict.static,))

    def prefill_attempt(self, outcome: str) -> None:
        self.attempts.add((outcome,))

    def leg_started(self, leg: str) -> None:
        self.in_flight[leg] += 1

    def leg_ended(self, leg: str) -> None:
        self.in_flight[leg] -= 1

    def refused(self, row: Row) -> None:
        self.requests.add(("none", Kind.REFUSED.value, row.reason, str(row.status)))

    def engine_gone(self, fault: str, detail: str) -> None:
        self._limited.warning(f"engine {fault}", "decode engine: no connection (%s)", detail)

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
        what = exchange.what.value
        self.requests.add((api, what, exchange.reason, str(status) if status else "none"))
        for outcome in exchange.handoff_outcomes:
            self.handoffs.add((outcome,))
        self._time(what, status, times, trace_id, is_stream=exchange.is_event_stream)
        self._compare(exchange, status, times)
        if api != "other":
            self._recent.append((time.time(), api, exchange, status, times, request_id, client_left))
        if exchange.faults:
            self._tell_faults(exchange, request_id)
        if exchange.prefill_endpoint is not None:
            self.tell_changes(exchange.prefill_endpoint)

    def decisions(self) -> list[dict[str, Any]]:
        """The last decisions, newest first."""
        return [_decision_record(*finished) for finished in reversed(self._recent)]

    def endpoints(self) -> dict[str, Any]:
        """What is known of the prefill endpoints."""
        return shown(self._endpoints, self.discovery)

    def _time(self, what: str, status: int, times: Times, trace_id: str, *, is_stream: bool) -> None:
        if times.prefill_done:
            self.prefill_time.observe((), times.prefill_done - times.prefill_sent)
        if not times.first_byte or status != 200:
            return
        self.ttft.observe((what,), times.first_byte - times.complete, trace_id)
        if is_stream and times.pieces > 1:
            self.itl.observe((what,), (times.end - times.first_byte) / (times.pieces - 1), trace_id)
        self.decode_time.observe((), times.first_byte - times.decode_sent)
        self.overhead.observe((), _overhead_s(times))

    def _compare(self, exchange: Exchange, status: int, times: Times) -> None:
        """Predicted against actual, where a stream's first byte tells when the prompt was through."""
        verdict = exchange.decision.verdict
        if verdict is None:
            return
        if verdict.static or status != 200 or not (times.first_byte and exchange.is_event_stream):
            return
        if exchange.fell_back is None:
            predicted = verdict.remote_seconds if verdict.remote else verdict.local_seconds
            ratio = (times.first_byte - times.complete) / (predicted or 1e-6)
            self.prediction.observe((exchange.what.value,), ratio)

    def _tell_faults(self, exchange: Exchange, request_id: bytes) -> None:
        for fault in exchange.faults:
            if fault.row.fault in _NO_NEWS or fault.row.stage is Stage.READING:
                continue
            self._limited.warning(
                f"{fault.row.reason} {fault.endpoint}",
                "%s%s: %s%s (request %s)",
                fault.row.reason,
                f" {fault.endpoint}" if fault.endpoint else "",
                fault.row.message,
                f": {fault.detail}" if fault.detail else "",
                request_id.decode("ascii", "replace") or "without an id",
            )
        row = exchange.fell_back
        if row is not None:
            self.fallbacks.add((str(row.stage), row.fault))

    def tell_changes(self, endpoint: Endpoint | None) -> None:
        """Logs what requests have changed of an endpoint's standing, and of remote prefill as a whole."""
        if endpoint is not None:
            self._tell_breaker(endpoint)
        if self._endpoints.effective is not self._was_effective:
            self._was_effective = self._endpoints.effective
            if self._was_effective:
                _log.info("remote prefill is effective again")
            else:
                _log.error(
                    "remote prefills are paid for and bring no KV: check the prefill engines' --kv-transfer-config"
                )

    def _tell_breaker(self, endpoint: Endpoint) -> None:
        state = endpoint.breaker.state if not endpoint.forgotten else State.CLOSED
        was = self._breakers.get(endpoint.label, State.CLOSED)
        if state is not was:
            if state is State.CLOSED:
                self._breakers.pop(endpoint.label, None)
            elif len(self._breakers) < 4096:
                self._breakers[endpoint.label] = state
            level = logging.WARNING if state is State.OPEN else logging.INFO
            _log.log(level, "prefill endpoint %s: breaker %s", endpoint.label, state.name.lower().replace("_", " "))


def _tasks() -> int:
    """Those of the loop that the scrape runs on, which is the only one; 0 outside of it."""
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0


def _overhead_s(times: Times) -> float:
    """The time to the first byte that no engine took."""
    return max(0.0, times.decode_sent - times.complete - times.engines_s)


def _decision_record(
    at: float, api: str, exchange: Exchange, status: int, times: Times, request_id: bytes, client_left: bool
) -> dict[str, Any]:
    """What `/decisions` shows: inputs and reason, no prompt."""
    decision = exchange.decision
    record: dict[str, Any] = {
        "time": at,
        "request_id": request_id.decode("ascii", "replace"),
        "api": api,
        "decided": decision.kind.value,
        "decided_reason": decision.reason,
        "decision": exchange.what.value,
        "reason": exchange.reason,
        "estimated_prompt_tokens": decision.estimated_tokens,
        "status": status,
        "client_left": client_left,
        "seconds": round(times.end - times.complete, 6),
    }
    if decision.detail:
        record["detail"] = decision.detail
    if decision.inputs is not None:
        record["inputs"] = msgspec.to_builtins(decision.inputs)
    if decision.known is not None and decision.known.answer:
        record["cached_answer_tokens"] = decision.known.answer
    if decision.verdict is not None:
        record["predicted"] = msgspec.to_builtins(decision.verdict)
    if decision.candidates:
        record["candidates"] = [endpoint.label for endpoint in decision.candidates[:16]]
    if exchange.prefill_endpoint is not None:
        record["prefill"] = exchange.prefill_endpoint.label
    if exchange.handoff_outcomes:
        record["handoffs"] = exchange.handoff_outcomes
    if times.prefill_done:
        record["prefill_seconds"] = round(times.prefill_done - times.prefill_sent, 6)
    if times.first_byte:
        record["ttft_seconds"] = round(times.first_byte - times.complete, 6)
    if times.first_byte and times.decode_sent:
        record["decode_first_byte_seconds"] = round(times.first_byte - times.decode_sent, 6)
        record["overhead_seconds"] = round(_overhead_s(times), 6)
    if exchange.faults:
        record["faults"] = [
            {"reason": fault.row.reason, "prefill": fault.endpoint, "detail": fault.detail}
            for fault in exchange.faults
        ]
    return record
