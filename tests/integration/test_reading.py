"""Requests that are malformed, too large, too slow or not HTTP at all: refused, the connection ended, no engine
called."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from tests.integration.apis import COMPLETIONS
from tests.integration.client import Answer, Cut
from tests.integration.sidecar import AT_ONCE_S, CANARY, MAX_BODY_BYTES, Rig, completion, eventually, quick

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
REFUSED: dict[str, tuple[bytes, int]] = {
    # line and field syntax
    "no version": (b"GET /\r\n\r\n", 505),
    "no target": (b"GET HTTP/1.1\r\n\r\n", 400),
    "lower-case method": (b"get / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "unknown method": (b"FROB / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "control in target": (b"GET /\x01 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "space in target": (b"GET /a b HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "NUL in target": (b"GET /v1/completions%00 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "space before colon": (b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length : 5\r\n\r\n", 400),
    "space before first field": (b"GET / HTTP/1.1\r\n Host: a\r\n\r\n", 400),
    "folded field": (b"GET / HTTP/1.1\r\nHost: a\r\nX: 1\r\n 2\r\n\r\n", 400),
    "NUL in value": (b"GET / HTTP/1.1\r\nHost: a\r\nX: a\0b\r\n\r\n", 400),
    "CR in value": (b"GET / HTTP/1.1\r\nHost: a\r\nX: a\rb\r\n\r\n", 400),
    "no name": (b"GET / HTTP/1.1\r\nHost: a\r\n: x\r\n\r\n", 400),
    "bad name": (b"GET / HTTP/1.1\r\nHost: a\r\nX(y): x\r\n\r\n", 400),
    # host
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    # two framings, and lengths that two parsers could read in two ways
    "length and chunked": (HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "chunked and length": (HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n", 400),
    "two lengths": (HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
    "twice the same length": (HEAD + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}", 400),
    "list of lengths": (HEAD + b"Content-Length: 2, 2\r\n\r\n{}", 400),
    "negative length": (HEAD + b"Content-Length: -1\r\n\r\n", 400),
    "signed length": (HEAD + b"Content-Length: +2\r\n\r\n{}", 400),
    "hexadecimal length": (HEAD + b"Content-Length: 0x2\r\n\r\n{}", 400),
    "empty length": (HEAD + b"Content-Length: \r\n\r\n", 400),
    "spaced length": (HEAD + b"Content-Length: 1 2\r\n\r\n{}", 400),
    "length beyond 64 bits": (HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n", 400),
    "gzip as transfer": (HEAD + b"Transfer-Encoding: gzip\r\n\r\n", 400),
    "gzip, chunked": (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
    "chunked, identity": (HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", 400),
    "xchunked": (HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 400),
    "two transfer fields": (
        HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        400,
    ),
    "chunked in HTTP/1.0": (
        b"POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    "chunk without size": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n\r\n{}\r\n0\r\n\r\n", 400),
    "chunk size signed": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n+2\r\n{}\r\n0\r\n\r\n", 400),
    "chunk size spaced": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n2 \r\n{}\r\n0\r\n\r\n", 400),
    "chunk size 0x": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0x2\r\n{}\r\n0\r\n\r\n", 400),
    "chunk size huge": (HEAD + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n{}\r\n0\r\n\r\n", 400),
    "chunk longer than said": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}{}\r\n0\r\n\r\n", 400),
    "chunk ends with LF": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\n{}\n0\n\n", 400),
    # other protocols
    "CONNECT": (b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "HTTP/0.9": (b"GET / HTTP/0.9\r\nHost: a\r\n\r\n", 505),
    "HTTP/1.2": (b"GET / HTTP/1.2\r\nHost: a\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)), 400),
    "SSH": (b"SSH-2.0-OpenSSH_9.6\r\n", 400),
    "Redis": (b"*1\r\n$4\r\nPING\r\n", 400),
    "NULs": (bytes(100), 400),
    # sizes
    "many fields": (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: 1\r\n" * 257 + b"\r\n", 431),
    "long field": (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 70_000 + b"\r\n\r\n", 431),
    "long target": (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 431),
    "endless field": (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 500_000, 431),
    "endless target": (b"GET /" + b"x" * 500_000, 431),
    "declared too large": (HEAD + b"Content-Length: 70000000\r\n\r\n", 413),
    # expectations
    "expectation": (HEAD + b"Expect: 200-ok\r\nContent-Length: 2\r\n\r\n", 417),
}


def exchange(rig: Rig, data: bytes, *, at_once: bool = True) -> Answer:
    with rig.sidecar.connect() as client:
        if at_once:
            client.send(data)
        else:
            for byte in data:
                client.send(bytes([byte]))
        answer = client.answer()
        assert answer.header("connection") == "close"
        assert client.at_end()
    return answer


@pytest.mark.parametrize(("data", "status"), REFUSED.values(), ids=REFUSED)
def test_refused(rig: Rig, data: bytes, status: int) -> None:
    answer = exchange(rig, data)
    assert answer.status == status
    assert answer.json["error"]["code"] == status
    assert answer.reason_code.startswith("reading_")
    assert not rig.decoded()


@pytest.mark.parametrize("name", ["folded field", "two lengths", "chunk size signed", "chunk longer than said"])
def test_refused_byte_by_byte(rig: Rig, name: str) -> None:
    """What is wrong is wrong however it is cut into packets."""
    data, status = REFUSED[name]
    assert exchange(rig, data.rstrip(b"\r\n0") if "chunk" in name else data, at_once=False).status == status
    assert not rig.decoded()


def test_garbage(rig: Rig) -> None:
    """Whatever bytes come: an answer or the end of the connection, and the process lives."""
    dice = random.Random(7)
    samples = [dice.randbytes(dice.randint(1, 3000)) for _ in range(60)]
    good = HEAD + b"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
    for _ in range(200):
        broken = bytearray(good)
        for _ in range(dice.randint(1, 4)):
            broken[dice.randrange(len(broken))] = dice.randrange(256)
        samples.append(bytes(broken))
    for sample in samples:
        with rig.sidecar.connect() as client:
            client.send(sample)
            client.half_close()
            client.rest()
    assert rig.sidecar.ask("GET", "/v1/models").status == 200


def test_nothing_behind_a_refused_request_is_read(rig: Rig) -> None:
    """A second request in the same packet is not one: who could not agree on the first cannot on the second."""
    first = HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    assert exchange(rig, first + b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n").status == 400
    assert not rig.decoded()


def test_refusal_waits_for_the_answers_before_it(rig: Rig) -> None:
    rig.decode.engine.limits.prefill_seconds_per_1k_tokens = 0.5
    with rig.sidecar.connect() as client:
        client.request("POST", COMPLETIONS, completion(), rig.headers())
        client.send(b"nonsense\r\n\r\n")
        assert client.answer("POST").status == 200
        assert client.answer().status == 400
        assert client.at_end()


def test_a_body_that_is_refused_is_still_answered(rigged: Callable[..., Rig]) -> None:
    """The client that goes on sending reads the 413, not a reset connection."""
    rig = rigged(*quick())
    with rig.sidecar.connect() as client:
        client.send(HEAD + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
        piece = b"80000\r\n" + b"x" * 524288 + b"\r\n"
        for _ in range(MAX_BODY_BYTES // 524288 + 3):
            client.send(piece)
            time.sleep(0.005)
        answer = client.answer("POST")
    assert answer.status == 413
    assert answer.reason_code == "reading_too_large"


@pytest.mark.parametrize(
    "target",
    [
        COMPLETIONS,
        "/v1/completions?x=1",
        "/v1/%63ompletions",
        "http://sidecar/v1/completions",
        "/invocations",
        "/tokenize",
    ],
)
def test_too_large_by_one_byte(rigged: Callable[..., Rig], target: str) -> None:
    rig = rigged(*quick())
    body = b'{"model":"sim","max_tokens":1,"prompt":"x","user":"' + b"u" * MAX_BODY_BYTES
    fitting = body[: MAX_BODY_BYTES - 2] + b'"}'
    assert rig.post(target, fitting).status in (200, 404)
    answer = rig.post(target, body[: MAX_BODY_BYTES - 1] + b'"}')
    assert answer.status == 413
    assert str(MAX_BODY_BYTES) in answer.json["error"]["message"]


# -- slow clients --------------------------------------------------------------------------------------------


def test_slow_head(rigged: Callable[..., Rig]) -> None:
    """A byte now and then does not renew the time that a head has."""
    rig = rigged(*quick())
    with rig.sidecar.connect() as client:
        began = time.monotonic()
        client.socket.settimeout(0.2)
        for byte in b"GET / HTTP/1.1\r\nHost: " + b"a" * 100:
            client.send(bytes([byte]))
            time.sleep(0.05)
            if time.monotonic() - began > 1.4:
                break
        client.socket.settimeout(5)
        assert client.answer().status == 408
        assert client.at_end()
    assert 0.5 < time.monotonic() - began < 0.6 + AT_ONCE_S


def test_silent_connection(rigged: Callable[..., Rig]) -> None:
    """Nobody to answer: it is just closed."""
    rig = rigged(*quick())
    with rig.sidecar.connect() as client:
        assert client.at_end()


def test_body_that_stops(rigged: Callable[..., Rig]) -> None:
    rig = rigged(*quick())
    with rig.sidecar.connect() as client:
        client.send(HEAD + b"Content-Length: 100\r\n\r\n{")
        assert client.answer("POST").status == 408
        assert client.at_end()
    assert not rig.decoded()


def test_slow_body_that_goes_on(rigged: Callable[..., Rig]) -> None:
    """Progress is what counts for a body: large ones may take long."""
    rig = rigged(*quick())
    body = b'{"model":"sim","max_tokens":1,"prompt":"%b"}' % (b"x" * 30)
    with rig.sidecar.connect() as client:
        client.send(HEAD + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body))
        for start in range(0, len(body), 10):
            client.send(body[start : start + 10])
            time.sleep(0.2)
        assert client.answer("POST").status == 200


@pytest.mark.parametrize("size", [100_000, 3_000_000])
def test_large_body_that_stops(rigged: Callable[..., Rig], size: int) -> None:
    rig = rigged(*quick())
    with rig.sidecar.connect() as client:
        client.send(HEAD + b"Content-Length: %d\r\n\r\n" % size + b"x" * (size - 1))
        assert client.answer("POST").status == 408
        assert client.at_end()


def test_streamed_body_that_stops(rigged: Callable[..., Rig]) -> None:
    """The engine has half of it already: its connection is closed."""
    rig = rigged(*quick())
    with rig.sidecar.connect() as client:
        client.send(
            b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n"
            b"Content-Type: multipart/form-data; boundary=x\r\n\r\n--x"
        )
        eventually(rig.decoded)
        client.rest()
    eventually(lambda: rig.decoded()[0].client_gone)


def test_idle_connection(rigged: Callable[..., Rig]) -> None:
    """Between requests a connection has its own, longer time; and it is over without a word."""
    rig = rigged(*quick())
    with rig.sidecar.connect() as client:
        client.request("GET", "/version")
        assert client.answer().status == 200
        time.sleep(0.9)
        client.request("GET", "/version")
        assert client.answer().status == 200
        began = time.monotonic()
        assert client.at_end()
        assert 1.3 < time.monotonic() - began < 1.5 + AT_ONCE_S


def test_an_answer_may_take_longer_than_any_client_deadline(rigged: Callable[..., Rig]) -> None:
    rig = rigged(*quick(), decode={"prefill_seconds_per_1k_tokens": 5.0})
    rig.target = ""
    assert rig.post(COMPLETIONS, completion()).status == 200


def test_client_that_vanishes_in_a_request_body(rig: Rig) -> None:
    for part in (
        b"POST /v1",
        HEAD,
        HEAD + b"Content-Length: 100\r\n\r\n{",
        HEAD + b"Content-Length: 9000000\r\n\r\n{",
    ):
        with rig.sidecar.connect() as client:
            client.send(part)
            time.sleep(0.01)
    assert not rig.decoded()


def test_half_closed_client(rigged: Callable[..., Rig]) -> None:
    """The end of a client's bytes in mid-request is its leaving, as it is to the engine; nothing hangs."""
    rig = rigged(decode={"prefill_seconds_per_1k_tokens": 20.0})
    rig.target = ""
    with rig.open(COMPLETIONS, completion()) as client:
        rig.decode.wait_for(lambda engine: engine.running == 1)
        client.half_close()
        rig.decode.wait_for(lambda engine: engine.aborted == 1)
        with pytest.raises(Cut):
            client.answer("POST")


