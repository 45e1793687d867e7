"""What the engine answers reaches the client byte for byte, in every framing and however it is cut; what is no
answer does not."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine import Fault
from tests.integration.apis import CHAT, COMPLETIONS
from tests.integration.client import Answer, Cut, chunked
from tests.integration.sidecar import AT_ONCE_S, Rig, Sidecar, chat, completion
from tests.integration.stub import Stub

PATH = "/v1/anything"
OK = b"HTTP/1.1 200 OK\r\n"


@pytest.fixture(scope="module")
def stub() -> Iterator[Stub]:
    with Stub() as stub:
        yield stub


@pytest.fixture(scope="module")
def sidecar(stub: Stub) -> Iterator[Sidecar]:
    sidecar = Sidecar("--model-server-port", str(stub.port))
    yield sidecar
    sidecar.stop()


@pytest.fixture
def answered(stub: Stub, sidecar: Sidecar) -> Callable[..., Answer]:
    """`answered(*pieces)`: what a client gets when the engine writes these."""

    def ask(*pieces: bytes, method: str = "GET", closes: bool = False, pause_s: float = 0.002) -> Answer:
        stub.pieces, stub.closes, stub.pause_s = pieces, closes, pause_s
        return sidecar.ask(method, PATH)

    return ask


Answered = Callable[..., Answer]


# -- what came together goes on together, and nothing waits ------------------------------------------------------


@pytest.mark.parametrize("framing", [b"Content-Length: 2\r\n", b"Transfer-Encoding: chunked\r\n", b""])
def test_a_head_that_comes_alone_does_not_wait_for_its_body(stub: Stub, sidecar: Sidecar, framing: bytes) -> None:
    seen = threading.Event()
    stub.pieces = (OK + framing + b"\r\n", seen, b"2\r\nok\r\n0\r\n\r\n" if b"chunked" in framing else b"ok")
    stub.closes = not framing
    with sidecar.connect() as client:
        client.request("GET", PATH)
        assert client.head().status == 200
        seen.set()


@pytest.mark.parametrize("rest", [b"z", b"2\r\nokX", b"\r\n"], ids=repr)
def test_a_head_whose_body_is_garbage_goes_on_before_the_cut(stub: Stub, sidecar: Sidecar, rest: bytes) -> None:
    """Both came in one read."""
    stub.pieces, stub.closes = (OK + b"Transfer-Encoding: chunked\r\n\r\n" + rest,), False
    with sidecar.connect() as client:
        client.request("GET", PATH)
        assert client.head().status == 200
        assert not client.rest().endswith(b"0\r\n\r\n"), "a clean end"


# -- heads ---------------------------------------------------------------------------------------------------


def test_head_comes_through_as_it_came(answered: Answered) -> None:
    answer = answered(
        b"HTTP/1.1 299 Odd  Phrase!\r\nX-b: 1\r\nSet-Cookie: a=1\r\nsEt-cOOkie: b=2\r\nX-b: caf\xe9\r\nx-empty:\r\n"
        b"Retry-After: 7\r\nContent-Length: 2\r\n\r\nok"
    )
    assert (answer.status, answer.reason, answer.body) == (299, b"Odd  Phrase!", b"ok")
    assert answer.headers[:6] == [
        (b"X-b", b"1"),
        (b"Set-Cookie", b"a=1"),
        (b"sEt-cOOkie", b"b=2"),
        (b"X-b", b"caf\xe9"),
        (b"x-empty", b""),
        (b"Retry-After", b"7"),
    ]


@pytest.mark.parametrize("status", [200, 201, 206, 226, 300, 307, 400, 418, 451, 500, 503, 599])
def test_every_status(answered: Answered, status: int) -> None:
    """Case 28; a redirect is the client's to follow."""
    answer = answered(b"HTTP/1.1 %d\r\nLocation: /x\r\nContent-Length: 1\r\n\r\nx" % status)
    assert (answer.status, answer.header("location"), answer.body) == (status, "/x", b"x")


def test_hop_by_hop_fields_of_the_engine_stop_here(answered: Answered) -> None:
    answer = answered(
        OK + b"Connection: close, x-private\r\nKeep-Alive: timeout=5\r\nProxy-Connection: close\r\nX: 1\r\n"
        b"Content-Length: 0\r\n\r\n",
        closes=True,
    )
    assert [name for name, _ in answer.headers] in ([b"X", b"content-length"], [b"X", b"Content-Length"])


