"""Upgrades: WebSockets are tunnelled to the local engine, every other offer is ignored."""

from __future__ import annotations

import base64
import json
import os
import signal
import struct
from contextlib import suppress

import pytest

from tests.engine import Fault, ThreadedEngine
from tests.integration.apis import COMPLETIONS
from tests.integration.client import chunked, request
from tests.integration.sidecar import Rig, Sidecar, completion, eventually


def frame(payload: bytes, opcode: int = 2, *, masked: bool = True) -> bytes:
    """A WebSocket frame (RFC 6455)."""
    bit = 0x80 if masked else 0
    size = len(payload)
    if size < 126:
        head = bytes([0x80 | opcode, bit | size])
    elif size < 65536:
        head = bytes([0x80 | opcode, bit | 126]) + struct.pack(">H", size)
    else:
        head = bytes([0x80 | opcode, bit | 127]) + struct.pack(">Q", size)
    return head + (bytes(4) if masked else b"") + payload


def handshake(rest: bytes = b"") -> bytes:
    key = base64.b64encode(os.urandom(16)).decode()
    headers = [
        ("Connection", "keep-alive, Upgrade"),
        ("Upgrade", "websocket"),
        ("Sec-WebSocket-Version", "13"),
        ("Sec-WebSocket-Key", key),
    ]
    return request("GET", "/v1/realtime?model=x", headers=headers) + rest


def test_many_offers_at_once(rig: Rig) -> None:
    """Each is ignored, one after the other."""
    count = 3000
    offer = request("POST", "/", b"{}", [("Connection", "Upgrade"), ("Upgrade", "h2c")])
    with rig.sidecar.connect() as client:
        client.send(request("POST", COMPLETIONS, completion()) + offer * count)
        assert client.answer("POST").status == 200
        for _ in range(count):
            assert client.answer("POST").status == 404


def test_websocket(rig: Rig) -> None:
    """Both ways, of every size, at once; the end of either side is the end."""
    with rig.sidecar.connect() as client:
        client.send(handshake())
        answer = client.head()
        assert (answer.status, answer.header("upgrade")) == (101, "websocket")
        assert answer.header("sec-websocket-accept")
        for payload in (b"", b"x", os.urandom(125), os.urandom(70_000), os.urandom(2_000_000)):
            client.send(frame(payload))
            assert client.exactly(len(frame(payload, masked=False))) == frame(payload, masked=False)
        client.send(b"".join(frame(b"%d" % number) for number in range(1000)))
        echo = b"".join(frame(b"%d" % number, masked=False) for number in range(1000))
        assert client.exactly(len(echo)) == echo
        assert rig.sidecar.metrics()("requests_total", status="101") >= 0
        client.send(frame(struct.pack(">H", 1000), opcode=8))
        client.exactly(4)
        assert client.at_end()
    assert rig.decoded()[0].target == "/v1/realtime?model=x"


def test_websocket_with_data_behind_the_handshake(rig: Rig) -> None:
    with rig.sidecar.connect() as client:
        client.send(handshake(frame(b"early")))
        assert client.head().status == 101
        assert client.exactly(7) == frame(b"early", masked=False)


def test_websocket_client_that_vanishes(rig: Rig) -> None:
    with rig.sidecar.connect() as client:
        client.send(handshake())
        assert client.head().status == 101
    rig.decode.wait_for(lambda engine: not any(one.websocket for one in engine.server.connections))


def test_websocket_that_the_engine_ends(rig: Rig) -> None:
    with rig.sidecar.connect() as client:
        client.send(handshake())
        assert client.head().status == 101
        rig.decode.call(rig.decode.engine.server.abort_all)
        assert client.at_end()


