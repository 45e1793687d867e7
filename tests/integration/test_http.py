"""HTTP/1.1 with clients: connections that are kept, pipelining, bodies in every framing,
heads as they came."""

from __future__ import annotations

import gzip
import json
import os
import random
import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from backports import zstd

from tests.engine import Fault, ThreadedEngine
from tests.integration.apis import APIS, CHAT, COMPLETIONS
from tests.integration.client import Answer, Client, chunked, request
from tests.integration.sidecar import AT_ONCE_S, MAX_BODY_BYTES, Rig, Sidecar, chat, completion, eventually, quick
from tests.ports import HAS_IPV6, free_ports

# -- connections ---------------------------------------------------------------------------------------------


def test_keep_alive(rig: Rig) -> None:
    """Many requests of all kinds on one connection, whoever answers them."""
    with rig.sidecar.connect() as client:
        for number in range(3):
            client.request("POST", CHAT, chat(), rig.headers())
            assert client.answer("POST").status == 200
            client.request("POST", CHAT, chat(stream=True), rig.headers())
            assert client.answer("POST").events[-1] == b"[DONE]"
            client.request("HEAD", "/version")
            assert client.answer("HEAD").status in (200, 405)
            client.request("GET", f"/nothing/{number}")
            assert client.answer().status == 404
            client.request("POST", COMPLETIONS, b"[]", rig.headers())
            assert client.answer("POST").status == 400
    assert rig.decode.connections_total <= 6, "engine connections are kept as well"


def test_connection_close_of_the_client(rig: Rig) -> None:
    with rig.sidecar.connect() as client:
        client.request("GET", "/version", headers=[("Connection", "close")])
        answer = client.answer()
        assert (answer.status, answer.header("connection")) == (200, "close")
        assert client.at_end()


