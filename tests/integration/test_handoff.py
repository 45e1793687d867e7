"""Handoffs that lie, or that a client made: the decode engine never sees them, the client gets the right text."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from tests.engine import Fault, ThreadedEngine
from tests.integration.apis import APIS, CHAT, COMPLETIONS, GENERATE
from tests.integration.sidecar import Rig, completion, eventually, quick
from tests.ports import free_ports

if TYPE_CHECKING:
    from tests.integration.client import Answer

Params = dict[str, Any]

REQUIRED = ("remote_request_id", "remote_block_ids", "remote_engine_id", "remote_host", "remote_port")
WRONG_TYPES: dict[str, Any] = {"null": None, "list": [1], "object": {}, "float": 1.5, "true": True}
IMPOSSIBLE: dict[str, Params] = {
    "negative block": {"remote_block_ids": [[-1] * 25]},
    "float block": {"remote_block_ids": [[1.0] * 25]},
    "string block": {"remote_block_ids": [["1"] * 25]},
    "block beyond 2^31": {"remote_block_ids": [[2**31] * 25]},
    "flat list": {"remote_block_ids": list(range(25))},
    "too few blocks": {"remote_block_ids": [[1]]},
    "too many blocks": {"remote_block_ids": [list(range(40))]},
    "a block twice": {"remote_block_ids": [[7] * 25]},
    "string": {"remote_block_ids": "1,2"},
    "tp_size 0": {"tp_size": 0},
    "tp_size -1": {"tp_size": -1},
    "tp_size 2e9": {"tp_size": 2_000_000_000},
    "tp_size string": {"tp_size": "1"},
    "pp_size 0": {"pp_size": 0},
    "dcp_size 0": {"dcp_size": 0},
    "port 0": {"remote_port": 0},
    "port 70000": {"remote_port": 70000},
    "port string": {"remote_port": "5600"},
    "empty host": {"remote_host": ""},
    "engine id number": {"remote_engine_id": 7},
    "engine id empty": {"remote_engine_id": ""},
    "request id with a comma": {"remote_request_id": "a,b"},
    "request id empty": {"remote_request_id": ""},
    "for a prefill engine": {"do_remote_decode": True},
    "not for a decode engine": {"do_remote_prefill": False},
    "pushed": {"transfer_mode": "push"},
    "cached tokens string": {"remote_prefill_cached_tokens": "all"},
    "expiry string": {"remote_blocks_expiry_time": "soon"},
}


def lies() -> dict[str, Callable[[Params], Any]]:
    """Case 1 and 2: what is done to a good handoff."""

    def without(key: str) -> Callable[[Params], Params]:
        return lambda params: {name: value for name, value in params.items() if name != key}

    def changed(change: Params) -> Callable[[Params], Params]:
        return lambda params: {**params, **change}

    found: dict[str, Callable[[Params], Any]] = {}
    for key in REQUIRED:
        found[f"no {key}"] = without(key)
        for name, value in WRONG_TYPES.items():
            found[f"{key} {name}"] = changed({key: value})
    for name, change in IMPOSSIBLE.items():
        found[name] = changed(change)
    found |= {
        "null": lambda _: None,
        "list": lambda _: [1],
        "string": lambda _: "yes",
        "empty": lambda _: {},
        "only the flag": lambda _: {"do_remote_prefill": True},
    }
    return found


def test_lying_handoffs(rigged: Callable[..., Rig]) -> None:
    """Cases 1 and 2: none reaches the decode engine, each is answered by the policy and counted by its reason."""
    rig = rigged(prefill={"num_blocks": 4096})
    wrong = []
    # A fresh engine for each, since the breaker soon has enough of one that lies, and an address that had none yet.
    first = free_ports(len(lies()))
    for port, (name, lie) in enumerate(lies().items(), first):
        with ThreadedEngine(port=port, num_blocks=4096) as prefill:
            prefill.fault(Fault(handoff=lie), path=COMPLETIONS)
            rig.target = prefill.address
            rig.decode.requests.clear()
            body = completion()
            answer = rig.post(COMPLETIONS, body)
            reason = answer.decision.removeprefix("recompute; reason=")
            allowed = {"handoff_invalid", "handoff_missing"} | ({"handoff_wrong_host"} if "host" in name else set())
            legs = rig.decoded()
            if (
                answer.status != 200
                or reason not in allowed
                or len(legs) != 1
                or b"kv_transfer_params" in legs[0].body
                or answer.text != rig.expected(COMPLETIONS, body)
            ):
                wrong.append((name, answer.status, answer.decision, len(legs)))
    assert not wrong
    assert rig.decode.alive
    assert not rig.decode.counter("nixl_num_failed_transfers_total")


BEYOND: dict[str, Params] = {
    "blocks": {"remote_block_ids": [list(range(9_000_000, 9_000_025))]},
    "tp_size": {"tp_size": 2},
    "pp_size": {"pp_size": 2},
}


@pytest.mark.parametrize("change", BEYOND.values(), ids=BEYOND)
@pytest.mark.parametrize("is_known", [True, False], ids=["known", "first"])
def test_handoff_beyond_what_the_engine_has(rig: Rig, change: Params, is_known: bool) -> None:
    """Case 2: possible in itself, but not for that engine. The client gets the right text, and the thread of an
    engine that is known lives: a handshake for a rank that it does not have would end it."""
    if is_known:
        assert rig.post(COMPLETIONS, completion()).decision.startswith("remote")
    rig.prefill.fault(Fault(handoff=lambda params: {**params, **change}), path=COMPLETIONS)
    body = completion()
    answer = rig.post(COMPLETIONS, body)
    assert answer.text == rig.expected(COMPLETIONS, body)
    assert rig.decode.alive
    assert rig.prefill.side_channel_alive or not is_known
    if "remote_block_ids" in change:
        assert answer.decision == "recompute; reason=handoff_invalid"


@pytest.mark.parametrize("host", ["localhost", "0.0.0.0", "::", "169.254.169.254", "127.0.0.2", "127.1"])
def test_handoff_to_another_host(rigged: Callable[..., Rig], host: str) -> None:
    """Case 9: refused, with a message that names what to set."""
    rig = rigged(*quick("fail"))
    rig.prefill.fault(Fault(handoff=lambda params: {**params, "remote_host": host}), path=COMPLETIONS)
    answer = rig.post(COMPLETIONS, completion())
    assert answer.status == 502
    assert answer.reason_code == "handoff_wrong_host"
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST" in answer.json["error"]["message"]
    assert not rig.decoded()


def test_numbers_and_unknown_fields_pass_as_they_are(rig: Rig) -> None:
    """Case 8: decode gets what prefill sent, to the digit."""
    odd = {
        "x_large": 9007199254740993,
        "x_float": 1.0,
        "x_text": 'caf\u00e9 \\ " /',
        "x_nested": {"b": [1, {}], "a": None},
    }
    rig.prefill.fault(Fault(handoff=lambda params: {**odd, **params}), path=COMPLETIONS)
    assert rig.post(COMPLETIONS, completion()).decision.startswith("remote")
    (asked,) = rig.decoded()
    spelled = json.dumps(odd, ensure_ascii=False, separators=(",", ":")).encode()[1:-1]
    assert spelled in asked.body
    assert b'"x_float":1.0,' in asked.body


@pytest.mark.parametrize("blocks", [[], [[]], [[], []]])
def test_empty_block_lists(rig: Rig, blocks: list[Any]) -> None:
    """Case 14: a prompt shorter than a block has nothing to pull, and nothing is wrong with it."""
    rig.prefill.fault(Fault(handoff=lambda params: {**params, "remote_block_ids": blocks}), path=COMPLETIONS)
    body = completion(3)
    answer = rig.post(COMPLETIONS, body)
    assert answer.status == 200
    assert not answer.decision.startswith("recompute")
    assert answer.text == rig.expected(COMPLETIONS, body)
    assert rig.decode.alive
    assert b"kv_transfer_params" not in rig.decoded()[0].body


def test_first_token_was_a_stop_token(rig: Rig) -> None:
    """Case 6: `stop` and no handoff: at once local. Nothing on the prefill leg lets it stop there in the first
    place."""

    def stopped(answer: Params) -> Params:
        answer["choices"][0]["finish_reason"] = "stop"
        return {**answer, "kv_transfer_params": None}

    rig.prefill.fault(Fault(edit=stopped), path=COMPLETIONS)
    body = completion(stop=["x"])
    answer = rig.post(COMPLETIONS, body)
    assert answer.decision == "recompute; reason=handoff_missing"
    assert answer.text == rig.expected(COMPLETIONS, body)
    asked = rig.prefilled()[0].json
    assert "stop" not in asked
    assert asked["ignore_eos"] is True


def test_prefill_engine_without_a_connector(rigged: Callable[..., Rig]) -> None:
    """Case 7: healthy, 200, no handoff, twenty times: the breaker opens, `effective` reads 0, one loud line; the
    sidecar stays ready."""
    rig = rigged(prefill={"kv_connector": False})
    said = rig.sidecar.log.count("bring no KV")
    with ThreadedEngine(kv_connector=False) as second:
        for number in range(20):
            rig.target = (rig.prefill if number % 2 else second).address
            answer = rig.post(COMPLETIONS, completion(40))
            assert answer.status == 200
            assert not answer.decision.startswith("remote")
        paid = len(rig.prefilled()) + sum(1 for one in second.requests if one.method == "POST")
        assert paid <= 8, "prefill is not paid for twenty times"
        metrics = rig.sidecar.metrics()
        assert metrics("effective") == 0
        assert metrics("breaker_state", prefill=second.address) == 2
        assert rig.sidecar.log.count("bring no KV") == said + 1
        assert rig.sidecar.admin("GET", "/readyz")[0] == 200
    with ThreadedEngine() as good:
        rig.target = good.address
        assert rig.post(COMPLETIONS, completion()).decision.startswith("remote")
        eventually(lambda: rig.sidecar.metrics()("effective") == 1)


def test_pair_that_cannot_load(rig: Rig) -> None:
    """Case 12: the pair is marked bad, requests stay local, and a trial restores it."""
    for _ in range(3):
        rig.decode.faults.once(Fault(error_event_first=True), path=COMPLETIONS)
        answer = rig.post(COMPLETIONS, completion(stream=True))
        assert answer.decision == "recompute; reason=pull_error_event"
        assert answer.events[-1] == b"[DONE]"
    assert rig.sidecar.metrics()("breaker_state", prefill=rig.prefill.address) == 2
    asked = len(rig.prefilled())
    assert rig.post(COMPLETIONS, completion()).decision == "local; reason=no_usable_prefill"
    assert len(rig.prefilled()) == asked
    eventually(lambda: rig.post(COMPLETIONS, completion(40)).decision.startswith("remote"))
    assert rig.sidecar.metrics()("breaker_state", prefill=rig.prefill.address) == 0


def test_prefill_engine_restarts_on_its_address(rigged: Callable[..., Rig]) -> None:
    """Case 10: nothing of the old engine is used for the new one; no transfer fails."""
    rig = rigged(prefill={"num_blocks": 4096})
    assert rig.post(COMPLETIONS, completion()).decision.startswith("remote")
    first = rig.prefill.engine_id
    rig.prefill.restart()
    assert rig.prefill.engine_id != first
    answers: list[Answer] = []

    def is_remote() -> bool:
        body = completion()
        answers.append(rig.post(COMPLETIONS, body))
        assert answers[-1].text == rig.expected(COMPLETIONS, body)
        return answers[-1].decision.startswith("remote")

    eventually(is_remote, 10)
    assert all(answer.status == 200 for answer in answers)
    handoffs = [one.json["kv_transfer_params"] for one in rig.decoded() if b"kv_transfer_params" in one.body]
    assert handoffs[0]["remote_engine_id"] == first
    assert {handoff["remote_engine_id"] for handoff in handoffs[1:]} == {rig.prefill.engine_id}
    assert not rig.decode.counter("nixl_num_failed_transfers_total")


# -- what a client may never set (case 3) --------------------------------------------------------------------

EVIL = {"do_remote_prefill": True, "remote_host": "169.254.169.254", "remote_port": 80, "remote_block_ids": [[1]]}
SPELLINGS: dict[str, bytes] = {
    "plain": b'"kv_transfer_params":%s',
    "escaped": b'"kv_transfer_par\\u0061ms":%s',
    "spaced": b'"kv_transfer_params" \n : \t %s',
    "twice": b'"kv_transfer_params":{},"kv_transfer_params":%s',
    "ec": b'"ec_transfer_params":%s',
    "vllm_xargs": b'"vllm_xargs":{"a":"1","kv_transfer_params":%s}',
    "vllm_xargs twice": b'"vllm_xargs":{"kv_transfer_params":%s},"vllm_xargs":{"kv_transfer_params":%s}',
    "extra_args": b'"sampling_params":{"max_tokens":1,"extra_args":{"kv_transfer_params":%s,"z":1}}',
    "extra_args ec": b'"sampling_params":{"extra_args":{"ec_transfer_params":%s},"max_tokens":1}',
}
PATHS = (*APIS, "/invocations", "/v1/unknown", "/tokenize")


def smuggled(path: str, spelling: bytes, at: str) -> bytes:
    """A request of that path with the handoff in it, as first or as last member."""
    make = APIS.get(path, completion)
    plain = make()
    if b"sampling_params" in spelling:
        plain.pop("sampling_params", None)
    text = json.dumps(plain).encode()
    member = spelling.replace(b"%s", json.dumps(EVIL).encode())
    return b"{%b,%b" % (member, text[1:]) if at == "first" else b"%b,%b}" % (text[:-1], member)


@pytest.mark.parametrize("mode", ["on", "off"])
@pytest.mark.parametrize("path", PATHS)
def test_handoffs_of_clients_reach_no_engine(rig: Rig, path: str, mode: str) -> None:
    """Case 3: however it is spelled, wherever it is, with and without a target, compressed or in chunks, with
    disaggregation on or off."""
    rig.sidecar.admin("PUT", "/disagg", mode)
    try:
        target = rig.target
        for name, spelling in SPELLINGS.items():
            for at in ("first", "last"):
                body = smuggled(path, spelling, at)
                for headers, sent, goal in (
                    ([], body, target),
                    ([], body, ""),
                    ([("Content-Encoding", "gzip")], gzip.compress(body), target),
                    ([("Content-Type", "text/plain")], body, target),
                ):
                    rig.target = goal
                    rig.decode.requests.clear()
                    rig.prefill.requests.clear()
                    status = rig.post(path, sent, headers).status
                    for one in (*rig.decoded(), *rig.prefilled()):  # engines inflate nothing
                        assert b"169.254" not in one.body, (name, at, headers)
                        assert b"ec_transfer_params" not in one.body
                    assert rig.decode.alive, (name, at)
                    assert status in (200, 400, 404, 415), (name, at, headers, status)
    finally:
        rig.target = target
        rig.sidecar.admin("PUT", "/disagg", "on")


def test_the_rest_of_a_cleaned_body_is_untouched(rig: Rig) -> None:
    """Case 3: what goes is the member and one comma."""
    body = completion(logit_bias={"z": 1.0, "a": 2})
    text = json.dumps(body, indent=2).encode()
    rig.target = ""
    evil = b'  "kv_transfer_params": {"do_remote_prefill": true},\n'
    assert rig.post(COMPLETIONS, text.replace(b"{\n", b"{\n" + evil, 1)).status in (200, 400)
    assert rig.decoded()[0].body == text


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE, "/invocations"])
@pytest.mark.parametrize(
    "body",
    [
        b'{"a": NaN}',
        b'{"a": "\\ud800"}',
        b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        '{"kv_transfer_params": {"do_remote_prefill": true}, "prompt": "x"}'.encode("utf-16"),
        b'\xef\xbb\xbf{"kv_transfer_params": {"do_remote_prefill": true}}',
        b'[{"kv_transfer_params": 1}]',
        b"{'kv_transfer_params': 1}",
        b'{"prompt": "x"} {"kv_transfer_params": {"do_remote_prefill": true}}',
        b"",
        b"null",
    ],
    ids=["NaN", "surrogate", "deep", "utf-16", "bom", "list", "quotes", "two", "empty", "null"],
)
def test_json_that_we_cannot_read_is_not_relayed_unread(rig: Rig, path: str, body: bytes) -> None:
    """The engine's parser is more lenient than ours: it would find in it what we could not."""
    answer = rig.post(path, body)
    assert answer.status == 400
    assert answer.reason_code == "reading_bad_json"
    assert not rig.decoded()
    assert not rig.prefilled()


@pytest.mark.parametrize("streamed", [False, True])
def test_kv_that_never_comes_from_a_peer_that_answers(rigged: Callable[..., Rig], streamed: bool) -> None:
    """Data ports that are closed, say: HTTP and side channel answer every probe, and the engine waits for ever."""
    rig = rigged(*quick(), decode={"pull_seconds_per_1k_tokens": 10.0})
    body = completion(stream=streamed)
    began = time.monotonic()
    answer = rig.post(COMPLETIONS, body)
    seconds = time.monotonic() - began
    assert answer.decision == "recompute; reason=pull_peer_silent"
    assert answer.text == rig.expected(COMPLETIONS, body)
    assert 1.5 <= seconds < 8, "three times --pull-timeout, on a machine that may be busy"
    assert "no KV has come for 1.5 s; are the NIXL data ports open?" in rig.sidecar.log
    eventually(lambda: rig.decoded()[0].client_gone)
