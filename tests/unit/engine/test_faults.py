"""Each fault does to the wire what it says."""

from __future__ import annotations

import gzip
import json
import threading
import time
from typing import Any

import pytest

from tests.engine import Fault, ThreadedEngine
from tests.unit.engine.client import Wire, complete, completion_bytes


def answer_of(engine: ThreadedEngine, fault: Fault, **more: Any) -> bytes:
    """Everything that comes until the engine closes."""
    engine.fault(fault, path="/v1/completions")
    with Wire(engine) as wire:
        wire.send(completion_bytes(close=True, **more))
        return wire.rest()


def silence_after(engine: ThreadedEngine, fault: Fault, **more: Any) -> bytes:
    """What comes before nothing more comes, on a connection that stays open."""
    engine.fault(fault)
    with Wire(engine) as wire:
        wire.send(completion_bytes(**more))
        engine.wait_for(lambda engine: engine.requests and engine.requests[-1].silent)
        wire.socket.settimeout(0.2)  # all that comes is here by now; the longer this is, the more it shows
        got = b""
        try:
            while piece := wire.socket.recv(65536):
                got += piece
        except TimeoutError:
            return got
        raise AssertionError(f"closed after {got!r}")


def test_a_status_instead_of_the_answer(decode: ThreadedEngine) -> None:
    decode.fault(Fault(status=503, headers=[("Retry-After", "7")]))
    reply = complete(decode)
    assert reply.status == 503
    assert reply.header("retry-after") == "7"
    assert reply.json["error"]["code"] == 503
    assert decode.counter("prompt_tokens_total") == 0


def test_a_status_with_a_body_of_its_own(decode: ThreadedEngine) -> None:
    answer = answer_of(decode, Fault(status=418, headers=[("content-type", "text/plain")], body=b"tea"))
    assert answer.startswith(b"HTTP/1.1 418 ")
    assert answer.endswith(b"content-length: 3\r\nconnection: close\r\n\r\ntea")