def test_refused_requests_are_counted_and_never_quoted(rig: Rig) -> None:
    before = rig.sidecar.metrics()
    answer = exchange(rig, b"GET /%s HTTP/1.1\r\nX-%s : 1\r\n\r\n" % (CANARY.encode(), CANARY.encode()))
    assert CANARY.encode() not in answer.body
    after = rig.sidecar.metrics()
    gain = [metrics("requests_total", reason="reading_malformed", status="400") for metrics in (before, after)]
    assert gain[1] == gain[0] + 1


@pytest.mark.parametrize("piece", [b"X-A: b\r\n" * 1000, b"x" * 8000], ids=["many", "one that does not end"])
@pytest.mark.parametrize("streamed", [False, True], ids=["read", "streamed"])
def test_endless_trailers(rig: Rig, streamed: bool, piece: bytes) -> None:
    """No more than a head: nothing grows by them. An engine that has the rest already loses the connection."""
    began = rig.sidecar.rss_mib
    head = b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: a\r\nContent-Type: audio/wav\r\n" if streamed else HEAD
    with rig.sidecar.connect() as client:
        client.send(head + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX-Long: ")
        with suppress(ConnectionError):
            for _ in range(100):
                client.send(piece)
                time.sleep(0.002)
        if streamed:
            with pytest.raises((ConnectionError, Cut)):
                client.head()
        else:
            assert client.head().status == 431
    assert rig.sidecar.rss_mib - began < 4


def test_a_body_in_many_small_chunks(rig: Rig) -> None:
    """Its size lines are no trailers, however much they are together."""
    with rig.sidecar.connect() as client:
        client.send(HEAD + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(100):
            client.send(b"1;" + b"x" * 4000 + b"\r\n")
            time.sleep(0.002)
            client.send(b" \r\n")
        client.send(b"0\r\n\r\n")
        assert client.head().status == 400, "no JSON, and read to its end"


def test_a_large_body_behind_the_end_of_another(rig: Rig) -> None:
    """In the same packet: its bytes are its own."""
    with rig.sidecar.connect() as client:
        client.send(HEAD + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n")
        time.sleep(0.05)
        client.send(b"0\r\n\r\n" + HEAD + b"Content-Length: 700000\r\n\r\n" + b" " * 700_000)
        for _ in range(2):
            assert client.answer("POST").status == 400
