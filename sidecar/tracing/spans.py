"""What a finished request was, as OTLP spans: server, prefill, handoff and decode. No I/O.

Names and forms: opentelemetry-proto 1.x, `trace.proto`, in the JSON encoding of OTLP (ids in hex, 64-bit integers
as text). Attributes that OpenTelemetry's conventions name keep those names; all others begin with `pd.`. Nothing
of them comes from a prompt, a key or a query string.
"""

import secrets
from typing import Any, NamedTuple

from sidecar.decision.guards import Kind
from sidecar.edge.service import Times
from sidecar.exchange.failures import Row, Stage
from sidecar.exchange.life import Exchange, Fault
from sidecar.tracing.context import Trace

Span = dict[str, Any]

INTERNAL, SERVER, CLIENT = 1, 2, 3
_ERROR = 2


class Finished(NamedTuple):
    """One traced request at its end."""

    trace: Trace
    method: str
    path: str
    """"" for what is relayed: a client wrote it, and it may say anything."""
    exchange: Exchange | None
    """None: refused before there was anything to decide."""
    refusal: Row | None
    status: int
    times: Times
    request_id: str
    client_left: bool
    offset_s: float
    """What makes Unix times of the monotonic ones."""


def spans(done: Finished) -> list[Span]:
    """The server's span first, then its children in the order of time."""
    found = [_server(done)]
    exchange = done.exchange
    if exchange is not None:
        if done.trace.prefill_id:
            found.append(_prefill(done, exchange))
        if done.times.handoff_done:
            found.append(_handoff(done, exchange))
        found += _decode(done, exchange)
    return found


def _server(done: Finished) -> Span:
    times, exchange = done.times, done.exchange
    attributes: dict[str, Any] = {"http.request.method": done.method, "pd.request_id": done.request_id}
    if done.path:
        attributes["http.route"] = done.path
    if done.status:
        attributes["http.response.status_code"] = done.status
    problem = ""
    if exchange is not None:
        decision = exchange.decision
        attributes |= {
            "pd.decision": exchange.what.value,
            "pd.reason": exchange.reason,
            "pd.decided": decision.kind.value,
            "pd.decided_reason": decision.reason,
            "pd.estimated_prompt_tokens": decision.estimated_tokens,
        }
        attributes |= _faults(exchange.faults)
        if any(
            fault.row.stage is Stage.STREAMING and fault.row.fault != "client_left" for fault in exchange.faults
        ):
            problem = exchange.faults[-1].row.reason
    elif done.refusal is not None:
        attributes |= {"pd.decision": Kind.REFUSED.value, "pd.reason": done.refusal.reason}
    if done.client_left:
        attributes["pd.client_left"] = True
    if done.status >= 500:
        problem = str(attributes.get("pd.reason", ""))
    name = f"{done.method} {done.path}" if done.path else f"{done.method} (relayed)"
    span = _span(done, done.trace.span_id, done.trace.parent_id, name, SERVER, times.complete, times.end)
    _finish(span, attributes, problem)
    if times.first_byte:
        span["events"] = [{"timeUnixNano": _nanos(done, times.first_byte), "name": "pd.first_byte"}]
    return span


def _prefill(done: Finished, exchange: Exchange) -> Span:
    times = done.times
    faults = [fault for fault in exchange.faults if fault.row.stage is Stage.PREFILL]
    failed = not times.handoff_done and (bool(faults) or not times.prefill_done)
    end = (times.decode_sent or times.end) if failed else times.prefill_done
    attributes: dict[str, Any] = _endpoint(exchange)
    if exchange.prompt_tokens:
        attributes["pd.prompt_tokens"] = exchange.prompt_tokens
        attributes["pd.cached_tokens"] = exchange.prefill_cached_tokens
    attributes |= _faults(faults)
    span = _child(done, done.trace.prefill_id, "prefill", CLIENT, times.prefill_sent, end)
    _finish(span, attributes, faults[-1].row.reason if failed and faults else "")
    return span


def _handoff(done: Finished, exchange: Exchange) -> Span:
    """From the prefill answer to the side channel's word on it."""
    faults = [fault for fault in exchange.faults if fault.row.stage is Stage.HANDOFF]
    outcome = exchange.handoff_outcomes[0] if exchange.handoff_outcomes else "none"
    attributes: dict[str, Any] = {"pd.handoff.outcome": outcome, **_endpoint(exchange), **_faults(faults)}
    span = _child(done, secrets.token_hex(8), "handoff", INTERNAL, done.times.prefill_done, done.times.handoff_done)
    _finish(span, attributes, faults[-1].row.reason if faults else "")
    return span


def _decode(done: Finished, exchange: Exchange) -> list[Span]:
    """One span for each leg that was sent; the last of them is the one that the client's answer came from."""
    times, found = done.times, []
    if not times.decode_sent:
        return []
    *earlier, last = done.trace.decode_ids
    for span_id in earlier:  # a pull that failed
        row = exchange.fell_back
        span = _child(done, span_id, "decode", CLIENT, times.handoff_done, times.decode_sent)
        _finish(span, {"pd.handoff.attached": True}, row.reason if row is not None else "")
        found.append(span)
    span = _child(done, last, "decode", CLIENT, times.decode_sent, times.end)
    attributes: dict[str, Any] = {"pd.handoff.attached": exchange.what is Kind.REMOTE}
    if done.status:
        attributes["http.response.status_code"] = done.status
    faults = [fault for fault in exchange.faults if fault.row.stage in (Stage.DECODE, Stage.STREAMING)]
    _finish(span, attributes | _faults(faults), faults[-1].row.reason if faults else "")
    if times.first_byte:
        span["events"] = [{"timeUnixNano": _nanos(done, times.first_byte), "name": "pd.first_byte"}]
    return [*found, span]


def _endpoint(exchange: Exchange) -> dict[str, Any]:
    endpoint = exchange.prefill_endpoint
    if endpoint is None:
        return {}
    return {"server.address": endpoint.address.host, "server.port": endpoint.address.port}


def _faults(faults: list[Fault]) -> dict[str, Any]:
    if not faults:
        return {}
    return {"pd.faults": [f"{fault.row.reason} {fault.endpoint}".rstrip() for fault in faults]}


# -- OTLP ----------------------------------------------------------------------------------------------------


def _nanos(done: Finished, at: float) -> str:
    return str(int((at + done.offset_s) * 1e9))


def _span(done: Finished, span_id: str, parent_id: str, name: str, kind: int, start: float, end: float) -> Span:
    span: Span = {
        "traceId": done.trace.trace_id,
        "spanId": span_id,
        "name": name,
        "kind": kind,
        "startTimeUnixNano": _nanos(done, start),
        "endTimeUnixNano": _nanos(done, max(start, end)),
    }
    if parent_id:
        span["parentSpanId"] = parent_id
    return span


def _child(done: Finished, span_id: str, name: str, kind: int, start: float, end: float) -> Span:
    return _span(done, span_id, done.trace.span_id, name, kind, start, end)


def _finish(span: Span, attributes: dict[str, Any], problem: str) -> None:
    span["attributes"] = [{"key": key, "value": value_of(value)} for key, value in attributes.items()]
    if problem:
        span["status"] = {"code": _ERROR, "message": problem}


def value_of(value: Any) -> dict[str, Any]:
    """An attribute's value."""
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, list):
        return {"arrayValue": {"values": [value_of(one) for one in value]}}
    return {"stringValue": str(value)}