def test_an_answer_before_the_body_was_read(decode: ThreadedEngine) -> None:
    decode.fault(Fault(status=413, early=True))
    with Wire(decode) as wire:
        wire.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n{")
        assert wire.rest().startswith(b"HTTP/1.1 413 ")


def test_a_late_head(decode: ThreadedEngine) -> None:
    began = time.monotonic()
    assert b"200 OK" in answer_of(decode, Fault(delay_head_seconds=0.15))
    assert time.monotonic() - began >= 0.15


def test_a_held_answer(decode: ThreadedEngine) -> None:
    go = threading.Event()
    decode.fault(Fault(hold=go))
    with Wire(decode) as wire:
        wire.send(completion_bytes(close=True))
        decode.wait_for(lambda engine: engine.requests)
        assert decode.counter("prompt_tokens_total") == 0
        go.set()
        assert b"200 OK" in wire.rest()


def test_silence(decode: ThreadedEngine) -> None:
    assert silence_after(decode, Fault(silence=True)) == b""
    decode.wait_for(lambda engine: engine.requests[0].client_gone)


def test_garbage_instead_of_an_answer(decode: ThreadedEngine) -> None:
    assert answer_of(decode, Fault(raw=b"\x00\xffgarbage")) == b"\x00\xffgarbage"


def test_bytes_instead_of_an_answer_and_no_end(decode: ThreadedEngine) -> None:
    assert silence_after(decode, Fault(raw=b"HTTP/1.1 200 OK\r\n", raw_close=False)) == b"HTTP/1.1 200 OK\r\n"


def test_resets(decode: ThreadedEngine) -> None:
    for fault in (Fault(reset="before_head"), Fault(reset="after_head"), Fault(reset="at_cut", cut_after_bytes=5)):
        decode.faults.clear()
        with pytest.raises(ConnectionResetError):
            answer_of(decode, fault)


def test_a_body_that_is_cut(decode: ThreadedEngine) -> None:
    head, _, body = answer_of(decode, Fault(cut_after_bytes=10)).partition(b"\r\n\r\n")
    assert b"content-length: 6" in head
    assert len(body) == 10


def test_a_stream_that_is_cut(decode: ThreadedEngine) -> None:
    answer = answer_of(decode, Fault(cut_after_events=2), stream=True)
    assert answer.count(b"data: ") == 2
    assert not answer.endswith(b"0\r\n\r\n")
    decode.wait_for(lambda engine: engine.running == 0)
    assert decode.aborted == 1


def test_a_stream_that_stalls(decode: ThreadedEngine) -> None:
    assert silence_after(decode, Fault(stall_after_events=2), stream=True).count(b"data: ") == 2


def test_a_body_that_stalls(decode: ThreadedEngine) -> None:
    assert len(silence_after(decode, Fault(stall_after_bytes=10)).partition(b"\r\n\r\n")[2]) == 10


def test_a_slow_drip(decode: ThreadedEngine) -> None:
    began = time.monotonic()
    answer = answer_of(decode, Fault(drip_bytes=100, drip_seconds=0.01))
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["object"] == "text_completion"
    assert time.monotonic() - began > 0.05


def test_ragged_events_are_the_same_stream(decode: ThreadedEngine) -> None:
    def stream() -> bytes:
        with Wire(decode) as wire:
            wire.send(completion_bytes(close=True, stream=True, request_id="a", return_token_ids=True))
            body = wire.rest().partition(b"\r\n\r\n")[2]
        whole = b""
        while body:
            size, _, body = body.partition(b"\r\n")
            whole += body[: int(size, 16)]
            body = body[int(size, 16) + 2 :]
        return whole

    smooth = stream()
    decode.fault(Fault(ragged=True))
    ragged = stream()
    assert ragged.count(b"data: ") == smooth.count(b"data: ")
    assert ragged.endswith(b"data: [DONE]\n\n")


def test_an_edited_answer(decode: ThreadedEngine) -> None:
    decode.fault(Fault(edit=lambda answer: {**answer, "choices": []}))
    assert complete(decode).json["choices"] == []


def test_an_error_event_first_or_later(decode: ThreadedEngine) -> None:
    answer = answer_of(decode, Fault(error_event_first=True), stream=True)
    assert answer.count(b"data: ") == 2
    assert b'data: {"error": {"message": "Internal server error"' in answer
    decode.faults.clear()
    answer = answer_of(decode, Fault(error_event_after=2), stream=True)
    assert answer.count(b"data: ") == 4
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_framing(decode: ThreadedEngine) -> None:
    early = b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"
    assert answer_of(decode, Fault(interim=early)).startswith(early + b"HTTP/1.1 200 OK")
    decode.faults.clear()
    head, _, body = answer_of(decode, Fault(content_length_delta=-3)).partition(b"\r\n\r\n")
    assert b"content-length: %d\r\n" % (len(body) - 3) in head
    decode.faults.clear()
    head, _, body = answer_of(decode, Fault(close_delimited=True)).partition(b"\r\n\r\n")
    assert b"content-length" not in head
    assert json.loads(body)
    decode.faults.clear()
    head, _, body = answer_of(decode, Fault(close_delimited=True), stream=True).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert body.endswith(b"data: [DONE]\n\n")
    decode.faults.clear()
    assert answer_of(decode, Fault(http_1_0=True)).startswith(b"HTTP/1.0 200 OK")
    decode.faults.clear()
    answer = answer_of(decode, Fault(trailers=[("x-late", "1")]), stream=True)
    assert answer.endswith(b"0\r\nx-late: 1\r\n\r\n")
    decode.faults.clear()
    assert answer_of(decode, Fault(extra_after_end=b"more")).endswith(b"}more")
    decode.faults.clear()
    assert len(answer_of(decode, Fault(pad_bytes=100_000))) > 100_000


def test_compressed_answers(decode: ThreadedEngine) -> None:
    head, _, body = answer_of(decode, Fault(gzip=True)).partition(b"\r\n\r\n")
    assert b"content-encoding: gzip" in head
    assert json.loads(gzip.decompress(body))
    decode.faults.clear()
    head, _, body = answer_of(decode, Fault(gzip=True, close_delimited=True), stream=True).partition(b"\r\n\r\n")
    assert gzip.decompress(body).endswith(b"data: [DONE]\n\n")


def test_a_connection_that_closes_without_saying_so(decode: ThreadedEngine) -> None:
    decode.fault(Fault(close_after=True))
    with Wire(decode) as wire:
        wire.send(completion_bytes())
        assert b"connection: close" not in wire.rest()


def test_connections_that_are_reset_or_never_read(decode: ThreadedEngine) -> None:
    decode.faults.reset_on_accept = True
    with pytest.raises(ConnectionResetError), Wire(decode) as wire:
        wire.rest()
    decode.faults.clear()
    decode.faults.silent_on_accept = True
    with Wire(decode, 0.1) as wire:
        wire.send(completion_bytes())
        with pytest.raises(TimeoutError):
            wire.rest()
    decode.faults.clear()
    assert complete(decode).status == 200


def test_rules_choose_by_number_path_predicate_and_times(decode: ThreadedEngine) -> None:
    second = decode.fault(Fault(status=500), path="/v1/completions", nth=2)
    assert [complete(decode).status for _ in range(3)] == [200, 500, 200]
    assert (second.seen, second.struck) == (3, 1)
    decode.faults.clear()
    decode.faults.once(Fault(status=501), when=lambda request: request.header("x-hit") == "1")
    headers = (("x-hit", "1"),)
    assert [complete(decode, headers=headers).status for _ in range(2)] == [501, 200]
    decode.faults.clear()
    decode.fault(Fault(status=502), path="/other")
    assert complete(decode).status == 200


def test_chance_follows_the_seed(decode: ThreadedEngine) -> None:
    decode.fault(Fault(status=500), probability=0.5)
    statuses = [complete(decode, "x").status for _ in range(40)]
    assert 8 < statuses.count(500) < 32
