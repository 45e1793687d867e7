"""The failure table, row by row, over sockets: each row that clients or engines can bring about is brought about,
under both policies where the policy decides, and what the row says is what the client gets.

How a row comes about is in rows.py, what must hold then is here; a row that is neither shown nor excused fails the
last test.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sidecar.exchange.failures import ROWS, TABLE, Row, Stage, Then
from tests.engine import Fault, ThreadedEngine
from tests.integration.apis import APIS, COMPLETIONS
from tests.integration.client import Answer, Cut
from tests.integration.rows import SCENARIOS, send, with_handoff
from tests.integration.sidecar import (
    CANARY,
    BlackHole,
    Rig,
    Sidecar,
    chat,
    completion,
    eventually,
    quick,
)
from tests.ports import free_ports


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
    TABLE[Stage.PREFILL, "no_adapter"]: "these engines have no adapters: tests/integration/test_adapters.py",
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