@pytest.mark.parametrize("status", [204, 304])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_answers_without_a_body(answered: Answered, stub: Stub, sidecar: Sidecar, status: int, method: str) -> None:
    """Case 27: none is read, none is announced where there is none, and the connection goes on."""
    length = b"Content-Length: 9\r\n" if status == 304 else b""
    stub.pieces, stub.closes = [b"HTTP/1.1 %d X\r\nETag: 1\r\n%b\r\n" % (status, length)], False
    with sidecar.connect() as client:
        for _ in range(2):
            client.request(method, PATH)
            answer = client.answer(method)
            assert (answer.status, answer.header("etag"), answer.body) == (status, "1", b"")
            assert answer.header("transfer-encoding") is None
            assert answer.header("content-length") == ("9" if status == 304 else None)


@pytest.mark.parametrize("framing", [b"Content-Length: 1000\r\n", b"Transfer-Encoding: chunked\r\n", b""])
def test_head_requests(stub: Stub, sidecar: Sidecar, framing: bytes) -> None:
    """Case 27: the framing of the answer to GET, without its body."""
    stub.pieces, stub.closes = [OK + framing + b"\r\n"], False
    with sidecar.connect() as client:
        for _ in range(3):
            client.request("HEAD", PATH)
            answer = client.answer("HEAD")
            assert answer.status == 200
            assert client.is_silent(0.02)


def test_no_transfer_coding_with_an_answer_that_can_have_no_body(answered: Answered) -> None:
    """RFC 9112, 6.1: a gateway before us takes a 204 that names one for broken."""
    answer = answered(b"HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n")
    assert (answer.status, answer.header("transfer-encoding")) == (204, None)


@pytest.mark.parametrize("status", [200, 304])
def test_no_transfer_coding_for_http_1_0(stub: Stub, sidecar: Sidecar, status: int) -> None:
    """Which knows none, even of an answer to HEAD."""
    stub.pieces, stub.closes = [b"HTTP/1.1 %d X\r\nTransfer-Encoding: chunked\r\n\r\n" % status], False
    with sidecar.connect() as client:
        client.send(b"HEAD %b HTTP/1.0\r\n\r\n" % PATH.encode())
        answer = client.answer("HEAD")
        assert (answer.status, answer.header("transfer-encoding")) == (status, None)


def test_interim_answers(answered: Answered) -> None:
    """1xx pass, save 100, which is ours to send."""
    hints = b"HTTP/1.1 103 Early Hints\r\nLink: </a>; rel=preload\r\n\r\n"
    processing = b"HTTP/1.1 102 Processing\r\n\r\n"
    go_ahead = b"HTTP/1.1 100 Continue\r\n\r\n"
    final = OK + b"Content-Length: 1\r\n\r\nx"
    answer = answered(processing + go_ahead, hints[:9], hints[9:] + processing, final)
    assert (answer.status, answer.body) == (200, b"x")
    assert answer.interim == [processing, hints, processing]


# -- bodies --------------------------------------------------------------------------------------------------


def test_chunks_and_trailers_are_the_engines(answered: Answered) -> None:
    body = b'3;ext="a;b"\r\nabc\r\n0000a\r\n0123456789\r\n0;last\r\nX-Sum: 1\r\nx-other: 2\r\n\r\n'
    answer = answered(OK + b"Trailer: X-Sum\r\nTransfer-Encoding: chunked\r\n\r\n" + body)
    assert answer.raw_body == body
    assert answer.trailers == [(b"X-Sum", b"1"), (b"x-other", b"2")]
    assert answer.header("trailer") == "X-Sum"


def test_close_delimited_answer(answered: Answered) -> None:
    """Case 27: its end is the end of the connection, and the client is told so."""
    answer = answered(OK + b"X: 1\r\n\r\n", b"as long ", b"as it ", b"takes", closes=True)
    assert answer.body == b"as long as it takes"
    assert answer.header("connection") == "close"


