"""How each row of the failure table comes about over sockets: what befalls clients and engines. What must hold then
is test_failure_table.py's.
"""

from __future__ import annotations

import gzip
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sidecar.exchange.failures import PREFILL_STATUS_RELAYED, Stage
from tests.engine import Fault, Received
from tests.integration.apis import COMPLETIONS
from tests.integration.client import Answer
from tests.integration.sidecar import MAX_BODY_BYTES, BlackHole, Rig, completion, eventually, released
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


# -- streaming ---------------------------------------------------------------------------------------------


@scenario(Stage.STREAMING, "client_left", decode={"seconds_per_token": 0.02}, fields={"stream": True})
def _leaves_in_mid_stream(rig: Rig, body: dict[str, Any]) -> None:
    body |= {"max_tokens": 100_000, "ignore_eos": True}
    with rig.open(COMPLETIONS, body) as client:
        answer = client.head()
        next(client.pieces(answer))
    rig.decode.wait_for(lambda engine: engine.aborted == 1)
    assert rig.decoded()[0].events_sent < 1000
