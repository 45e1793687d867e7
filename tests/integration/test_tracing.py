"""Traces as a collector gets them: one request, one server span, and its legs below it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Self
from urllib.request import Request, urlopen

import pytest

from sidecar.tracing.tracer import LAST_WORDS_S
from tests.engine import Fault, Received, ThreadedEngine
from tests.integration import collector as real_collector
from tests.integration.apis import CHAT, COMPLETIONS
from tests.integration.sidecar import AT_ONCE_S, CANARY, Rig, Sidecar, chat, completion, eventually, quick
from tests.ports import free_ports

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = ("traceparent", f"00-{TRACE}-{PARENT}-01")
NOT_SAMPLED = ("TraceParent", f"00-{TRACE}-{PARENT}-00")
STATE = ("TraceState", "vendor=1")

Span = dict[str, Any]


class Collector:
    """A small OTLP/HTTP collector."""

    def __init__(self) -> None:
        collector = self
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        self.status = 200
        self.delay_s = 0.0

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                assert self.headers["content-type"] == "application/json"
                body = self.rfile.read(int(self.headers["content-length"]))
                time.sleep(collector.delay_s)
                if collector.status == 200:
                    collector._take(json.loads(body))
                self.send_response(collector.status)
                self.send_header("content-length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = Thread(target=self._server.serve_forever, daemon=True)

    def _take(self, document: dict[str, Any]) -> None:
        for resource in document["resourceSpans"]:
            self.resources.append(attributes(resource["resource"]))
            for scope in resource["scopeSpans"]:
                self.spans += scope["spans"]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def trace(self, count: int) -> dict[str, Span]:
        """The spans of the only trace, by name, once there are so many."""
        eventually(lambda: len(self.spans) >= count)
        assert len(self.spans) == count, [span["name"] for span in self.spans]
        assert len({span["traceId"] for span in self.spans}) == 1
        return {span["name"]: span for span in self.spans}


def attributes(holder: dict[str, Any]) -> dict[str, Any]:
    def plain(value: dict[str, Any]) -> Any:
        ((kind, inner),) = value.items()
        if kind == "arrayValue":
            return [plain(one) for one in inner["values"]]
        return int(inner) if kind == "intValue" else inner

    return {one["key"]: plain(one["value"]) for one in holder["attributes"]}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


class Traced:
    """A rig that traces to a collector."""

    def __init__(self, stack: ExitStack, url: str, *flags: str, **environment: str) -> None:
        decode = stack.enter_context(ThreadedEngine(port=free_ports(), side_channel_port=free_ports()))
        prefill = stack.enter_context(ThreadedEngine())
        sidecar = Sidecar(
            *("--disagg", "on", "--prefill-allow", "127.0.0.0/8", "--recompute-max-concurrent", "100"),
            *("--model-server-port", str(decode.port)),
            *("--local-side-channel", f"127.0.0.1:{decode.side_channel_port}"),
            *("--tracing", "on", "--otlp-endpoint", url, "--trace-sample", "0"),
            *flags,
            environment=environment,
        )
        stack.callback(sidecar.kill)
        stack.callback(sidecar.stop)
        self.rig = Rig(sidecar, prefill, decode)


def traced(stack: ExitStack, collector: Collector, *flags: str, **environment: str) -> Rig:
    return Traced(stack, collector.url, *flags, **environment).rig


def context_of(received: Received) -> tuple[str, str, str]:
    (value,) = [value.decode() for name, value in received.headers if name.lower() == b"traceparent"]
    found = re.fullmatch("00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})", value)
    assert found is not None
    return found.group(1), found.group(2), found.group(3)


def times(span: Span) -> tuple[int, int]:
    return int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])


def test_split_request(collector: Collector) -> None:
    """Parentage, times, attributes, and the context in both legs."""
    with ExitStack() as stack:
        rig = traced(
            stack, collector, OTEL_SERVICE_NAME="decode-pod", OTEL_RESOURCE_ATTRIBUTES="k8s.pod.name=p%2D0"
        )
        began = time.time_ns()
        answer = rig.post(CHAT, chat(stream=True), [SAMPLED, STATE])
        ended = time.time_ns()
        found = collector.trace(4)
        record = rig.decision_on(answer)
    assert set(found) == {"POST /v1/chat/completions", "prefill", "handoff", "decode"}
    server, prefill, handoff, decode = (
        found["POST /v1/chat/completions"],
        *map(found.get, ("prefill", "handoff", "decode")),
    )
    assert (server["traceId"], server["parentSpanId"], server["kind"]) == (TRACE, PARENT, 2)
    assert len({span["spanId"] for span in found.values()}) == 4
    for child in (prefill, handoff, decode):
        assert child["parentSpanId"] == server["spanId"]
        assert times(server)[0] <= times(child)[0] <= times(child)[1] <= times(server)[1]
    assert began <= times(server)[0] <= times(server)[1] <= ended + int(AT_ONCE_S * 1e9)
    assert times(prefill)[1] == times(handoff)[0]
    assert times(handoff)[1] <= times(decode)[0]
    assert context_of(rig.prefilled()[0]) == (TRACE, prefill["spanId"], "01")
    assert context_of(rig.decoded()[0]) == (TRACE, decode["spanId"], "01")
    for leg in (rig.prefilled()[0], rig.decoded()[0]):
        assert leg.header("tracestate") == "vendor=1"
    said = attributes(server)
    assert said["http.request.method"] == "POST"
    assert said["http.route"] == CHAT
    assert said["http.response.status_code"] == 200
    assert (said["pd.decision"], said["pd.reason"]) == (record["decision"], record["reason"]) == ("remote", "on")
    assert said["pd.request_id"] == answer.header("x-request-id")
    assert server["events"][0]["name"] == "pd.first_byte"
    assert attributes(prefill)["server.port"] == rig.prefill.port
    assert attributes(prefill)["pd.prompt_tokens"] > 0
    assert attributes(handoff)["pd.handoff.outcome"] == "used"
    assert attributes(decode)["pd.handoff.attached"] is True
    # Logs, metrics and spans are made from the same times.
    start, end = times(prefill)
    assert (end - start) / 1e9 == pytest.approx(record["prefill_seconds"], abs=1e-5)
    assert "status" not in server
    (resource,) = collector.resources
    assert (resource["service.name"], resource["k8s.pod.name"]) == ("decode-pod", "p-0")
    assert CANARY not in json.dumps(collector.spans)
    for key in attributes(server) | attributes(prefill) | attributes(handoff) | attributes(decode):
        assert key.startswith(("pd.", "http.", "server.")), "one naming scheme"


@pytest.mark.parametrize("given", [[], [NOT_SAMPLED, STATE]], ids=["no context", "not sampled"])
def test_untraced_requests_pass_as_they_are(collector: Collector, given: list[tuple[str, str]]) -> None:
    with ExitStack() as stack:
        rig = traced(stack, collector)
        for _ in range(3):
            assert rig.post(COMPLETIONS, completion(), given).status == 200
        for leg in (*rig.prefilled(), *rig.decoded()):
            got = [
                (name.decode(), value.decode()) for name, value in leg.headers if name.lower().startswith(b"trace")
            ]
            assert got == given
        time.sleep(1.2)
        assert rig.sidecar.metrics()("traces_total") == 0
    assert not collector.spans


def test_own_traces(collector: Collector) -> None:
    """Without a context of the client's a trace begins here; relayed requests are told by their method alone."""
    with ExitStack() as stack:
        rig = traced(stack, collector, "--trace-sample", "1")
        assert rig.sidecar.ask("GET", f"/v1/models?key={CANARY}").status == 200
        found = collector.trace(2)
        assert set(found) == {"GET (relayed)", "decode"}
        assert "parentSpanId" not in found["GET (relayed)"]
        eventually(lambda: rig.sidecar.metrics()("traces_total", outcome="exported") == 1)
    assert CANARY not in json.dumps(collector.spans)


