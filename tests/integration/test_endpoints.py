"""Which prefill endpoint a request goes to: what a header may name, the choice among several, the next one after a
failure, and when an endpoint is left alone."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.engine import Fault, ThreadedEngine
from tests.integration.apis import APIS, CHAT, COMPLETIONS
from tests.integration.sidecar import Rig, Sidecar, chat, completion, eventually, prompt
from tests.ports import free_ports


@pytest.fixture
def second() -> Iterator[ThreadedEngine]:
    """Another prefill engine."""
    with ThreadedEngine() as engine:
        yield engine


def asked(engine: ThreadedEngine) -> int:
    return sum(1 for one in engine.requests if one.method == "POST")


# -- what a header may name ----------------------------------------------------------------------------------

REFUSED_TARGETS = [
    "10.0.0.1:8000",
    "169.254.169.254:80",
    "[::1]:8000",
    "[::ffff:10.0.0.1]:8000",
    "localhost:8000",
    "example.com:80",
    "0.0.0.0:80",
    "128.0.0.1:80",
]
BAD_TARGETS = [
    "127.0.0.1",
    "127.0.0.1:",
    ":8000",
    "127.0.0.1:0",
    "127.0.0.1:65536",
    "127.0.0.1:8000:9000",
    "127.1:8000",
    "0x7f000001:8000",
    "2130706433:8000",
    "0177.0.0.1:8000",
    "127.0.0.1:80/path",
    "user@127.0.0.1:80",
    "::1:8000",
    "127.0.0.1:+80",
    "127.0.0.1:\xb2",
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_targets_that_nothing_admits(rig: Rig, path: str) -> None:
    """Closed by default: 403, and nobody is contacted."""
    for target in REFUSED_TARGETS:
        rig.target = target
        answer = rig.post(path, APIS[path]())
        assert (answer.status, answer.reason_code) == (403, "reading_not_allowed"), target
    assert not rig.decoded()


def test_targets_that_are_none(rig: Rig) -> None:
    for target in BAD_TARGETS:
        rig.target = target
        answer = rig.post(COMPLETIONS, completion())
        assert (answer.status, answer.reason_code) == (400, "reading_bad_target"), target
    assert not rig.decoded()


@pytest.mark.parametrize(
    "form", ["{host}:{port}", " {host}:{port} ", "[::ffff:{host}]:{port}", "http://{host}:{port}/"]
)
def test_spellings_of_an_allowed_target(rig: Rig, form: str) -> None:
    """One address, however it is written: what is admitted in one form is in every other."""
    host, port = rig.prefill.address.split(":")
    rig.target = form.format(host=host, port=port)
    answer = rig.post(COMPLETIONS, completion())
    assert answer.decision == f"remote; prefill={rig.prefill.address}"


@pytest.mark.parametrize("path", ["/v1/models", "/v1/unknown", "/tokenize"])
def test_a_target_on_other_paths_means_nothing(rig: Rig, path: str) -> None:
    """And is not shown to the engine."""
    answer = rig.sidecar.ask("GET", path, headers=[("x-prefiller-host-port", "10.0.0.1:80")])
    assert answer.status in (200, 404, 405)
    assert rig.decoded()[0].header("x-prefiller-host-port") is None


# -- several -------------------------------------------------------------------------------------------------


def test_a_list_is_tried_in_its_order(rig: Rig, second: ThreadedEngine) -> None:
    rig.target = f"{second.address},{rig.prefill.address}"
    for _ in range(3):
        assert rig.chat().decision == f"remote; prefill={second.address}"
    second.refuse()
    second.call(second.engine.server.abort_all)
    assert rig.chat().decision == f"remote; prefill={rig.prefill.address}"


def test_a_list_without_an_order(rigged: Callable[..., Rig], second: ThreadedEngine) -> None:
    """`--enable-prefiller-sampling`: whoever is named first."""
    rig = rigged("--enable-prefiller-sampling", "on")
    rig.target = f"{second.address},{rig.prefill.address}"
    decisions = {rig.chat().decision for _ in range(30)}  # one side only: twice in 10^9
    assert decisions == {f"remote; prefill={address}" for address in (second.address, rig.prefill.address)}


@pytest.mark.parametrize(
    "fault",
    [
        Fault(reset="before_head"),
        Fault(status=429),
        Fault(status=503),
        Fault(status=307),
        Fault(reset="after_head"),
    ],
    ids=["reset", "busy", "error", "redirect", "reset later"],
)
def test_next_endpoint_after_a_failure(rig: Rig, second: ThreadedEngine, fault: Fault) -> None:
    """Cases 28 and 32: a fresh attempt elsewhere with the whole body; the client sees nothing of it."""
    second.fault(fault, path=CHAT)
    rig.target = f"{second.address},{rig.prefill.address}"
    body = chat()
    answer = rig.post(CHAT, body)
    assert answer.status == 200
    assert answer.decision == f"remote; prefill={rig.prefill.address}"
    assert answer.text == rig.expected(CHAT, body)
    bodies = {one.body for one in second.requests if one.method == "POST"} | {rig.prefilled()[0].body}
    assert len(bodies) == 1
    assert rig.decision_on(answer)["faults"][0]["prefill"] == second.address


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_no_next_endpoint_after_the_clients_own_mistake(rig: Rig, second: ThreadedEngine, status: int) -> None:
    """Case 28: every engine would say the same."""
    second.fault(Fault(status=status), path=CHAT)
    rig.target = f"{second.address},{rig.prefill.address}"
    assert rig.chat().status == status
    assert not rig.prefilled()


def test_attempts_are_limited(rigged: Callable[..., Rig], second: ThreadedEngine) -> None:
    """--prefill-attempts endpoints, each a different one; then the policy."""
    rig = rigged()
    with ThreadedEngine() as third:
        for engine in (rig.prefill, second, third):
            engine.fault(Fault(status=500), path=CHAT)
        rig.target = ",".join(engine.address for engine in (second, third, rig.prefill))
        answer = rig.chat()
        assert answer.decision == "recompute; reason=prefill_server_error"
        assert [asked(engine) for engine in (second, third, rig.prefill)] == [1, 1, 0]


def test_a_poison_request_meets_one_engine_at_a_time(rig: Rig, second: ThreadedEngine) -> None:
    """Case 22: a body that ends every engine that reads it: in turn, counted by the budget, and not without end."""
    for engine in (rig.prefill, second, rig.decode):
        engine.fault(Fault(reset="before_head"), path=CHAT)
    rig.target = f"{second.address},{rig.prefill.address}"
    answer = rig.post(CHAT, chat(response_format={"type": "json_object"}))
    assert (answer.status, answer.reason_code) == (502, "decode_reset")
    spans = sorted(
        (one.began_at, one.received_at)
        for engine in (second, rig.prefill, rig.decode)
        for one in engine.requests
        if one.method == "POST"
    )
    assert len(spans) <= 3
    assert all(earlier[1] <= later[0] for earlier, later in itertools.pairwise(spans))


def test_configured_endpoints(second: ThreadedEngine) -> None:
    """--prefill endpoints are candidates, of which the one with the fewest requests in flight is asked, and allowed
    targets; --prefill-allow HOST:PORT is that port alone."""
    options = {"prefill_seconds_per_1k_tokens": 3.0}
    with ThreadedEngine(**options) as first, ThreadedEngine(**options) as other, ThreadedEngine() as decode:
        sidecar = Sidecar(
            *("--model-server-port", str(decode.port), "--disagg", "on"),
            *("--prefill", first.address, "--prefill", other.address, "--prefill-allow", second.address),
        )

        def decision(target: str) -> str:
            headers = [("x-prefiller-host-port", target)] if target else []
            return sidecar.ask("POST", COMPLETIONS, completion(), headers).decision

        try:
            with ThreadPoolExecutor(10) as pool:
                decisions = list(pool.map(decision, [""] * 10))
            assert all(one.startswith("remote") for one in decisions)
            assert sorted([asked(first), asked(other)]) in ([4, 6], [5, 5])
            assert decision(first.address) == f"remote; prefill={first.address}"
            assert decision(second.address) == f"remote; prefill={second.address}"
            assert decision(f"127.0.0.1:{free_ports()}") == "refused; reason=not_allowed"
            # Of a list the foreign ones are left out.
            assert decision(f"10.0.0.1:80, {second.address}") == f"remote; prefill={second.address}"
        finally:
            sidecar.stop()


def test_turns_of_a_conversation_share_an_endpoint() -> None:
    """Their prompts begin alike, and the endpoint has their KV cached. The next conversation may be elsewhere."""
    with ThreadedEngine() as first, ThreadedEngine() as other, ThreadedEngine() as decode:
        sidecar = Sidecar(
            *("--model-server-port", str(decode.port), "--disagg", "on"),
            *("--prefill", first.address, "--prefill", other.address),
        )

        def endpoints_of(number: int) -> set[str]:
            messages = [{"role": "user", "content": f"Document {number}: {prompt(300)}"}]
            used = set()
            for _ in range(4):
                body = {"model": "sim", "messages": messages, "max_tokens": 8}
                answer = sidecar.ask("POST", CHAT, body)
                used.add(answer.decision)
                messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And?"}]
            return used

        try:
            conversations = [endpoints_of(number) for number in range(24)]
            assert all(len(used) == 1 for used in conversations)
            assert len(set().union(*conversations)) == 2
        finally:
            sidecar.stop()


# -- left alone ----------------------------------------------------------------------------------------------


def test_breaker(rig: Rig) -> None:
    """Three failures in a row open it; while it is open nobody waits; then one request at a time tries."""
    failing = rig.prefill.fault(Fault(status=500, delay_head_seconds=0.05), path=COMPLETIONS)

    def state() -> float:
        return rig.sidecar.metrics()("breaker_state", prefill=rig.prefill.address)

    for number in range(3):
        assert state() == 0
        assert rig.post(COMPLETIONS, completion()).decision == "recompute; reason=prefill_server_error", number
    assert state() == 2
    assert rig.post(COMPLETIONS, completion()).decision == "local; reason=no_usable_prefill"
    assert asked(rig.prefill) == 3
    assert f"prefill endpoint {rig.prefill.address}: breaker open" in rig.sidecar.log
    time.sleep(1.25)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: rig.post(COMPLETIONS, completion()), range(4)))
    assert all(answer.status == 200 for answer in answers)
    assert asked(rig.prefill) == 4, "one trial, and it failed"
    assert state() == 2
    rig.prefill.faults.rules.remove(failing)
    eventually(lambda: rig.post(COMPLETIONS, completion(40)).decision.startswith("remote"), 10)
    assert state() == 0
    assert asked(rig.prefill) == 5


def test_a_client_that_leaves_says_nothing_about_an_endpoint(rigged: Callable[..., Rig]) -> None:
    rig = rigged(prefill={"prefill_seconds_per_1k_tokens": 0.5})
    for number in range(5):
        with rig.open(COMPLETIONS, completion()):
            rig.prefill.wait_for(lambda engine: engine.running == 1)
        rig.prefill.wait_for(lambda engine, number=number: engine.aborted == number + 1)
    assert rig.post(COMPLETIONS, completion()).decision.startswith("remote")


def test_first_contact_of_many_at_once(rigged: Callable[..., Rig]) -> None:
    """A side channel that was not asked yet is unknown, not dead: nobody is sent away meanwhile."""
    rig = rigged(prefill={"prefill_seconds_per_1k_tokens": 0.2})
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda n: rig.post(COMPLETIONS, completion(20 + 20 * n)), range(20)))
    assert {answer.decision for answer in answers} == {f"remote; prefill={rig.prefill.address}"}


def test_prefill_that_is_away_for_a_while(rigged: Callable[..., Rig]) -> None:
    """Killed and back: every request in between is answered, and remote prefill resumes by itself."""
    rig = rigged(prefill={"num_blocks": 4096})
    assert rig.chat().decision.startswith("remote")
    rig.prefill.kill()
    for _ in range(5):
        answer = rig.chat()
        assert answer.status == 200
        assert not answer.decision.startswith("remote")
    rig.prefill.restart()
    eventually(lambda: rig.chat().decision.startswith("remote"), 10)


def test_prefill_killed_under_streams(rigged: Callable[..., Rig]) -> None:
    """Every client gets a whole answer by the policy, whatever stage its request was in."""
    rig = rigged(prefill={"prefill_seconds_per_1k_tokens": 2.0}, decode={"seconds_per_token": 0.01})
    assert rig.chat().decision.startswith("remote")
    bodies = [completion(100 + 30 * number, stream=True) for number in range(20)]
    with ThreadPoolExecutor(20) as pool:
        futures = [pool.submit(rig.post, COMPLETIONS, body) for body in bodies]
        rig.prefill.wait_for(lambda engine: engine.running <= 12 and asked(rig.prefill) == 21)
        rig.prefill.kill()
        answers = [future.result(10) for future in futures]
    assert {answer.status for answer in answers} == {200}
    kinds = {answer.decision.split(";")[0] for answer in answers}
    assert kinds <= {"remote", "recompute", "local"}
    assert "recompute" in kinds
    rig.decode.restart()
    for answer, body in zip(answers, bodies, strict=True):
        assert answer.text == rig.expected(COMPLETIONS, body)


# -- auto ----------------------------------------------------------------------------------------------------


def test_auto_keeps_short_prompts(rigged: Callable[..., Rig]) -> None:
    """--min-remote-tokens: with a target in the header too."""
    rig = rigged()
    rig.sidecar.admin("PUT", "/disagg", "auto")
    try:
        assert rig.post(COMPLETIONS, completion(200)).decision == "local; reason=short"
        long = rig.post(COMPLETIONS, completion(300))
        assert long.decision.startswith("remote")
        assert rig.decision_on(long)["decided_reason"] == "long"
        # Token ids are counted exactly.
        assert rig.post(COMPLETIONS, completion(prompt=[5] * 255)).decision == "local; reason=short"
        assert rig.post(COMPLETIONS, completion(prompt=[5] * 256)).decision.startswith("remote")
    finally:
        rig.sidecar.admin("PUT", "/disagg", "on")


def test_connector_none_never_splits() -> None:
    with ThreadedEngine() as prefill, ThreadedEngine(kv_connector=False) as decode:
        sidecar = Sidecar(
            *("--model-server-port", str(decode.port), "--disagg", "on", "--prefill", prefill.address),
            *("--kv-connector", "none"),
        )
        try:
            assert sidecar.ask("POST", COMPLETIONS, completion()).decision == "local; reason=disabled"
            assert not asked(prefill)
        finally:
            sidecar.stop()
