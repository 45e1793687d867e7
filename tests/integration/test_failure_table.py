"""The failure table, row by row, over sockets: each row that clients or engines can bring about is brought about,
under both policies where the policy decides, and what the row says is what the client gets.

`scenario` names the rows; a row that is neither shown here nor excused fails the last test.
"""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from sidecar.exchange.failures import PREFILL_STATUS_RELAYED, ROWS, TABLE, Row, Stage, Then
from tests.engine import Fault, Received, ThreadedEngine
from tests.integration.apis import APIS, COMPLETIONS
from tests.integration.client import Answer, Cut
from tests.integration.sidecar import (
    CANARY,
    MAX_BODY_BYTES,
    BlackHole,
    Rig,
    Sidecar,
    chat,
    completion,
    eventually,
    quick,
    released,
)
from tests.ports import free_ports

Play = Callable[[Rig, dict[str, Any]], Answer | None]


@dataclass
class Scenario:
    """How a row comes about: `play` sends the body and returns the answer, or None where nobody waits for one."""

    play: Play
    prefill: dict[str, Any] = field(default_factory=dict)
    decode: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)


SCENARIOS: dict[tuple[Stage, str], Scenario] = {}


def scenario(stage: Stage, *faults: str, **more: Any) -> Callable[[Play], Play]:
    def register(play: Play) -> Play:
        for fault in faults:
            SCENARIOS[stage, fault] = Scenario(play, **more)
        return play

    return register


def with_handoff(received: Received) -> bool:
    return b"kv_transfer_params" in received.body


def send(rig: Rig, body: dict[str, Any]) -> Answer:
    return rig.post(COMPLETIONS, body)


def rows(*consequences: Then) -> list[Any]:
    return [pytest.param(row, id=row.reason) for row in ROWS if row.then in consequences and row not in EXCUSED]


def check_own_answer(answer: Answer, row: Row) -> None:
    """It is the row's: status, wording, stage, reason, Retry-After; OpenAI-shaped, and nothing of the prompt."""
    assert answer.status == row.status
    assert answer.header("content-type") == "application/json"
    error = answer.json["error"]
    assert (error["code"], error["stage"], error["reason"]) == (row.status, row.stage, row.reason)
    assert error["message"].startswith(row.message)
    assert {"message", "type", "param", "code"} <= error.keys()
    expected = str(row.retry_after_s) if row.retry_after_s else None
    assert answer.header("retry-after") == expected
    assert CANARY.encode() not in answer.body


# -- reading -------------------------------------------------------------------------------------------------


def raw(rig: Rig, data: bytes) -> Answer:
    with rig.sidecar.connect() as client:
        client.send(data)
        answer = client.answer("POST")
        assert client.at_end(), "nothing behind such a request can be trusted"
        return answer


