"""The tracer's queue, its addresses and its patience with a collector."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from sidecar.edge.request import Request
from sidecar.edge.service import Times
from sidecar.tracing import tracer as room
from sidecar.tracing.tracer import Tracer


def request(*headers: tuple[bytes, bytes]) -> Request:
    return Request(b"GET", b"/v1/models?key=hidden", [(b"Host", b"x"), *headers], http_1_0=False, started_at=0.0)


def tracer(counted: Counter[str] | None = None, ratio: float = 1.0, endpoint: str = "", **environ: str) -> Tracer:
    counts: Counter[str] = Counter() if counted is None else counted
    return Tracer(ratio, endpoint, environ, lambda outcome, n: counts.update({outcome: n}))


def finish(one: Tracer) -> None:
    asked = request()
    trace = one.begin(asked)
    assert trace is not None
    one.finished(trace, asked, None, None, None, 200, Times(complete=1.0, end=2.0), False)


@pytest.mark.parametrize(
    ("endpoint", "environ", "url"),
    [
        ("", {}, "http://localhost:4318/v1/traces"),
        ("http://c:4318/", {}, "http://c:4318/v1/traces"),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://c/otlp"}, "https://c/otlp/v1/traces"),
        ("http://a", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://b"}, "http://a/v1/traces"),
        ("", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t/x"}, "http://t/x"),
        ("http://a", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t/x"}, "http://a/v1/traces"),
    ],
)
def test_where_traces_go(endpoint: str, environ: dict[str, str], url: str) -> None:
    assert tracer(endpoint=endpoint, **environ).url == url


def test_untraced_requests_keep_their_headers() -> None:
    headers = [(b"Traceparent", b"00-%b-%b-00" % (b"a" * 32, b"b" * 16)), (b"tracestate", b"x=1")]
    asked = request(*headers)
    assert tracer().begin(asked) is None
    assert asked.headers[1:] == headers


@pytest.mark.parametrize(
    ("parent", "left"),
    [(b"00-%b-%b-01" % (b"a" * 32, b"b" * 16), [b"tracestate"]), (b"nonsense", [])],
    ids=["valid", "invalid"],
)
def test_traced_requests_lose_the_context_that_is_continued(parent: bytes, left: list[bytes]) -> None:
    asked = request((b"TraceParent", parent), (b"tracestate", b"x=1"))
    assert tracer().begin(asked) is not None
    assert [name for name, _ in asked.headers[1:]] == left
    assert b"TraceParent" not in asked.relay_block(inflated=False, with_id=False)


def test_full_queue_drops_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "QUEUED_REQUESTS", 3)
    counted: Counter[str] = Counter()
    one = tracer(counted)
    for _ in range(5):
        finish(one)
    assert counted == {"overflow": 2}


@pytest.mark.parametrize(
    ("answer", "rejected"),
    [
        (b"{}", 0),
        (b'{"partialSuccess":{}}', 0),
        (b'{"partialSuccess":{"rejectedSpans":"3","errorMessage":"x"}}', 3),
        (b'{"partialSuccess":{"rejectedSpans":3}}', 3),
        (b'{"partialSuccess":null}', 0),
        (b"[]", 0),
        (b"\xff", 0),
        (b"", 0),
    ],
)
def test_partial_success(answer: bytes, rejected: int) -> None:
    assert room._rejected(answer) == rejected


class Silent(asyncio.Protocol):
    """Takes everything and says nothing."""


def test_end_does_not_wait_for_a_dead_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be sent is counted; closing takes no longer than `LAST_WORDS_S`."""
    monkeypatch.setattr(room, "LAST_WORDS_S", 0.2)
    counted: Counter[str] = Counter()

    async def play() -> float:
        loop = asyncio.get_running_loop()

        server = await loop.create_server(Silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        one = tracer(counted, endpoint=f"http://127.0.0.1:{port}")
        task = asyncio.ensure_future(one.run())
        await asyncio.sleep(0)
        finish(one)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        began = loop.time()
        await one.close()
        took_s = loop.time() - began
        server.close()
        await asyncio.sleep(0.05)  # the silent end hears of it
        return took_s

    assert asyncio.run(play()) < 1.0