def test_upgrade_that_the_engine_refuses(rig: Rig) -> None:
    """An answer like any other, and the connection goes on."""
    with rig.sidecar.connect() as client:
        client.send(handshake().replace(b"/v1/realtime", b"/v1/elsewhere"))
        assert client.answer().status == 404
        client.request("GET", "/version")
        assert client.answer().status == 200


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/unknown"])
def test_h2c_offered_with_a_post(rig: Rig, path: str) -> None:
    """Some clients offer HTTP/2 with every request: the offer is ignored, the request is not."""
    offer = [
        ("Connection", "Upgrade, HTTP2-Settings"),
        ("Upgrade", "h2c"),
        ("HTTP2-Settings", "AAMAAABkAARAAAAAAAIAAAAA"),
    ]
    with rig.sidecar.connect() as client:
        for body in (json.dumps(completion()).encode(), json.dumps(completion(8000)).encode()):
            client.request("POST", path, body, rig.headers(offer))
            answer = client.answer("POST")
            assert answer.status == (200 if path == COMPLETIONS else 404)
        client.request("POST", path, chunked(body), rig.headers([*offer, ("Transfer-Encoding", "chunked")]))
        assert client.answer("POST").status == answer.status
    assert all(asked.header("upgrade") is None for asked in rig.decoded())
    assert all(asked.body.endswith(b'"max_tokens": 8}') for asked in rig.decoded())


def test_unasked_upgrade_of_the_engine(rig: Rig) -> None:
    """101 to a request that asked for nothing is no answer."""
    rig.decode.fault(Fault(raw=b"HTTP/1.1 101 Surprise\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"), path="/v1/x")
    answer = rig.sidecar.ask("GET", "/v1/x")
    assert answer.status == 502
    assert answer.reason_code == "decode_garbage"


def test_websocket_while_draining() -> None:
    """It counts as an open answer."""
    with ThreadedEngine() as decode:
        sidecar = Sidecar("--model-server-port", str(decode.port))
        try:
            with sidecar.connect() as client:
                client.send(handshake())
                assert client.head().status == 101
                sidecar.signal(signal.SIGTERM)
                eventually(lambda: "draining" in sidecar.log)
                client.send(frame(b"still"))
                assert client.exactly(7) == frame(b"still", masked=False)
            assert sidecar.exit_code() == 0
        finally:
            sidecar.stop()


def test_slow_side_of_a_websocket(rig: Rig) -> None:
    """Back-pressure through the tunnel: what is not read is not stored."""
    before = rig.sidecar.rss_mib
    with rig.sidecar.connect() as client:
        client.send(handshake())
        assert client.head().status == 101
        rig.decode.freeze()
        client.socket.settimeout(0.3)
        sent = 0
        with suppress(TimeoutError):
            while sent < 60:
                client.send(frame(bytes(1 << 20)))
                sent += 1
        assert sent < 30
        assert rig.sidecar.rss_mib - before < 8
        rig.decode.thaw()


@pytest.mark.parametrize("connection", [[], [("Connection", "upgrade")]], ids=["not_wished", "wished"])
@pytest.mark.parametrize(
    "fields",
    [
        [],
        [("Content-Type", "application/json")],
        [("Content-Type", "multipart/form-data; boundary=x")],
        [("Content-Type", "multipart/form-data; boundary=x"), ("Transfer-Encoding", "chunked")],
    ],
    ids=["no_body", "read", "streamed", "streamed_in_chunks"],
)
def test_offer_with_any_body(rig: Rig, connection: list[tuple[str, str]], fields: list[tuple[str, str]]) -> None:
    """It is answered at once, and the connection goes on."""
    body = (chunked(b"{}") if len(fields) > 1 else b"{}") if fields else None
    with rig.sidecar.connect() as client:
        for _ in range(2):
            client.request("POST", "/v1/unknown", body, [*connection, ("Upgrade", "h2c"), *fields])
            assert client.answer("POST").status == 404
    assert [asked.body for asked in rig.decoded()] == [b"{}" if fields else b""] * 2
    assert all(asked.header("upgrade") is None for asked in rig.decoded())


def test_offer_of_an_old_client(rig: Rig) -> None:
    """It stays HTTP/1.0 without its offer: such a request needs no Host."""
    with rig.sidecar.connect() as client:
        offer = b"Connection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\n{}"
        client.send(b"POST /v1/unknown HTTP/1.0\r\n" + offer)
        assert client.answer("POST").status == 404