@scenario(Stage.READING, "malformed")
def _malformed(rig: Rig, _body: dict[str, Any]) -> Answer:
    return raw(rig, b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nno colon\r\n\r\n")


@scenario(Stage.READING, "two_framings")
def _two_framings(rig: Rig, _body: dict[str, Any]) -> Answer:
    return raw(
        rig,
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    )


@scenario(Stage.READING, "bad_json")
def _bad_json(rig: Rig, _body: dict[str, Any]) -> Answer:
    return rig.post(COMPLETIONS, b'{"prompt": NaN}')


@scenario(Stage.READING, "bad_encoding")
def _bad_encoding(rig: Rig, _body: dict[str, Any]) -> Answer:
    return rig.post(COMPLETIONS, gzip.compress(b"{}" * 100)[:-9], [("Content-Encoding", "gzip")])


@scenario(Stage.READING, "unknown_encoding")
def _unknown_encoding(rig: Rig, _body: dict[str, Any]) -> Answer:
    return rig.post(COMPLETIONS, b"{}", [("Content-Encoding", "br")])


@scenario(Stage.READING, "too_slow")
def _too_slow(rig: Rig, _body: dict[str, Any]) -> Answer:
    return raw(rig, b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n")


@scenario(Stage.READING, "too_large")
def _too_large(rig: Rig, _body: dict[str, Any]) -> Answer:
    return raw(
        rig, b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % (MAX_BODY_BYTES + 1)
    )


@scenario(Stage.READING, "unknown_expectation")
def _unknown_expectation(rig: Rig, _body: dict[str, Any]) -> Answer:
    return raw(rig, b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nExpect: a miracle\r\nContent-Length: 2\r\n\r\n")


@scenario(Stage.READING, "head_too_large")
def _head_too_large(rig: Rig, _body: dict[str, Any]) -> Answer:
    return raw(rig, b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: 1\r\n" * 300 + b"\r\n")


@scenario(Stage.READING, "unknown_version")
def _unknown_version(rig: Rig, _body: dict[str, Any]) -> Answer:
    return raw(rig, b"GET / HTTP/2.0\r\nHost: a\r\n\r\n")


@scenario(Stage.READING, "not_allowed")
def _not_allowed(rig: Rig, body: dict[str, Any]) -> Answer:
    rig.target = "169.254.169.254:80"
    return send(rig, body)


@scenario(Stage.READING, "bad_target")
def _bad_target(rig: Rig, body: dict[str, Any]) -> Answer:
    rig.target = "127.1:80"
    return send(rig, body)


@scenario(Stage.READING, "client_left")
def _leaves_in_mid_body(rig: Rig, _body: dict[str, Any]) -> None:
    with rig.sidecar.connect() as client:
        client.send(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
        time.sleep(0.05)
    time.sleep(0.05)
    assert not rig.decoded()


# -- prefill -------------------------------------------------------------------------------------------------


@scenario(Stage.PREFILL, "rejected")
def _prefill_rejects(rig: Rig, body: dict[str, Any]) -> Answer:
    answer = Answer()
    for status in sorted(PREFILL_STATUS_RELAYED):
        asked = len(rig.prefilled())
        no = Fault(status=status, headers=[("X-Why", "because")], body=b'{"error": "no"}')
        rig.prefill.faults.once(no, path=COMPLETIONS)
        answer = send(rig, body)
        assert (answer.status, answer.body, answer.header("x-why")) == (status, b'{"error": "no"}', "because")
        assert len(rig.prefilled()) == asked + 1
    assert not rig.decoded()
    return answer


@scenario(Stage.PREFILL, "refused")
def _prefill_refuses(rig: Rig, body: dict[str, Any]) -> Answer:
    rig.target = f"127.0.0.1:{free_ports()}"
    return send(rig, body)


@scenario(Stage.PREFILL, "unreachable")
def _prefill_unreachable(rig: Rig, body: dict[str, Any]) -> Answer:
    """Case 31: a black hole costs the first request the connect timeout and the next ones nothing: no connection is
    tried for them."""
    with BlackHole() as hole:
        rig.target = hole.address
        began = time.monotonic()
        answer = send(rig, body)
        assert time.monotonic() - began > 0.25
        tried = rig.sidecar.metrics()("prefill_attempts_total")
        send(rig, completion())
        assert rig.sidecar.metrics()("prefill_attempts_total") == tried
    return answer


@scenario(Stage.PREFILL, "reset")
def _prefill_resets(rig: Rig, body: dict[str, Any]) -> Answer:
    rig.prefill.fault(Fault(reset="before_head"), path=COMPLETIONS)
    return send(rig, body)


@scenario(Stage.PREFILL, "timeout")
def _prefill_says_nothing(rig: Rig, body: dict[str, Any]) -> Answer:
    """Case 31: the deadline of the stage, not minutes; half a body is no better than none."""
    rig.prefill.faults.once(Fault(stall_after_bytes=20), path=COMPLETIONS)
    began = time.monotonic()
    answer = send(rig, body)
    assert time.monotonic() - began > 2.4
    (asked,) = rig.prefilled()
    eventually(lambda: asked.client_gone)
    return answer


@scenario(Stage.PREFILL, "peer_silent", prefill={"num_blocks": 4096})
def _prefill_freezes(rig: Rig, body: dict[str, Any]) -> Answer:
    """Long before the deadline of the stage: what answers no probe will not answer the request either."""
    rig.prefill.fault(Fault(silence=True), path=COMPLETIONS)
    with rig.open(COMPLETIONS, body) as client:
        rig.prefill.wait_for(lambda engine: any(one.method == "POST" for one in engine.requests))
        rig.prefill.freeze()
        answer = client.answer("POST")
    rig.prefill.thaw()
    return answer


@scenario(Stage.PREFILL, "busy")
def _prefill_busy(rig: Rig, body: dict[str, Any]) -> Answer:
    rig.prefill.fault(Fault(status=429), path=COMPLETIONS)
    return send(rig, body)


@scenario(Stage.PREFILL, "server_error")
def _prefill_errs(rig: Rig, body: dict[str, Any]) -> Answer:
    rig.prefill.fault(Fault(status=503), path=COMPLETIONS)
    return send(rig, body)


@scenario(Stage.PREFILL, "unexpected")
def _prefill_redirects(rig: Rig, body: dict[str, Any]) -> Answer:
    """A redirect is never followed."""
    rig.prefill.fault(Fault(status=307, headers=[("Location", rig.decode.url + COMPLETIONS)]), path=COMPLETIONS)
    return send(rig, body)


@scenario(Stage.PREFILL, "garbage")
def _prefill_garbage(rig: Rig, body: dict[str, Any]) -> Answer:
    rig.prefill.fault(Fault(raw=b"SSH-2.0-OpenSSH_9.6\r\n"), path=COMPLETIONS)
    return send(rig, body)


@scenario(Stage.PREFILL, "too_large")
def _prefill_answers_too_much(rig: Rig, body: dict[str, Any]) -> Answer:
    rig.prefill.fault(Fault(pad_bytes=MAX_BODY_BYTES), path=COMPLETIONS)
    return send(rig, body)


@scenario(Stage.PREFILL, "none_usable")
def _none_usable(rig: Rig, body: dict[str, Any]) -> Answer:
    rig.target = f"127.0.0.1:{free_ports()}"
    send(rig, completion())
    return send(rig, body)


@scenario(Stage.PREFILL, "client_left", prefill={"prefill_seconds_per_1k_tokens": 20.0})
def _leaves_during_prefill(rig: Rig, body: dict[str, Any]) -> None:
    with rig.open(COMPLETIONS, body):
        rig.prefill.wait_for(lambda engine: engine.running == 1)
    rig.prefill.wait_for(lambda engine: engine.aborted == 1)
    assert not rig.decoded()


# -- handoff -------------------------------------------------------------------------------------------------


@scenario(Stage.HANDOFF, "missing")
def _no_handoff(rig: Rig, body: dict[str, Any]) -> Answer:
    rig.prefill.fault(Fault(handoff_absent=True))
    return send(rig, body)


@scenario(Stage.HANDOFF, "invalid")
def _bad_handoff(rig: Rig, body: dict[str, Any]) -> Answer:
    rig.prefill.fault(Fault(handoff=lambda params: {**params, "remote_port": 0}))
    return send(rig, body)


@scenario(Stage.HANDOFF, "wrong_host")
def _foreign_host(rig: Rig, body: dict[str, Any]) -> Answer:
    rig.prefill.fault(Fault(handoff=lambda params: {**params, "remote_host": "10.1.2.3"}))
    return send(rig, body)


@scenario(Stage.HANDOFF, "expired")
def _late_handoff(rig: Rig, body: dict[str, Any]) -> Answer:
    """The lease runs from the head of the prefill answer on, however long its body takes."""
    rig.prefill.fault(Fault(drip_bytes=200, drip_seconds=0.25), path=COMPLETIONS)
    return send(rig, body)


@scenario(Stage.HANDOFF, "side_channel_dead")
def _dead_side_channel(rig: Rig, body: dict[str, Any]) -> Answer:
    rig.prefill.break_side_channel()
    rig.prefill.fault(Fault(), path="/nowhere")  # the engine is of no use to the next test
    return send(rig, body)


@scenario(Stage.HANDOFF, "incompatible", prefill={"compat_salt": "another model path"})
def _incompatible(rig: Rig, body: dict[str, Any]) -> Answer:
    """Case 39, as far as a first request can show it."""
    return send(rig, body)


@scenario(Stage.HANDOFF, "refused")
def _decode_gone(rig: Rig, body: dict[str, Any]) -> Answer:
    rig.decode.kill()
    try:
        return send(rig, body)
    finally:
        rig.decode.restart()


@scenario(Stage.HANDOFF, "client_left", prefill={"num_blocks": 4096})
def _leaves_with_a_handoff(rig: Rig, body: dict[str, Any]) -> None:
    """The client leaves while the side channel is asked; the blocks do not wait for the lease."""
    channel = rig.prefill.engine.cores[0].side_channel
    assert channel is not None
    channel.running.clear()
    with rig.open(COMPLETIONS, body):
        rig.prefill.wait_for(lambda engine: engine.held_blocks)
        eventually(lambda: rig.sidecar.metrics()("inflight", leg="prefill") == 0)
    channel.running.set()
    eventually(lambda: released(rig.decode))
    assert rig.sidecar.metrics()("handoffs_total", outcome="released") >= 1

    def given_back() -> bool:
        rig.ask_engine("POST", COMPLETIONS, completion(20))  # a decode engine that is cold tells with its next step
        return not rig.prefill.held_blocks

    eventually(given_back)


# -- pull ----------------------------------------------------------------------------------------------------


def refuse_handoff(rig: Rig, fault: Fault) -> None:
    """`fault` strikes the first decode leg, which is the one with a handoff."""
    rig.decode.faults.once(fault, path=COMPLETIONS)


@scenario(Stage.PULL, "rejected")
def _decode_rejects_handoff(rig: Rig, body: dict[str, Any]) -> Answer:
    refuse_handoff(rig, Fault(status=422, headers=[("Retry-After", "7")], body=b"no"))
    answer = send(rig, body)
    assert (answer.status, answer.body, answer.header("retry-after")) == (422, b"no", "7")
    assert len(rig.decoded()) == 1
    return answer


@scenario(Stage.PULL, "reset")
def _decode_resets_handoff(rig: Rig, body: dict[str, Any]) -> Answer:
    refuse_handoff(rig, Fault(reset="before_head"))
    return send(rig, body)


@scenario(Stage.PULL, "server_error")
def _decode_errs_on_handoff(rig: Rig, body: dict[str, Any]) -> Answer:
    refuse_handoff(rig, Fault(status=500))
    return send(rig, body)


@scenario(Stage.PULL, "error_event", fields={"stream": True})
def _decode_stream_begins_with_an_error(rig: Rig, body: dict[str, Any]) -> Answer:
    refuse_handoff(rig, Fault(error_event_first=True))
    return send(rig, body)


@scenario(Stage.PULL, "peer_silent", prefill={"num_blocks": 4096})
def _peer_freezes(rig: Rig, body: dict[str, Any]) -> Answer:
    """A frozen prefill engine would hang the decode engine for ever."""
    refuse_handoff(rig, Fault(silence=True))
    with rig.open(COMPLETIONS, body) as client:
        rig.decode.wait_for(lambda engine: any(map(with_handoff, engine.requests)))
        rig.prefill.freeze()
        began = time.monotonic()
        answer = client.answer("POST")
        assert time.monotonic() - began > 0.4
    rig.prefill.thaw()
    eventually(lambda: rig.decoded()[0].client_gone)
    return answer


@scenario(Stage.PULL, "garbage")
def _decode_garbage_on_handoff(rig: Rig, body: dict[str, Any]) -> Answer:
    refuse_handoff(rig, Fault(raw=b"\0\1\2 garbage\r\n\r\n"))
    return send(rig, body)


@scenario(Stage.PULL, "client_left", decode={"pull_seconds_per_1k_tokens": 0.75}, fields={"stream": True})
def _leaves_during_pull(rig: Rig, body: dict[str, Any]) -> None:
    """The transfer is not torn: the engine gets to its first token, then its connection is closed."""
    body |= {"max_tokens": 100_000, "ignore_eos": True}
    with rig.open(COMPLETIONS, body):
        rig.decode.wait_for(lambda engine: any(core.pulling for core in engine.cores))
    rig.decode.wait_for(lambda engine: engine.aborted == 1)
    (asked,) = rig.decoded()
    assert asked.events_sent >= 1
    assert asked.client_gone
    assert rig.decode.counter("prompt_tokens_external_kv_transfer") == 400
    assert rig.prefill.held_blocks == 0


# -- decode --------------------------------------------------------------------------------------------------


@scenario(Stage.DECODE, "rejected")
def _decode_rejects(rig: Rig, body: dict[str, Any]) -> Answer:
    """Case 28: a 4xx stays what it was and is not retried."""
    rig.target = ""
    for status in (400, 404, 422, 429):
        no = Fault(status=status, headers=[("Retry-After", "3")], body=b"why not")
        rig.decode.faults.once(no, path=COMPLETIONS)
        answer = send(rig, body)
        assert (answer.status, answer.body, answer.header("retry-after")) == (status, b"why not", "3")
    assert len(rig.decoded()) == 4
    return answer


@scenario(Stage.DECODE, "server_error")
def _decode_errs(rig: Rig, body: dict[str, Any]) -> Answer:
    rig.target = ""
    rig.decode.faults.once(Fault(status=503, headers=[("Retry-After", "9")], body=b"full"), path=COMPLETIONS)
    answer = send(rig, body)
    assert (answer.status, answer.body, answer.header("retry-after")) == (503, b"full", "9")
    assert len(rig.decoded()) == 1
    return answer


@scenario(Stage.DECODE, "refused")
def _no_engine(rig: Rig, body: dict[str, Any]) -> Answer:
    """Case 29: an engine that still loads its model is 503 with a message, not 502."""
    rig.target = ""
    rig.decode.kill()
    try:
        return send(rig, body)
    finally:
        rig.decode.restart()


@scenario(Stage.DECODE, "reset")
def _decode_resets(rig: Rig, body: dict[str, Any]) -> Answer:
    rig.target = ""
    rig.decode.fault(Fault(reset="before_head"), path=COMPLETIONS)
    return send(rig, body)


@scenario(Stage.DECODE, "garbage")
def _decode_garbage(rig: Rig, body: dict[str, Any]) -> Answer:
    rig.target = ""
    rig.decode.fault(Fault(raw=b"HTTP/1.1 two hundred\r\n\r\n"), path=COMPLETIONS)
    return send(rig, body)


@scenario(Stage.DECODE, "client_left", decode={"prefill_seconds_per_1k_tokens": 20.0})
def _leaves_before_first_byte(rig: Rig, body: dict[str, Any]) -> None:
    rig.target = ""
    with rig.open(COMPLETIONS, body):
        rig.decode.wait_for(lambda engine: engine.running == 1)
    rig.decode.wait_for(lambda engine: engine.aborted == 1)


# -- streaming -----------------------------------------------------------------------------------------------

BROKEN_STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"9\r\ndata: 1\n\n\r\nno size\r\n"
)


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions"])
@pytest.mark.parametrize("target", ["local", "remote"])
def test_stream_that_breaks_off(rigged: Callable[..., Rig], path: str, target: str) -> None:
    """Case 24: an error event, no [DONE], no clean end, no retry."""
    rig = rigged(*quick())
    if target == "local":
        rig.target = ""
    rig.decode.fault(Fault(cut_after_events=3), path=path)
    body = completion(stream=True) if path == COMPLETIONS else chat(stream=True)
    with rig.open(path, body) as client:
        answer = client.head()
        with pytest.raises(Cut):
            client.body(answer, "POST")
    assert answer.status == 200
    assert len(answer.events) == 4
    check_last_event(answer, TABLE[Stage.STREAMING, "reset"])
    assert len(rig.decoded()) == 1


def check_last_event(answer: Answer, row: Row) -> None:
    error = json.loads(answer.events[-1])["error"]
    assert (error["stage"], error["reason"], error["message"]) == (row.stage, row.reason, row.message)
    assert b"[DONE]" not in answer.body


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_stream_that_breaks_off_is_told_in_the_apis_own_words(rigged: Callable[..., Rig], path: str) -> None:
    """Case 24: clients of these APIs look at the event's type."""
    rig = rigged(*quick())
    rig.decode.fault(Fault(cut_after_events=3), path=path)
    with rig.open(path, APIS[path](stream=True)) as client:
        answer = client.head()
        with pytest.raises(Cut):
            client.body(answer, "POST")
    last = answer.body.rstrip(b"\n").rpartition(b"\n\n")[2].split(b"\n")
    assert last[0] == b"event: error"
    said = json.loads(last[1].removeprefix(b"data: "))
    assert said["type"] == "error"
    assert said.get("error", said)["reason"] == "streaming_reset"


def test_own_answer_in_the_apis_own_words(rigged: Callable[..., Rig]) -> None:
    rig = rigged(*quick("fail"))
    rig.prefill.fault(Fault(status=500), path="/v1/messages")
    answer = rig.post("/v1/messages", chat())
    assert answer.json["type"] == "error"
    assert answer.reason_code == "prefill_server_error"


@pytest.mark.parametrize("target", ["local", "remote"])
def test_stream_that_breaks_off_in_mid_event(rigged: Callable[..., Rig], target: str) -> None:
    """Where the framing leaves no room for an event the body is cut, which says it as well."""
    rig = rigged(*quick())
    if target == "local":
        rig.target = ""
    rig.decode.fault(Fault(cut_after_bytes=700, ragged=True), path=COMPLETIONS)
    with rig.open(COMPLETIONS, completion(stream=True)) as client:
        answer = client.head()
        with pytest.raises(Cut):
            client.body(answer, "POST")
    assert answer.body.startswith(b"data: ")
    assert b"[DONE]" not in answer.body


PREAMBLE = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\n: hi\n\r\n1\r\n\n\r\n"
)


@pytest.mark.parametrize(
    ("path", "events"),
    [
        ("/v1/responses", [b'event: response.created\ndata: {"type":"response.created"}\n\n']),
        ("/v1/responses", [b'event: response.created\ndata: {"type":"response.created"}\n\n'] * 2),
        (COMPLETIONS, []),
    ],
)
def test_load_failure_behind_a_preamble(rigged: Callable[..., Rig], path: str, events: list[bytes]) -> None:
    """What an engine says before it has any KV proves nothing: comments, and events about the request itself."""
    rig = rigged(*quick())
    error = b'data: {"error": {"message": "Internal server error", "code": 500}}\n\n'
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in [*events, error])
    rig.decode.faults.once(Fault(raw=PREAMBLE + chunks + b"0\r\n\r\n"), path=path)
    body = APIS[path](stream=True)
    answer = rig.post(path, body)
    assert answer.decision == "recompute; reason=pull_error_event"
    assert answer.text == rig.expected(path, body)


def test_prefill_answer_that_is_compressed_unasked(rigged: Callable[..., Rig]) -> None:
    rig = rigged(*quick())
    rig.prefill.fault(Fault(gzip=True), path=COMPLETIONS)
    answer = send(rig, completion())
    assert answer.status == 200
    assert answer.decision == "recompute; reason=handoff_invalid"


def test_one_cause_is_said_once(rigged: Callable[..., Rig]) -> None:
    """However often it happens; the metrics count it."""
    rig = rigged(*quick())
    rig.prefill.fault(Fault(status=429), path=COMPLETIONS)
    before = rig.sidecar.metrics()("prefill_attempts_total", outcome="busy")
    for _ in range(30):
        assert send(rig, completion(20)).status == 200
    assert rig.sidecar.log.count(f"prefill_busy {rig.prefill.address}: ") == 1
    assert rig.sidecar.metrics()("prefill_attempts_total", outcome="busy") == before + 30


def test_stream_that_becomes_garbage(rigged: Callable[..., Rig]) -> None:
    rig = rigged(*quick())
    rig.target = ""
    rig.decode.fault(Fault(raw=BROKEN_STREAM, raw_close=False), path=COMPLETIONS)
    with rig.open(COMPLETIONS, completion(stream=True)) as client:
        answer = client.head()
        with pytest.raises(Cut):
            client.body(answer, "POST")
    check_last_event(answer, TABLE[Stage.STREAMING, "garbage"])


@pytest.mark.parametrize("chunked", [False, True])
def test_whole_answer_that_breaks_off(rigged: Callable[..., Rig], chunked: bool) -> None:
    """Case 23: where it is no event stream, the body is cut and cannot be taken for a whole one."""
    rig = rigged(*quick())
    rig.target = ""
    if chunked:
        fault = Fault(raw=b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n12345\r\n")
    else:
        fault = Fault(cut_after_bytes=30)
    rig.decode.fault(fault, path=COMPLETIONS)
    with rig.open(COMPLETIONS, completion()) as client:
        answer = client.head()
        with pytest.raises(Cut):
            client.body(answer, "POST")
    assert len(answer.body) in (5, 30)


@scenario(Stage.STREAMING, "client_left", decode={"seconds_per_token": 0.02}, fields={"stream": True})
def _leaves_in_mid_stream(rig: Rig, body: dict[str, Any]) -> None:
    body |= {"max_tokens": 100_000, "ignore_eos": True}
    with rig.open(COMPLETIONS, body) as client:
        answer = client.head()
        next(client.pieces(answer))
    rig.decode.wait_for(lambda engine: engine.aborted == 1)
    assert rig.decoded()[0].events_sent < 1000


# -- the tests -----------------------------------------------------------------------------------------------

SHOWN_APART = {
    TABLE[Stage.READING, "unknown_rank"],
    TABLE[Stage.STREAMING, "reset"],
    TABLE[Stage.STREAMING, "garbage"],
    TABLE[Stage.HANDOFF, "unverifiable"],
    TABLE[Stage.HANDOFF, "unreachable"],
    TABLE[Stage.DECODE, "unreachable"],
    TABLE[Stage.DECODE, "over_budget"],
}
"""Rows with a test of their own in this file."""

NOT_OVER_SOCKETS: dict[Row, str] = {
    TABLE[Stage.HANDOFF, "own_channel_dead"]: "another connector's: tests/integration/test_offloading.py",
}
"""Rows that clients and engines of this file cannot bring about, and why."""

EXCUSED = SHOWN_APART | NOT_OVER_SOCKETS.keys()


def play(rigged: Callable[..., Rig], row: Row, policy: str) -> tuple[Rig, dict[str, Any], Answer | None]:
    scene = SCENARIOS[row.stage, row.fault]
    rig = rigged(*quick(policy), prefill=scene.prefill, decode=scene.decode)
    body = completion(**scene.fields)
    return rig, body, scene.play(rig, body)


@pytest.mark.parametrize("row", rows(Then.NEXT, Then.POLICY))
def test_recompute(rigged: Callable[..., Rig], row: Row) -> None:
    """The policy `recompute`: the client gets the whole, right answer and is told why it took so long."""
    rig, body, answer = play(rigged, row, "recompute")
    assert answer is not None
    assert answer.status == 200
    if row.fault == "none_usable":
        assert answer.decision == "local; reason=no_usable_prefill"
    else:
        assert answer.decision == f"recompute; reason={row.reason}"
        assert rig.decision_on(answer)["faults"][-1]["reason"] == row.reason
        metrics = rig.sidecar.metrics()
        assert metrics("fallbacks_total", stage=str(row.stage), reason=row.fault) >= 1
    assert answer.text == rig.expected(COMPLETIONS, body)
    carried = [one for one in rig.decoded() if with_handoff(one)]
    assert len(carried) == (row.stage is Stage.PULL), "a handoff that is not good, or twice the same"
    assert rig.decode.alive


@pytest.mark.parametrize("row", rows(Then.NEXT, Then.POLICY))
def test_fail(rigged: Callable[..., Rig], row: Row) -> None:
    """The policy `fail`: the row's own answer, and the decode engine computes nothing."""
    rig, _, answer = play(rigged, row, "fail")
    assert answer is not None
    check_own_answer(answer, row)
    assert answer.decision == f"refused; reason={row.reason}"
    assert len(rig.decoded()) == (row.stage is Stage.PULL)


@pytest.mark.parametrize("row", rows(Then.ANSWER))
def test_own_answer(rigged: Callable[..., Rig], row: Row) -> None:
    rig, _, answer = play(rigged, row, "recompute")
    assert answer is not None
    check_own_answer(answer, row)
    is_decision = row.fault in ("not_allowed", "bad_target")  # a guard's reasons have no stage in front
    label = row.fault if is_decision else row.reason
    assert rig.sidecar.metrics()("requests_total", reason=label, status=str(row.status)) >= 1
    if row.stage is Stage.READING:
        assert not rig.decoded()
        assert not rig.prefilled()


@pytest.mark.parametrize("row", rows(Then.RELAY, Then.CLOSE, Then.RELEASE, Then.TO_FIRST_BYTE))
def test_other_consequences(rigged: Callable[..., Rig], row: Row) -> None:
    play(rigged, row, "recompute")


def test_a_port_that_is_no_ranks() -> None:
    """Row `reading_unknown_rank`: it takes a sidecar of several."""
    first = free_ports(2)
    with ThreadedEngine(port=first) as engine:
        sidecar = Sidecar("--model-server-port", str(first), "--data-parallel-size", "2", ranks=2, ready="/livez")
        try:
            for nowhere in (f"10.0.0.7:{sidecar.port + 2}", "10.0.0.7", "10.0.0.7:x", "", ":99999999"):
                headers = [("X-Data-Parallel-Host-Port", nowhere)]
                answer = sidecar.ask("POST", COMPLETIONS, completion(), headers)
                check_own_answer(answer, TABLE[Stage.READING, "unknown_rank"])
            assert not [one for one in engine.requests if one.method == "POST"]
        finally:
            sidecar.kill()


def test_black_holed_decode_engine() -> None:
    """Rows `decode_unreachable` and `handoff_unreachable`."""
    with BlackHole() as hole, ThreadedEngine() as prefill:
        sidecar = Sidecar(
            *("--model-server-port", str(hole.port), "--disagg", "on", "--prefill", prefill.address),
            ready="/livez",
        )
        try:
            prefill.wait_for(lambda engine: any(one.status for one in engine.requests if one.target == "/metrics"))
            with ThreadPoolExecutor() as pool:
                split = pool.submit(sidecar.ask, "POST", COMPLETIONS, completion())
                local = pool.submit(sidecar.ask, "POST", COMPLETIONS, completion(echo=True))
                check_own_answer(split.result(), TABLE[Stage.HANDOFF, "unreachable"])
                check_own_answer(local.result(), TABLE[Stage.DECODE, "unreachable"])
        finally:
            sidecar.stop()


def test_unknown_block_size() -> None:
    """Row `handoff_unverifiable`: a handoff that cannot be checked is not passed on; none is asked for where it is
    known beforehand."""
    with ThreadedEngine() as mute, ThreadedEngine() as prefill, ThreadedEngine() as decode:
        for engine in (mute, decode):
            engine.fault(Fault(status=404), path="/metrics")
        sidecar = Sidecar(
            *("--model-server-port", str(decode.port), "--disagg", "on", "--nixl-relay", "off"),
            *("--prefill", mute.address, "--prefill", prefill.address),
        )
        try:
            named = [("x-prefiller-host-port", mute.address)]
            answer = sidecar.ask("POST", COMPLETIONS, completion(), named)
            assert (answer.status, answer.decision) == (200, "local; reason=no_usable_prefill")
            assert not [one for one in mute.requests if one.method == "POST"]
            prefill.wait_for(lambda engine: any(one.status for one in engine.requests if one.target == "/metrics"))
            named = [("x-prefiller-host-port", f"{mute.address},{prefill.address}")]
            answer = sidecar.ask("POST", COMPLETIONS, completion(), named)
            assert (answer.status, answer.decision) == (200, "recompute; reason=handoff_unverifiable")
            assert not any(map(with_handoff, decode.requests))
        finally:
            sidecar.stop()


def test_recompute_budget(rigged: Callable[..., Rig]) -> None:
    """Row `decode_over_budget`; case 30: what the budget does not admit is answered, not queued."""
    rig = rigged(*quick())
    rig.target = f"127.0.0.1:{free_ports()}"
    first_may_end = threading.Event()
    rig.decode.faults.once(Fault(hold=first_may_end), path=COMPLETIONS)
    with rig.open(COMPLETIONS, completion()) as first:
        eventually(rig.decoded)
        assert rig.sidecar.metrics()("recompute_inflight") == 1
        rig.target = f"127.0.0.1:{free_ports()}"
        check_own_answer(send(rig, completion()), TABLE[Stage.DECODE, "over_budget"])
        first_may_end.set()
        assert first.answer("POST").status == 200
    assert send(rig, completion()).status == 200


def test_every_row_is_shown() -> None:
    shown = {TABLE[key] for key in SCENARIOS}
    assert not shown & EXCUSED
    assert shown | EXCUSED == set(ROWS)