def test_the_identity_coding_is_none(answered: Answered) -> None:
    """An old spelling of an answer that ends with its connection."""
    answer = answered(OK + b"Transfer-Encoding: identity\r\n\r\n", b"as long", b" as it takes", closes=True)
    assert (answer.header("transfer-encoding"), answer.header("connection")) == (None, "close")
    assert answer.body == b"as long as it takes"


@pytest.mark.parametrize(
    "fields",
    [
        b"Transfer-Encoding: gzip\r\n",
        b"Transfer-Encoding: gzip, chunked\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: gzip\r\n",
    ],
)
def test_a_transfer_coding_that_nobody_asked_for(answered: Answered, fields: bytes) -> None:
    """Passed on as chunked, the client would take compressed bytes, or no chunks at all, for the answer."""
    answer = answered(OK + fields + b"\r\n2\r\nok\r\n0\r\n\r\n", closes=True)
    assert (answer.status, answer.reason_code) == (502, "decode_garbage")


def test_http_1_0_engine(answered: Answered) -> None:
    assert answered(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok").body == b"ok"
    assert answered(b"HTTP/1.0 200 OK\r\n\r\nok", closes=True).body == b"ok"


def test_surplus_bytes_are_not_passed_on(answered: Answered) -> None:
    """Nor taken for the next answer: such a connection is not used again."""
    assert (
        answered(OK + b"Content-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil").body == b"ok"
    )
    assert answered(OK + b"Content-Length: 4\r\n\r\ngood").body == b"good"
    assert answered(OK + b"Content-Length: 0\r\n\r\n\r\n\r\n").body == b""
    assert answered(OK + b"Content-Length: 4\r\n\r\ngood").body == b"good"
    assert answered(b"HTTP/1.1 204 No\r\n\r\nHTTP/1.1 200 OK\r\n\r\n").status == 204
    assert answered(OK + b"Content-Length: 4\r\n\r\ngood").body == b"good"


def test_compressed_answer(rig: Rig) -> None:
    """The client asked the engine, not us."""
    rig.decode.fault(Fault(gzip=True), path=CHAT)
    answer = rig.post(CHAT, chat(), [("Accept-Encoding", "gzip")])
    assert (answer.status, answer.header("content-encoding")) == (200, "gzip")
    assert rig.decoded()[0].header("accept-encoding") == "gzip"
    assert rig.prefilled()[0].header("accept-encoding") is None
    streamed = rig.post(CHAT, chat(stream=True))
    assert streamed.status == 200
    assert streamed.body.startswith(b"\x1f\x8b")


NO_ANSWERS: dict[str, bytes] = {
    "not HTTP": b"220 ftp ready\r\n\r\n",
    "HTTP/2": b"HTTP/2 200\r\n\r\n",
    "no status": b"HTTP/1.1 OK\r\n\r\n",
    "status 99": b"HTTP/1.1 99 X\r\n\r\n",
    "bare LF": b"HTTP/1.1 200 OK\nContent-Length: 0\n\n",
    "two framings": OK + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": OK + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "bad length": OK + b"Content-Length: 3x\r\n\r\nabc",
    "bad field": OK + b"X y: 1\r\nContent-Length: 0\r\n\r\n",
    "NUL": OK + b"X: \0\r\nContent-Length: 0\r\n\r\n",
    "endless head": OK + b"X: " + b"x" * 200_000,
    "endless status line": b"HTTP/1.1 200 " + b"x" * 200_000,
    "unasked 101": b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
}


@pytest.mark.parametrize("name", NO_ANSWERS)
def test_what_is_no_answer(answered: Answered, name: str) -> None:
    answer = answered(NO_ANSWERS[name], closes=True)
    assert answer.status == 502
    assert answer.reason_code in ("decode_garbage", "decode_reset")


@pytest.mark.parametrize("pieces", [[b""], [b"HTTP"], [OK], [OK + b"X: 1\r\n"]])
def test_engine_that_ends_in_its_head(answered: Answered, pieces: list[bytes]) -> None:
    answer = answered(*pieces, closes=True)
    assert (answer.status, answer.reason_code) == (502, "decode_reset")


BROKEN_BODIES: dict[str, bytes] = {
    "cut length": OK + b"Content-Length: 10\r\n\r\n12345",
    "cut chunk": OK + b"Transfer-Encoding: chunked\r\n\r\na\r\n12345",
    "cut before the last chunk": OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\n12345\r\n",
    "cut in the trailers": OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\n12345\r\n0\r\nX: 1\r\n",
    "bad chunk size": OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\n12345\r\nzz\r\n",
}


@pytest.mark.parametrize("name", BROKEN_BODIES)
def test_broken_body_is_never_a_whole_one(answered: Answered, name: str) -> None:
    """Case 23: the client sees that something is missing."""
    with pytest.raises(Cut):
        answered(BROKEN_BODIES[name], closes=True)


def test_broken_body_that_ends_with_the_connection_is_reset(stub: Stub, sidecar: Sidecar) -> None:
    """Case 23, for a client of HTTP/1.0: it has no other way to see that something is missing."""
    stub.pieces = (OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\n12345\r\n", b"5\r\n123")
    stub.closes = True
    with sidecar.connect() as client:
        client.send(b"GET %b HTTP/1.0\r\n\r\n" % PATH.encode())
        assert client.head().header("connection") == "close"
        assert client.exactly(8) == b"12345123"
        with pytest.raises(ConnectionResetError):
            client.socket.recv(1)


@pytest.mark.parametrize("rest", [b"ta: 1\r\nzz\r\n", b"ta: 1\r\n0\r\n\r\nmore"], ids=repr)
def test_no_last_event_within_a_chunk_whose_end_was_not_passed_on(
    stub: Stub, sidecar: Sidecar, rest: bytes
) -> None:
    """What ends the chunk came with what is wrong, and is not passed on: the client waits for the rest of it."""
    begun = threading.Event()
    head = OK + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    stub.pieces, stub.closes = (head + b"7\r\nda", begun, rest), False
    with sidecar.connect() as client:
        client.request("GET", PATH)
        client.head()
        assert client.exactly(5) == b"7\r\nda"
        begun.set()
        assert b"ta: 1\r\n".startswith(client.rest())


# -- however it is cut (property) ----------------------------------------------------------------------------


def pieces_of(draw: st.DrawFn, data: bytes, most: int) -> list[bytes]:
    """`data`, which is not empty, in pieces of which none is empty."""
    cuts = sorted(draw(st.sets(st.integers(1, len(data) - 1), max_size=most))) if len(data) > 1 else []
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@st.composite
def cut_answers(draw: st.DrawFn) -> tuple[list[bytes], bytes, bytes, bool]:
    """Pieces that the engine writes, its raw body, its body without framing, whether it closes."""
    body = draw(st.one_of(st.binary(max_size=300), st.just(b"data: x\n\n" * 40), st.just(b"0\r\n\r\n" * 20)))
    framing = draw(st.sampled_from(["length", "chunked", "close"]))
    if framing == "length":
        head, raw = b"Content-Length: %d\r\n" % len(body), body
    elif framing == "chunked":
        chunks = pieces_of(draw, body, 6) if body else []
        trailers = draw(st.sampled_from([b"", b"X-T: 1\r\n", b"a: b\r\nc: d\r\n"]))
        head, raw = b"Transfer-Encoding: chunked\r\n", chunked(*chunks, trailers=trailers)
    else:
        head, raw = b"", body
    kind = draw(st.sampled_from([b"text/event-stream", b"application/json", b"audio/wav"]))
    interim = draw(st.sampled_from([b"", b"HTTP/1.1 103 Early Hints\r\nA: b\r\n\r\n"]))
    whole = interim + OK + b"Content-Type: " + kind + b"\r\n" + head + b"\r\n" + raw
    return pieces_of(draw, whole, 12), raw, body, framing == "close"


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut_answers())
def test_any_answer_in_any_pieces(answered: Answered, case: tuple[list[bytes], bytes, bytes, bool]) -> None:
    pieces, raw, body, closes = case
    answer = answered(*pieces, closes=closes, pause_s=0.0005)
    assert answer.status == 200
    assert answer.body == body
    assert answer.raw_body == raw


def test_any_stream_in_any_pieces_when_counts_are_corrected(rigged: Callable[..., Rig]) -> None:
    """The one thing that is looked for in a stream changes nothing else of it."""
    rig = rigged()
    rig.prefill.fault(
        Fault(handoff=lambda params: {key: value for key, value in params.items() if "cached" not in key}),
        path=CHAT,
    )
    rig.decode.fault(Fault(ragged=True), path=CHAT)
    body = chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    answer = rig.post(CHAT, body)
    assert answer.decision.startswith("remote")
    direct = rig.ask_engine("POST", CHAT, body)
    assert len(answer.events) == len(direct.events)
    assert answer.text == direct.text


# -- at once, and no faster than it is read ------------------------------------------------------------------


@pytest.mark.parametrize("target", ["local", "remote"])
def test_an_event_is_passed_on_at_once(rig: Rig, target: str) -> None:
    """Case 25: a few bytes and then silence: the client has them, and need not wait for more to come."""
    if target == "local":
        rig.target = ""
    rig.decode.fault(Fault(stall_after_events=2), path=COMPLETIONS)
    with rig.open(COMPLETIONS, completion(stream=True)) as client:
        answer = client.head()
        pieces = client.pieces(answer)
        began = time.monotonic()
        assert next(pieces).startswith(b"data: ")
        assert next(pieces).startswith(b"data: ")
        assert time.monotonic() - began < AT_ONCE_S
        assert client.is_silent(0.2)


def test_head_is_passed_on_before_the_body(stub: Stub, sidecar: Sidecar) -> None:
    headed, begun = threading.Event(), threading.Event()
    stub.pieces, stub.closes = [OK + b"Content-Length: 2\r\n\r\n", headed, b"o", begun, b"k"], False
    with sidecar.connect() as client:
        client.request("GET", PATH)
        answer = client.head()
        assert answer.header("content-length") == "2"
        headed.set()
        assert client.exactly(1) == b"o"
        begun.set()
        assert client.exactly(1) == b"k"


def test_a_long_first_event_is_held_back_only_so_far(rig: Rig) -> None:
    """A stream whose first event does not end is taken for good after 64 KiB."""
    rig.decode.fault(
        Fault(
            raw=OK
            + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            + b"20000\r\ndata: "
            + b"x" * (0x20000 - 6)
            + b"\r\n",
            raw_close=False,
        ),
        path=COMPLETIONS,
    )
    with rig.open(COMPLETIONS, completion(stream=True)) as client:
        answer = client.head()
        assert answer.decision.startswith("remote")
        assert next(client.pieces(answer)).startswith(b"data: xxx")


def test_keep_alive_races(rig: Rig) -> None:
    """An engine that closes its connection after each answer without a word: nobody sees anything of it."""
    rig.decode.fault(Fault(close_after=True), when=lambda one: one.path != "/health")
    dice = random.Random(3)
    with rig.sidecar.connect() as client:
        for number in range(60):
            if number % 3:
                client.request("GET", "/v1/models")
            else:
                client.request("POST", COMPLETIONS, completion(echo=True), rig.headers())
            assert client.answer().status == 200
            time.sleep(dice.random() * 0.004)


def test_keep_alive_races_of_split_requests(rig: Rig) -> None:
    """On both legs; a handoff is not sent twice, so here a recompute is as good as it gets."""
    for engine in (rig.prefill, rig.decode):
        engine.fault(Fault(close_after=True), path=COMPLETIONS)
    with rig.sidecar.connect() as client:
        for _ in range(30):
            client.request("POST", COMPLETIONS, completion(), rig.headers())
            answer = client.answer("POST")
            assert answer.status == 200
            assert answer.decision.split(";")[0] in ("remote", "recompute")


def test_stale_connection_is_replaced_once(rig: Rig) -> None:
    """A request that a fresh connection resets as well is answered, not sent for ever."""
    assert rig.sidecar.ask("GET", "/v1/models").status == 200
    rig.decode.fault(Fault(reset="before_head"), path=PATH)
    answer = rig.sidecar.ask("POST", PATH, b"{}")
    assert (answer.status, answer.reason_code) == (502, "decode_reset")
    assert len([one for one in rig.decoded() if one.target == PATH]) <= 2


def test_engine_connections_are_reused(rig: Rig) -> None:
    """Case 33: one connection for many requests in a row."""
    before = rig.decode.connections_total
    for _ in range(30):
        assert rig.chat().status == 200
    assert rig.decode.connections_total - before <= 3