def test_http_1_0(rig: Rig) -> None:
    """No Host needed, the connection is not kept, no chunked framing and no 1xx comes back."""
    rig.decode.fault(Fault(interim=b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"), path=COMPLETIONS)
    body = json.dumps(completion(stream=True)).encode()
    with rig.sidecar.connect() as client:
        head = b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        client.send(head % len(body) + body)
        answer = client.answer("POST")
        assert answer.status == 200
        assert not answer.interim
        assert answer.header("transfer-encoding") is None
        assert answer.events[-1] == b"[DONE]"
        assert client.at_end()


def test_http_1_0_keep_alive(rig: Rig) -> None:
    """Asked for, it is kept where the answer's end can be seen."""
    with rig.sidecar.connect() as client:
        for _ in range(2):
            client.send(b"GET /version HTTP/1.0\r\nHost: a\r\nConnection: keep-alive\r\n\r\n")
            answer = client.answer()
            assert (answer.status, answer.header("content-length") is not None) == (200, True)
            if answer.header("connection") == "close":
                assert client.at_end()
                break


def test_pipelined_requests_are_answered_in_order(rig: Rig) -> None:
    rig.decode.engine.limits.prefill_seconds_per_1k_tokens = 0.2
    asked = [
        request("POST", CHAT, chat(), rig.headers([("x-request-id", "0")])),
        request("GET", "/version"),
        request("POST", COMPLETIONS, completion(stream=True), rig.headers([("x-request-id", "2")])),
        request("POST", COMPLETIONS, b"[]", rig.headers([("x-request-id", "3")])),
        request("POST", COMPLETIONS, completion(echo=True), rig.headers([("x-request-id", "4")])),
        request("GET", "/nothing"),
    ]
    with rig.sidecar.connect() as client:
        client.send(b"".join(asked))
        answers = [client.answer() for _ in asked]
    assert [answer.status for answer in answers] == [200, 200, 200, 400, 200, 404]
    assert [answer.header("x-request-id") for answer in answers] == ["0", None, "2", "3", "4", None]
    assert answers[2].events[-1] == b"[DONE]"


@pytest.mark.parametrize("ended_by", ["client", "engine"])
def test_client_that_asks_on_behind_its_last_answer(rig: Rig, ended_by: str) -> None:
    """A connection closed while requests are unread would be reset, and what the client has yet to read lost."""
    size = 100_000
    rig.decode.fault(Fault(pad_bytes=size), path=COMPLETIONS)
    if ended_by == "engine":
        rig.decode.fault(Fault(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc"), path="/v1/x")
    last = request("GET", "/v1/x", headers=[("Connection", "close")] if ended_by == "client" else [])
    with rig.sidecar.connect() as client:
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # most of it waits at the sidecar
        further = request("GET", "/version") * 9000
        client.send(request("POST", COMPLETIONS, completion(), rig.headers()) + last + further)
        eventually(lambda: [asked.target for asked in rig.decoded()][1:] == ["/v1/x"])
        eventually(lambda: not rig.sidecar.in_flight())
        answer = client.answer("POST")
        assert answer.status == 200
        assert len(answer.body) > size
        if ended_by == "client":
            assert client.answer().header("connection") == "close"
            assert client.at_end()
        else:
            assert client.rest().endswith(b"abc")


def test_client_that_asks_on_once_its_last_answer_is_written(rig: Rig) -> None:
    """It cannot know: it has yet to read the answers before."""
    size = 100_000
    rig.decode.fault(Fault(pad_bytes=size), path=COMPLETIONS)
    rig.decode.fault(Fault(raw=b"HTTP/1.1 200 OK\r\n\r\nabc"), path="/v1/x")
    with rig.sidecar.connect() as client:
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # most of it waits at the sidecar
        client.send(request("POST", COMPLETIONS, completion(), rig.headers()) + request("GET", "/v1/x"))
        eventually(lambda: [asked.target for asked in rig.decoded()][1:] == ["/v1/x"])
        eventually(lambda: not rig.sidecar.in_flight())
        client.request("GET", "/version")
        assert len(client.answer("POST").body) > size
        assert client.answer().body == b"abc"


def test_many_pipelined_requests(rig: Rig) -> None:
    """More than are read ahead, in small packets; not more than one is with the engine at a time."""
    count = 100
    data = b"".join(request("GET", f"/v1/models?{number}") for number in range(count))
    with rig.sidecar.connect() as client:
        for start in range(0, len(data), 777):
            client.send(data[start : start + 777])
        for _ in range(count):
            assert client.answer().status == 200
    assert [one.target for one in rig.decoded()] == [f"/v1/models?{number}" for number in range(count)]
    assert rig.decode.connections_total <= 4


def test_pipelined_client_that_leaves(rig: Rig) -> None:
    """What waits for its turn is forgotten with the connection."""
    rig.decode.engine.limits.prefill_seconds_per_1k_tokens = 20
    rig.target = ""
    with rig.sidecar.connect() as client:
        client.send(b"".join(request("POST", COMPLETIONS, completion(), rig.headers()) for _ in range(5)))
        rig.decode.wait_for(lambda engine: engine.running == 1)
    rig.decode.wait_for(lambda engine: engine.running == 0)
    time.sleep(0.1)
    assert len(rig.decoded()) == 1


def test_any_requests_in_any_pieces(rig: Rig) -> None:
    """However a conversation is cut into packets it is the same conversation."""
    dice = random.Random(11)
    for _ in range(25):
        sizes = [dice.choice([0, 1, 50, 35_000]) for _ in range(dice.randint(1, 5))]
        bodies = [dice.randbytes(size).hex().encode() for size in sizes]
        data = b""
        for number, body in enumerate(bodies):
            kind = ("Content-Type", dice.choice(["text/plain", "audio/wav"]))
            if dice.random() < 0.5:
                cut = dice.randint(0, len(body))
                pieces = [piece for piece in (body[:cut], body[cut:]) if piece]
                sent = chunked(*pieces, trailers=dice.choice([b"", b"a: b\r\n"]))
                data += request("POST", f"/x/{number}", sent, [kind, ("Transfer-Encoding", "chunked")])
            else:
                data += request("POST", f"/x/{number}", body, [kind])
        cuts = sorted(dice.sample(range(1, len(data)), min(len(data) - 1, dice.randint(0, 12))))
        rig.decode.requests.clear()
        with rig.sidecar.connect() as client:
            for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
                client.send(data[start:end])
                time.sleep(0.001)
            assert [client.answer("POST").status for _ in bodies] == [404] * len(bodies)
        assert [one.body for one in rig.decoded()] == bodies


# -- request bodies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/unknown", "/tokenize"])
def test_chunked_request_body(rig: Rig, path: str) -> None:
    body = json.dumps(completion()).encode()
    sent = chunked(body[:1], body[1:10], body[10:700], body[700:], trailers=b"X-Sum: 1\r\n")
    with rig.sidecar.connect() as client:
        client.request("POST", path, sent, rig.headers([("Transfer-Encoding", "chunked")]))
        assert client.answer("POST").status == (404 if "unknown" in path else 200)
        client.request("GET", "/version")
        assert client.answer().status == 200
    asked = rig.decoded()[0]
    assert asked.body.endswith(body[1:])


def test_chunked_request_body_byte_by_byte(rig: Rig) -> None:
    body = json.dumps(completion(20)).encode()
    whole = request(
        "POST", COMPLETIONS, chunked(body[:7], body[7:]), rig.headers([("Transfer-Encoding", "Chunked")])
    )
    with rig.sidecar.connect() as client:
        for byte in whole:
            client.send(bytes([byte]))
        assert client.answer("POST").status == 200


@pytest.mark.parametrize("framing", ["chunked", "length"])
def test_body_that_is_no_json_is_streamed(rig: Rig, framing: str) -> None:
    """The engine has the first part before the last one is sent; framing, trailers and bytes are the client's."""
    pieces = [os.urandom(50_000), os.urandom(3), os.urandom(70_000)]
    kind = ("Content-Type", "audio/wav")
    with rig.sidecar.connect() as client:
        if framing == "chunked":
            client.request("POST", "/v1/audio", b"", [kind, ("Transfer-Encoding", "chunked")])
            send = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces]
            send.append(b"0\r\nX-Trailer: t\r\n\r\n")
        else:
            client.request("POST", "/v1/audio", b"", [kind, ("Content-Length", str(sum(map(len, pieces))))])
            send = pieces
        client.send(send[0])
        eventually(rig.decoded)
        for piece in send[1:]:
            client.send(piece)
        assert client.answer("POST").status == 404
        client.request("GET", "/version")
        assert client.answer().status == 200
    asked = rig.decoded()[0]
    assert asked.body == b"".join(pieces)
    assert asked.header("transfer-encoding") == ("chunked" if framing == "chunked" else None)


def test_streamed_body_that_the_engine_answers_early(rig: Rig) -> None:
    """An answer before the end of the body ends the connection: what else comes is no next request."""
    rig.decode.fault(Fault(status=401, early=True), path="/v1/audio")
    with rig.sidecar.connect() as client:
        client.request("POST", "/v1/audio", b"", [("Content-Type", "audio/wav"), ("Content-Length", "1000000")])
        answer = client.answer("POST")
        assert (answer.status, answer.header("connection")) == (401, "close")
        client.send(b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n" * 100)
        assert client.at_end()
    assert len(rig.decoded()) == 1


@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_request_behind_a_streamed_body_that_nobody_took(rig: Rig, framing: str) -> None:
    """The client had to wait for an engine that was not there; what it asks next is read all the same."""
    headers = [("Content-Type", "audio/wav"), *([("Transfer-Encoding", "chunked")] if framing == "chunked" else [])]
    rig.decode.refuse()
    with rig.sidecar.connect() as client:
        for _ in range(3):
            client.request("POST", "/v1/audio", chunked(b"abc") if framing == "chunked" else b"abc", headers)
            answer = client.answer("POST")
            assert (answer.status, answer.header("connection")) == (503, None)
        rig.decode.accept()
        client.request("GET", "/version")
        assert client.answer().status == 200


def test_streamed_body_behind_another_request(rig: Rig) -> None:
    rig.decode.engine.limits.prefill_seconds_per_1k_tokens = 0.5
    kind = ("Content-Type", "application/octet-stream")
    with rig.sidecar.connect() as client:
        client.request("POST", COMPLETIONS, completion(echo=True), rig.headers())
        client.request("POST", "/v1/blob", os.urandom(1000), [kind])
        client.request("POST", "/v1/blob", chunked(os.urandom(1000)), [kind, ("Transfer-Encoding", "chunked")])
        client.request("GET", "/version")
        assert [client.answer().status for _ in range(4)] == [200, 404, 404, 200]


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/unknown"])
def test_expect_100_continue(rig: Rig, path: str) -> None:
    """The go-ahead comes before the body, once, and is ours alone."""
    body = json.dumps(completion()).encode()
    head = request("POST", path, b"", rig.headers([("Expect", "100-Continue"), ("Content-Length", str(len(body)))]))
    with rig.sidecar.connect() as client:
        client.send(head)
        assert client.exactly(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(body)
        answer = client.answer("POST")
    assert answer.status in (200, 404)
    assert not answer.interim
    assert rig.decoded()[0].header("expect") is None


def test_expect_100_continue_of_a_body_that_is_not_wanted(rigged: Callable[..., Rig]) -> None:
    rig = rigged(*quick())
    with rig.sidecar.connect() as client:
        client.request(
            "POST", COMPLETIONS, b"", [("Expect", "100-continue"), ("Content-Length", str(MAX_BODY_BYTES + 1))]
        )
        answer = client.answer("POST")
        assert (answer.status, answer.interim) == (413, [])
        assert client.at_end()


def test_expect_100_continue_behind_another_request(rig: Rig) -> None:
    """Pipelined: the go-ahead must not come before the answer to the first, and it must come."""
    rig.decode.engine.limits.prefill_seconds_per_1k_tokens = 0.5
    body = json.dumps(completion()).encode()
    with rig.sidecar.connect() as client:
        client.request("POST", COMPLETIONS, completion(echo=True), rig.headers())
        client.request(
            "POST", COMPLETIONS, b"", rig.headers([("Expect", "100-continue"), ("Content-Length", str(len(body)))])
        )
        first = client.answer("POST")
        assert (first.status, first.interim) == (200, [])
        assert client.exactly(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(body)
        assert client.answer("POST").status == 200


# -- compressed request bodies -------------------------------------------------------------------------------


def raw_deflate(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(body) + packer.flush()


ENCODINGS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "GZIP": lambda body: gzip.compress(body[:10]) + gzip.compress(body[10:]),
    "deflate": zlib.compress,
    "Deflate": raw_deflate,
    "zstd": zstd.compress,
    "identity": lambda body: body,
    "gzip, zstd": lambda body: zstd.compress(gzip.compress(body)),
}


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/invocations"])
def test_compressed_request_body(rig: Rig, encoding: str, path: str) -> None:
    """Inflated before it is looked into; the engines, which inflate nothing, get it plain."""
    body = json.dumps(APIS.get(path, completion)()).encode()
    answer = rig.post(path, ENCODINGS[encoding](body), [("Content-Encoding", encoding)])
    assert answer.status == 200
    for leg in (*rig.prefilled(), *rig.decoded()):
        assert leg.header("content-encoding") is None
        assert leg.header("content-length") == str(len(leg.body))
    assert rig.decoded()[0].body.endswith(body[1:])
    assert bool(rig.prefilled()) is (path != "/invocations")


def test_compressed_body_elsewhere_is_relayed_as_it_came(rig: Rig) -> None:
    packed = gzip.compress(b"{}")
    assert rig.post("/v1/unknown", packed, [("Content-Encoding", "gzip")]).status == 404
    (asked,) = rig.decoded()
    assert (asked.body, asked.header("content-encoding")) == (packed, "gzip")


def zstd_bomb() -> bytes:
    """A window of 2 GiB for a handful of bytes."""
    frame = struct.pack("<I", 0xFD2FB528) + b"\x00" + bytes([(31 - 10) << 3])
    return frame + struct.pack("<I", (10 << 3) | 0b001)[:3] + bytes(10)


BOMBS: dict[str, tuple[str, Callable[[], bytes], int]] = {
    "gzip": ("gzip", lambda: gzip.compress(b" " * 60_000_000, 1), 413),
    "gzip of gzip": ("gzip, gzip", lambda: gzip.compress(gzip.compress(b" " * 60_000_000, 1)), 413),
    "many members": ("gzip", lambda: gzip.compress(b" " * 2_000_000) * 20, 413),
    "zstd": ("zstd", lambda: zstd.compress(b" " * 60_000_000), 413),
    "zstd window": ("zstd", zstd_bomb, 400),
    "deflate": ("deflate", lambda: zlib.compress(b" " * 60_000_000, 1), 413),
    "cut": ("gzip", lambda: gzip.compress(b"{}" * 1000)[:-5], 400),
    "cut zstd": ("zstd", lambda: zstd.compress(b"{}" * 1000)[:-3], 400),
    "tail": ("deflate", lambda: zlib.compress(b"{}") + b"more", 400),
    "no gzip": ("gzip", lambda: b"{}", 400),
    "empty": ("gzip", lambda: b"", 400),
    "unknown": ("br", lambda: b"{}", 415),
    "four": ("gzip, gzip, gzip, gzip", lambda: b"{}", 415),
    "compress": ("compress", lambda: b"{}", 415),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_and_broken_encodings(rigged: Callable[..., Rig], name: str) -> None:
    """Bounded while they are inflated: neither the memory nor the time of what they claim to be."""
    rig = rigged(*quick())
    encoding, make, status = BOMBS[name]
    body = make()
    rig.sidecar.forget_peak()
    before = rig.sidecar.rss_mib
    began = time.monotonic()
    answer = rig.post(COMPLETIONS, body, [("Content-Encoding", encoding)])
    assert answer.status == status
    assert time.monotonic() - began < AT_ONCE_S
    assert rig.sidecar.peak_rss_mib - before < 24
    assert not rig.decoded()


# -- heads ---------------------------------------------------------------------------------------------------


def test_head_comes_through_as_it_came(rig: Rig) -> None:
    """Spelling, order, repeated fields, odd bytes; the target with its escapes and query."""
    target = "/v1/mod%65ls/..//x;y=1?a=%zz&b=%E9&c=/?&d"
    given = [
        (b"host", b"Example:80"),
        (b"uSeR-aGeNt", b"x/1"),
        (b"X-Dup", b"1"),
        (b"Accept", b"*/*"),
        (b"X-Dup", b"2"),
        (b"X-Empty", b""),
        (b"X-Bytes", b"caf\xe9 \xff"),
        (b"X-Quoted", b'"a, b";q=1'),
        (b"Cookie", b"a=b; c=d"),
        (b"Content-Type", b"text/plain"),
        (b"Authorization", b"Bearer x"),
    ]
    lines = b"".join(b"%b: %b\r\n" % field for field in given)
    with rig.sidecar.connect() as client:
        client.send(b"GET %b HTTP/1.1\r\n%b\r\n" % (target.encode(), lines))
        assert client.answer().status == 404
    (asked,) = rig.decoded()
    assert asked.target == target
    assert asked.headers == given


@pytest.mark.parametrize("target", ["*", "http://sidecar/v1/models?x=1", "/", "//", "/a%2Fb"])
def test_targets(rig: Rig, target: str) -> None:
    method = "OPTIONS" if target == "*" else "GET"
    answer = rig.sidecar.ask(method, target)
    assert rig.decoded()[0].target == target
    assert answer.status == rig.decoded()[0].status


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "PROPFIND"])
def test_methods(rig: Rig, method: str) -> None:
    """Every method is relayed; what the engine says of it is relayed as well."""
    answer = rig.sidecar.ask(method, "/version")
    direct = rig.ask_engine(method, "/version")
    assert answer.status == direct.status
    assert answer.body == direct.body
    assert answer.header("content-length") == direct.header("content-length")
    assert answer.header("allow") == direct.header("allow")
    assert rig.decoded()[0].method == method


def test_body_with_get_and_delete(rig: Rig) -> None:
    for method in ("GET", "DELETE"):
        rig.sidecar.ask(method, "/v1/thing", b"text", [("Content-Type", "text/plain")])
    assert [(one.method, one.body) for one in rig.decoded()] == [("GET", b"text"), ("DELETE", b"text")]


def test_head_of_the_largest_size(rig: Rig) -> None:
    headers = [(f"X-{number}", "y" * 240) for number in range(250)]
    answer = rig.sidecar.ask("GET", "/version", headers=headers)
    assert answer.status == 200
    assert len(rig.decoded()[0].headers) == 251


def test_metrics_of_the_serving_port_are_the_engines(rig: Rig) -> None:
    answer = rig.sidecar.ask("GET", "/metrics")
    assert b"vllm:" in answer.body
    assert b"pd_sidecar" not in answer.body


# -- addresses -----------------------------------------------------------------------------------------------


def test_ipv6() -> None:
    """Clients, the engine and the prefill endpoint. (The simulated side channel has no IPv6 address, so the handoff
    cannot be one of the endpoint's.)"""
    with (
        ThreadedEngine(host="::1", port=free_ports()) as decode,
        ThreadedEngine(host="::1", port=free_ports()) as prefill,
    ):
        sidecar = Sidecar(
            *("--model-server-host", "::1", "--model-server-port", str(decode.port), "--disagg", "on"),
            *("--prefill-allow", "::1/128"),
        )
        try:
            with Client(("::1", sidecar.port)) as client:
                target = [("x-prefiller-host-port", f"[0:0::1]:{prefill.port}")]
                client.request("POST", COMPLETIONS, completion(), target)
                answer = client.answer("POST")
            assert answer.status == 200
            assert answer.decision == "recompute; reason=handoff_wrong_host"
            (asked,) = (one for one in prefill.requests if one.method == "POST")
            assert asked.header("host") == f"[::1]:{prefill.port}"
        finally:
            sidecar.stop()


UPGRADE = [("Connection", "Upgrade"), ("Upgrade", "websocket"), ("Sec-WebSocket-Key", "AAAA")]


def test_engine_on_a_unix_socket(tmp_path: Any) -> None:
    path = str(tmp_path / "engine.sock")
    with ThreadedEngine(uds=path) as decode, ThreadedEngine() as prefill:
        sidecar = Sidecar("--model-server-uds", path, "--disagg", "on", "--prefill", prefill.address)
        try:
            assert sidecar.ask("POST", COMPLETIONS, completion()).decision.startswith("remote")
            assert sidecar.ask("GET", "/v1/models").status == 200
            with sidecar.connect() as client:
                client.send(request("GET", "/v1/realtime", headers=UPGRADE))
                assert client.head().status == 101
            decode.refuse()
            decode.call(decode.engine.server.abort_all)
            answer = sidecar.ask("GET", "/v1/models")
            assert (answer.status, answer.reason_code) == (503, "decode_refused")
        finally:
            sidecar.stop()


@contextmanager
def ranks(count: int) -> Iterator[tuple[Sidecar, list[ThreadedEngine]]]:
    """A sidecar before so many local ranks."""
    first = free_ports(count)
    with ExitStack() as stack:
        engines = [stack.enter_context(ThreadedEngine(port=first + rank)) for rank in range(count)]
        sidecar = Sidecar("--model-server-port", str(first), "--data-parallel-size", str(count), ranks=count)
        stack.callback(sidecar.stop)
        yield sidecar, engines


def test_data_parallel_ports() -> None:
    """Case 42: rank r is served on port + r."""
    with ranks(3) as (sidecar, engines):
        for rank, engine in enumerate(engines):
            with Client(("127.0.0.1", sidecar.port + rank)) as client:
                client.request("POST", COMPLETIONS, completion())
                assert client.answer("POST").status == 200
            assert [one.target for one in engine.requests if one.method == "POST"] == [COMPLETIONS]


def test_data_parallel_host_port() -> None:
    """The deprecated header: of whichever port the request came to, the rank that it names answers."""
    with ranks(2) as (sidecar, engines):

        def ask(value: str, path: str = COMPLETIONS) -> Answer:
            body = completion() if path == COMPLETIONS else {"model": "sim", "prompt": "x"}
            return sidecar.ask("POST", path, body, [("X-Data-Parallel-Host-Port", value)])

        for engine in engines:
            engine.requests.clear()
        for path in (COMPLETIONS, "/tokenize"):
            for rank in (0, 1):
                assert ask(f"10.0.0.7:{sidecar.port + rank}", path).status == 200
        for engine in engines:
            posts = [one for one in engine.requests if one.method == "POST"]
            assert [one.target for one in posts] == [COMPLETIONS, "/tokenize"]
            assert not any(one.header("x-data-parallel-host-port") for one in posts)


def test_data_parallel_host_port_of_a_single_rank(rig: Rig) -> None:
    """There is nothing to choose: what other sidecars were told to ignore is ignored."""
    assert rig.post(COMPLETIONS, completion(), [("X-Data-Parallel-Host-Port", "10.0.0.7:1")]).status == 200


def test_listens_on_both_families(rig: Rig) -> None:
    for host in ("127.0.0.1", "::1") if HAS_IPV6 else ("127.0.0.1",):
        with Client((host, rig.sidecar.port)) as client:
            client.request("GET", "/version")
            assert client.answer().status == 200
        with socket.create_connection((host, rig.sidecar.admin_port)):
            pass
