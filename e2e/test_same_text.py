"""Remote prefill changes nothing that a client can see: the greedy text is the local one, byte for byte, whatever
the API, the length of the prompt and the way it is answered; and the prompt's KV really came from the other engine,
by way of a handshake that the decode engine was only ever told to make with this machine.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Any

import pytest

from e2e.asking import (
    APIS,
    CHAT,
    COMPLETIONS,
    Api,
    ask,
    local_answer,
    local_text,
    prompt,
    prompt_for,
    prompt_tokens,
    request_body,
    text_of,
    token_ids,
)
from e2e.pair import BLOCK_TOKENS, Pair

if TYPE_CHECKING:
    from tests.integration.sidecar import Sidecar


RELAY_NETWORK = ipaddress.ip_network("127.77.0.0/16")


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("length", [8, 300, 4000], ids=["under a block", "medium", "long"])
def test_the_text_is_the_same_on_every_api(pair: Pair, sidecar: Sidecar, length: int, streamed: bool) -> None:
    for api in APIS:
        body = request_body(api, prompt_for(api, length), stream=streamed)
        check_remote(pair, sidecar.port, api, body)


def test_prompts_of_token_ids_and_every_length_around_a_block(pair: Pair, sidecar: Sidecar) -> None:
    for blocks in (1, 2, 9):
        for over in (-1, 0, 1):
            body = request_body(COMPLETIONS, token_ids(blocks * BLOCK_TOKENS + over))
            check_remote(pair, sidecar.port, COMPLETIONS, body)


def check_remote(pair: Pair, port: int, api: Api, body: dict[str, Any]) -> None:
    """Asks and compares; every token of the prompt must have been pulled, and none computed twice."""
    before = pair.decode.prompt_tokens_by_source()
    answer = ask(port, api, body)
    after = pair.decode.prompt_tokens_by_source()
    assert answer.decision == f"remote; prefill={pair.prefill.address}", api
    local = local_answer(pair.decode, api, body)
    assert after["external_kv_transfer"] - before["external_kv_transfer"] == prompt_tokens(local), api
    assert after["local_compute"] == before["local_compute"], api
    assert text_of(answer) == text_of(local), api


def test_a_conversation_pulls_only_what_the_decode_engine_does_not_hold(pair: Pair, sidecar: Sidecar) -> None:
    messages = [{"role": "user", "content": prompt(500)}]
    held = 0
    for _ in range(3):
        body = request_body(CHAT, "", messages=list(messages))
        before = pair.pulled_tokens()
        answer = ask(sidecar, CHAT, body)
        assert answer.decision.startswith("remote")
        moved = pair.pulled_tokens() - before
        local, text = local_answer(pair.decode, CHAT, body), text_of(answer)
        assert text == text_of(local)
        assert 0 < moved <= prompt_tokens(local) - held
        held = prompt_tokens(local) // BLOCK_TOKENS * BLOCK_TOKENS
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": prompt(60)}]


def test_the_decode_engine_is_told_of_no_address_but_the_relay(pair: Pair) -> None:
    decode = pair.tap(pair.decode)
    sidecar = pair.serve(decode_port=decode.port)
    for api in APIS:
        ask(sidecar, api, request_body(api, prompt_for(api, 100)))
    assert len(decode.seen) == len(APIS)
    for passed in decode.seen:
        handoff = passed.json["kv_transfer_params"]
        assert ipaddress.ip_address(handoff["remote_host"]) in RELAY_NETWORK
        assert handoff["remote_port"] != pair.prefill.side_channel_port


def test_a_cold_decode_engine_shakes_hands_with_the_relay_and_nobody_else(pair: Pair) -> None:
    pair.prefill.restart()  # a new engine id: nobody has shaken hands with it
    sidecar = pair.serve()
    body = request_body(COMPLETIONS, prompt(300), stream=True)
    assert text_of(ask(sidecar, COMPLETIONS, body)) == local_text(pair.decode, COMPLETIONS, body)
    assert sidecar.metrics()("nixl_handshakes_total") == 1
    assert sidecar.metrics()("nixl_handshakes_total", outcome="live") == 1
    ask(sidecar, COMPLETIONS, request_body(COMPLETIONS, prompt(300)))
    assert sidecar.metrics()("nixl_handshakes_total") == 1


def test_disagg_off_on_and_off_again_while_it_runs(pair: Pair) -> None:
    sidecar = pair.serve(disagg="off")
    for mode, moves in (("off", False), ("on", True), ("auto", True), ("off", False)):
        sidecar.admin("PUT", "/disagg", mode)
        body = request_body(COMPLETIONS, prompt(600))
        before = pair.pulled_tokens()
        answer = ask(sidecar, COMPLETIONS, body)
        assert (pair.pulled_tokens() > before) is moves
        assert answer.decision.startswith("remote" if moves else "local; reason=disabled")
        assert text_of(answer) == local_text(pair.decode, COMPLETIONS, body)
