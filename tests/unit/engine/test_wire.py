"""HTTP as uvicorn speaks it."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.engine.client import Wire, completion_bytes

if TYPE_CHECKING:
    from tests.engine import ThreadedEngine
    from tests.unit.engine.conftest import Start

GET_HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


def test_a_whole_answer_has_length_date_and_server(decode: ThreadedEngine) -> None:
    with Wire(decode) as wire:
        wire.send(completion_bytes())
        head = wire.until(b"\r\n\r\n").partition(b"\r\n\r\n")[0]
    lines = head.split(b"\r\n")
    assert lines[0] == b"HTTP/1.1 200 OK"
    assert [line.split(b": ")[0] for line in lines[1:]] == [
        b"date",
        b"server",
        b"content-length",
        b"content-type",
        b"vary",
    ]


def test_a_stream_is_chunked_with_one_event_in_each_chunk(decode: ThreadedEngine) -> None:
    with Wire(decode) as wire:
        wire.send(completion_bytes(stream=True, max_tokens=3))
        answer = wire.until(b"\r\n0\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head
    assert b"content-length" not in head
    sizes = [int(size, 16) for size in re.findall(rb"(?:^|\r\n)([0-9a-f]+)\r\n", body)]
    assert len(sizes) == 5
    assert body.count(b"\n\n\r\n") == 4


def test_a_connection_serves_one_request_after_the_other(decode: ThreadedEngine) -> None:
    with Wire(decode) as wire:
        for _ in range(3):
            wire.send(GET_HEALTH)
            assert wire.until(b"\r\n\r\n").startswith(b"HTTP/1.1 200 OK\r\n")
        wire.send(GET_HEALTH * 3)
        got = b""
        while got.count(b"200 OK") < 3:
            got += wire.until(b"\r\n\r\n")
    assert decode.connections_total == 1
    assert len(decode.requests) == 6


def test_an_idle_connection_is_closed_but_not_a_fresh_one(start: Start) -> None:
    engine = start(keep_alive_seconds=0.1)
    with Wire(engine) as fresh, Wire(engine) as used:
        used.send(GET_HEALTH)
        used.until(b"\r\n\r\n")
        assert used.rest() == b""
        assert engine.connections_open == 1
        fresh.send(GET_HEALTH)
        fresh.until(b"\r\n\r\n")


def test_connection_close_is_echoed_and_done(decode: ThreadedEngine) -> None:
    with Wire(decode) as wire:
        wire.send(completion_bytes(close=True))
        assert b"\r\nconnection: close\r\n" in wire.rest()


def test_http_1_0_closes(decode: ThreadedEngine) -> None:
    with Wire(decode) as wire:
        wire.send(b"GET /health HTTP/1.0\r\n\r\n")
        assert wire.rest().startswith(b"HTTP/1.1 200 OK")


def test_garbage_is_a_400_of_the_server_itself(decode: ThreadedEngine) -> None:
    with Wire(decode) as wire:
        wire.send(b"no http at all\r\n\r\n")
        answer = wire.rest()
    assert answer.startswith(b"HTTP/1.1 400 Bad Request")
    assert answer.endswith(b"Invalid HTTP request received.")


def test_expect_is_answered_before_the_body_comes(decode: ThreadedEngine) -> None:
    head, _, body = completion_bytes().partition(b"\r\n\r\n")
    with Wire(decode) as wire:
        wire.send(head + b"\r\nExpect: 100-continue\r\n\r\n")
        assert wire.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        wire.send(body)
        assert b"200 OK" in wire.until(b"\r\n\r\n")


def test_chunked_requests_are_read(decode: ThreadedEngine) -> None:
    body = b'{"prompt":"a","max_tokens":1}'
    with Wire(decode) as wire:
        wire.send(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n5\r\n" + body[:5] + b"\r\n"
        )
        time.sleep(0.02)
        wire.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body) - 5, body[5:]))
        assert b"200 OK" in wire.until(b"\r\n\r\n")
    assert decode.requests[0].body == body


def test_requests_are_recorded_as_they_came(decode: ThreadedEngine) -> None:
    with Wire(decode) as wire:
        wire.send(b"GET /health?A=%41 HTTP/1.1\r\nHoSt: x\r\nX-Twice: 1\r\nx-twice:  2\r\n\r\n")
        wire.until(b"\r\n\r\n")
    request = decode.requests[0]
    assert (request.method, request.target, request.path) == ("GET", "/health?A=%41", "/health")
    assert request.headers == [(b"HoSt", b"x"), (b"X-Twice", b"1"), (b"x-twice", b"2")]
    assert request.header("X-TWICE") == "1"
    assert request.status == 200
    decode.wait_for(lambda engine: engine.requests[0].complete)
    assert request.received_at is not None
    assert request.head_at is not None
    assert request.answered_at is not None
    assert request.began_at <= request.received_at <= request.head_at <= request.answered_at


def test_a_client_that_leaves_aborts_its_request(start: Start) -> None:
    engine = start(seconds_per_token=0.05)
    with Wire(engine) as wire:
        wire.send(completion_bytes(stream=True, max_tokens=1000, ignore_eos=True))
        wire.until(b"data: ")
        assert engine.running == 1
    engine.wait_for(lambda e: e.running == 0)
    assert engine.aborted == 1
    assert engine.used_blocks == 0
    assert engine.requests[0].client_gone
    assert not engine.requests[0].complete


def test_half_closing_is_leaving(start: Start) -> None:
    engine = start(seconds_per_token=0.05)
    with Wire(engine) as wire:
        wire.send(completion_bytes(max_tokens=1000, ignore_eos=True))
        engine.wait_for(lambda e: e.running == 1)
        wire.socket.shutdown(socket.SHUT_WR)
        engine.wait_for(lambda e: e.running == 0)
        assert wire.rest() == b""


def test_a_slow_reader_stops_the_stream(start: Start) -> None:
    engine = start()
    with Wire(engine) as wire:
        wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wire.send(completion_bytes(stream=True, max_tokens=100_000, ignore_eos=True))
        wire.until(b"data: ")
        sent = -1
        while engine.requests[0].bytes_sent != sent:
            sent = engine.requests[0].bytes_sent
            time.sleep(0.1)
        assert engine.running == 1


def test_a_websocket_echoes(decode: ThreadedEngine) -> None:
    with Wire(decode) as wire:
        wire.send(
            b"GET /v1/realtime HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        head = wire.until(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 ")
        assert b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" in head  # RFC 6455, section 1.3
        mask = b"\x01\x02\x03\x04"
        hello = bytes(byte ^ mask[i % 4] for i, byte in enumerate(b"Hello"))
        wire.send(b"\x81\x85" + mask + hello)
        assert wire.until(b"Hello") == b"\x81\x05Hello"
        long = os.urandom(300)
        wire.send(b"\x82\xfe\x01\x2c" + bytes(4) + long)
        assert wire.until(long) == b"\x82\x7e\x01\x2c" + long
        wire.send(b"\x88\x80" + mask)
        assert wire.rest() == b"\x88\x00"


def test_other_upgrades_are_ignored(decode: ThreadedEngine) -> None:
    with Wire(decode) as wire:
        wire.send(b"GET /health HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n")
        assert wire.until(b"\r\n\r\n").startswith(b"HTTP/1.1 200 OK")


def test_an_engine_may_listen_on_a_unix_socket(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "engine"
    start(uds=str(path))
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(GET_HEALTH)
        assert client.recv(100).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("size", [1 << 20, 4 << 20])
def test_large_prompts_pass(start: Start, size: int) -> None:
    engine = start(num_blocks=200_000, max_model_len=4 << 20)
    prompt = ("word " * (size // 5))[:size]
    with Wire(engine, 30) as wire:
        wire.send(completion_bytes(prompt, max_tokens=1))
        head, _, body = wire.until(b'"metrics":null}').partition(b"\r\n\r\n")
    assert b"200 OK" in head
    assert json.loads(body)["usage"]["prompt_tokens"] == -(-len(prompt) // 4)