def test_exemplars(collector: Collector) -> None:
    """From a slow bucket of the dashboard to the trace that fell into it; for who asks for OpenMetrics."""
    with ExitStack() as stack:
        rig = traced(stack, collector)
        assert rig.post(COMPLETIONS, completion(stream=True), [SAMPLED]).status == 200
        request = Request(f"http://127.0.0.1:{rig.sidecar.admin_port}/metrics")
        assert TRACE not in urlopen(request).read().decode()
        request.add_header("accept", "application/openmetrics-text; version=1.0.0")
        lines = urlopen(request).read().decode().splitlines()
    named = [line for line in lines if TRACE in line]
    assert {line.partition(",le=")[0] for line in named} == {
        'pd_sidecar_ttft_seconds_bucket{decision="remote"',
        'pd_sidecar_itl_seconds_bucket{decision="remote"',
    }


def test_failed_prefill(collector: Collector) -> None:
    with ExitStack() as stack:
        rig = traced(stack, collector)
        rig.prefill.fault(Fault(status=500), path=COMPLETIONS)
        assert rig.post(COMPLETIONS, completion(), [SAMPLED]).status == 200
        found = collector.trace(3)
    prefill, server = found["prefill"], found["POST /v1/completions"]
    assert prefill["status"] == {"code": 2, "message": "prefill_server_error"}
    assert attributes(server)["pd.decision"] == "recompute"
    assert attributes(server)["pd.faults"][0].startswith("prefill_server_error 127.0.0.1:")
    assert attributes(found["decode"])["pd.handoff.attached"] is False
    assert "status" not in server, "the client had its answer"


def test_failed_pull(collector: Collector) -> None:
    """Two decode legs: each knows its own span."""
    with ExitStack() as stack:
        rig = traced(stack, collector)
        rig.decode.fault(Fault(status=500), path=COMPLETIONS, times=1)
        assert rig.post(COMPLETIONS, completion(), [SAMPLED]).status == 200
        collector.trace(5)
        legs = [span for span in collector.spans if span["name"] == "decode"]
        assert [context_of(leg)[1] for leg in rig.decoded()] == [span["spanId"] for span in legs]
    failed, good = legs
    assert failed["status"]["message"] == "pull_server_error"
    assert "status" not in good
    assert times(failed)[1] <= times(good)[0]


def test_refused_request(collector: Collector) -> None:
    with ExitStack() as stack:
        rig = traced(stack, collector)
        assert rig.post(COMPLETIONS, b"{not JSON", [SAMPLED]).status == 400
        span = collector.trace(1)["POST /v1/completions"]
    assert attributes(span)["pd.reason"] == "reading_bad_json"
    assert attributes(span)["http.response.status_code"] == 400


def test_dead_engine_is_an_error(collector: Collector) -> None:
    with ExitStack() as stack:
        rig = traced(stack, collector)
        rig.target = ""
        rig.decode.refuse()
        assert rig.post(COMPLETIONS, completion(), [SAMPLED]).status == 503
        span = collector.trace(1)["POST /v1/completions"]
    assert span["status"] == {"code": 2, "message": "decode_refused"}


@pytest.mark.parametrize("how", ["refuses", "fails", "is silent"])
def test_dead_collector_costs_requests_nothing(collector: Collector, how: str) -> None:
    """Its spans are dropped and counted, and said in one line; the end is not held up."""
    if how == "fails":
        collector.status = 500
    elif how == "is silent":
        collector.delay_s = 2 * AT_ONCE_S
    url = f"http://127.0.0.1:{free_ports()}" if how == "refuses" else collector.url
    with ExitStack() as stack:
        rig = Traced(stack, url, *quick(), "--trace-sample", "1").rig
        began = time.monotonic()
        for _ in range(10):
            assert rig.post(COMPLETIONS, completion()).status == 200
        assert time.monotonic() - began < AT_ONCE_S
        if how != "is silent":
            eventually(lambda: rig.sidecar.metrics()("traces_total", outcome="failed") >= 1)
            assert rig.sidecar.log.count("requests dropped") == 1
        began = time.monotonic()
        rig.sidecar.stop()
        assert time.monotonic() - began < LAST_WORDS_S + AT_ONCE_S


def test_end_sends_what_is_left(collector: Collector) -> None:
    with ExitStack() as stack:
        rig = traced(stack, collector)
        assert rig.post(COMPLETIONS, completion(), [SAMPLED]).status == 200
        rig.sidecar.stop()
    assert len(collector.spans) == 4


def test_a_real_collector_understands_it(tmp_path: Path) -> None:
    """Its receiver reads what ours only takes for granted: the JSON encoding of OTLP."""
    collector = real_collector.program()
    if collector is None:
        pytest.skip("the collector's wheel is for Linux on x86_64 with glibc 2.34")
    with real_collector.running(collector, tmp_path) as running, ExitStack() as stack:
        rig = Traced(stack, running.url).rig
        assert rig.post(CHAT, chat(stream=True), [SAMPLED]).status == 200
        eventually(lambda: "Span #3" in running.said and "pd.handoff.attached" in running.said)
        said = running.said
        eventually(lambda: rig.sidecar.metrics()("traces_total", outcome="exported") == 1)
    assert said.count(f"Trace ID       : {TRACE}") == 4
    assert said.count(f"Parent ID      : {PARENT}") == 1
    assert "-> service.name: Str(pd-sidecar)" in said
    assert "-> http.response.status_code: Int(200)" in said
    assert "-> pd.handoff.attached: Bool(true)" in said
    assert CANARY not in said
