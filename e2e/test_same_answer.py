"""More than the text: answers, usage and errors are those of the client's own engine, whatever it asks for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from e2e.asking import (
    APIS,
    CHAT,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    RESPONSES,
    Api,
    Questions,
    ask,
    prompt,
    prompt_for,
    request_body,
    text_of,
    together,
    token_ids,
)
from e2e.essence import essence_of
from e2e.pair import SOONER_THAN_A_LEASE_S, Pair, free

if TYPE_CHECKING:
    from tests.integration.client import Answer
    from tests.integration.sidecar import Sidecar

TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"z": {}, "a": {}}}},
}


OPTIONS: dict[str, tuple[Api, dict[str, Any]]] = {
    "one token": (COMPLETIONS, {"max_tokens": 1}),
    "as many as there is room for": (CHAT, {"max_tokens": None, "max_completion_tokens": 20}),
    "a least number": (COMPLETIONS, {"min_tokens": 5, "stop": ["a", "e"]}),
    "a stop string": (COMPLETIONS, {"stop": ["a"]}),
    "a stop string, kept": (CHAT, {"stop": "e", "include_stop_str_in_output": True}),
    "every token stops": (COMPLETIONS, {"stop_token_ids": list(range(2000))}),
    "log probabilities": (COMPLETIONS, {"logprobs": 3}),
    "log probabilities of chat": (CHAT, {"logprobs": True, "top_logprobs": 2}),
    "penalties": (COMPLETIONS, {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5}),
    "a bias": (COMPLETIONS, {"logit_bias": {"1000": 100}, "max_tokens": 4}),
    "a seed": (COMPLETIONS, {"temperature": 0.8, "seed": 7}),
    "tools": (CHAT, {"tools": [TOOL], "tool_choice": "none"}),
    "token ids": (COMPLETIONS, {"return_token_ids": True}),
    "a system prompt": (MESSAGES, {"system": "Be brief."}),
    "instructions": (RESPONSES, {"instructions": "Be brief.", "store": False}),
    "no detokenisation": (GENERATE, {"sampling_params": {"max_tokens": 5, "temperature": 0, "logprobs": 2}}),
    "a template argument": (CHAT, {"add_generation_prompt": False, "chat_template_kwargs": {"x": 1}}),
    "text that is no ASCII": (CHAT, {"messages": [{"role": "user", "content": "naïve \u2028 \U0001f600 " * 50}]}),
    "an empty string in it": (CHAT, {"messages": [{"role": "user", "content": ""}]}),
}


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_mean_the_same(pair: Pair, sidecar: Sidecar, name: str, streamed: bool) -> None:
    api, options = OPTIONS[name]
    body = {**request_body(api, prompt_for(api, 200), stream=streamed), **options}
    if streamed and api in (COMPLETIONS, CHAT):
        body["stream_options"] = {"include_usage": True}
    salt = {} if api is MESSAGES else {"cache_salt": f"remote {name} {streamed}"}
    remote = ask(sidecar, api, {**body, **salt})
    assert remote.decision == f"remote; prefill={pair.prefill.address}"
    local = ask(
        pair.decode, api, {**body, **({} if api is MESSAGES else {"cache_salt": f"local {name} {streamed}"})}
    )
    assert remote.status == local.status == 200
    if api is MESSAGES:  # its second asking finds the prompt in the cache, and says so
        assert text_of(remote) == text_of(local)
    elif streamed:
        # How tokens are gathered into events is a matter of timing.
        assert text_of(remote) == text_of(local)
        assert essence_of(remote)[-1] == essence_of(local)[-1]
    else:
        assert essence_of(remote) == essence_of(local)


LOCAL = {
    "two samples": (COMPLETIONS, {"n": 2}),
    "two prompts": (COMPLETIONS, {"prompt": [[400, 401, 402], [500, 501]]}),
    "a list of one prompt": (COMPLETIONS, {"prompt": ["one, and only one"]}),
    "the prompt again": (COMPLETIONS, {"echo": True}),
    "the prompt's probabilities": (COMPLETIONS, {"prompt_logprobs": 1}),
}


@pytest.mark.parametrize("name", LOCAL)
def test_what_cannot_be_split_is_the_same_anyway(pair: Pair, sidecar: Sidecar, name: str) -> None:
    api, options = LOCAL[name]
    body = {**request_body(api, prompt_for(api, 100)), **options}
    through = ask(sidecar, api, {**body, "cache_salt": f"through {name}"})
    assert through.decision.startswith("local; reason=shape")
    assert essence_of(through) == essence_of(ask(pair.decode, api, {**body, "cache_salt": f"straight {name}"}))


def test_a_batch_of_chats_is_decodes_alone(pair: Pair, sidecar: Sidecar) -> None:
    """Several prompts share no handoff; each of them gets the text that it gets by itself."""
    batch = Api("batch", "/v1/chat/completions/batch", CHAT.body)
    turns = [[{"role": "user", "content": prompt(120)}] for _ in range(3)]
    body = request_body(batch, "", messages=turns)
    computed = pair.prefill.metrics().total("vllm:prompt_tokens_total")
    through = ask(sidecar, batch, body)
    assert through.status == 200
    assert pair.prefill.metrics().total("vllm:prompt_tokens_total") == computed
    straight = ask(pair.decode, batch, {**body, "cache_salt": "straight"})
    assert [choice["message"] for choice in through.json["choices"]] == [
        choice["message"] for choice in straight.json["choices"]
    ]
    alone = [
        text_of(ask(sidecar, CHAT, request_body(CHAT, "", messages=turn, cache_salt="alone"))) for turn in turns
    ]
    assert [choice["message"]["content"] for choice in through.json["choices"]] == alone


MISTAKES: dict[str, tuple[Api, dict[str, Any]]] = {
    "a model that is not there": (COMPLETIONS, {"model": "other"}),
    "a prompt that is too long": (COMPLETIONS, {"prompt": token_ids(9000)}),
    "an answer that is too long": (COMPLETIONS, {"max_tokens": 100_000}),
    "an answer of nothing": (CHAT, {"max_tokens": 0}),
    "a negative answer": (CHAT, {"max_tokens": -5}),
    "too many stop strings of nothing": (COMPLETIONS, {"stop": [""]}),
    "a temperature below zero": (CHAT, {"temperature": -1}),
    "a least number above the greatest": (COMPLETIONS, {"min_tokens": 50, "max_tokens": 5}),
    "no messages": (CHAT, {"messages": []}),
    "a role that is none": (CHAT, {"messages": [{"role": 7, "content": "x"}]}),
    "stream options without a stream": (CHAT, {"stream": False, "stream_options": {"include_usage": True}}),
    "a schema that is none": (CHAT, {"response_format": {"type": "json_schema"}}),
    "probabilities beyond the bound": (COMPLETIONS, {"logprobs": 100_000}),
    "token ids beyond the vocabulary": (COMPLETIONS, {"prompt": [5_000_000] * 40}),
    "no prompt": (COMPLETIONS, {"prompt": []}),
    "the wrong type": (RESPONSES, {"max_output_tokens": "many"}),
    "a bias beyond the vocabulary": (COMPLETIONS, {"logit_bias": {"900000": 1}}),
}


def test_mistakes_are_told_in_the_engines_own_words(pair: Pair, sidecar: Sidecar) -> None:
    for name, (api, mistake) in MISTAKES.items():
        body = {**request_body(api, prompt_for(api, 100)), **mistake}
        through, straight = ask(sidecar, api, body), ask(pair.decode, api, body)
        assert through.status == straight.status, name
        assert 400 <= through.status < 500, (name, through.body)
        assert essence_of(through) == essence_of(straight), name
    assert pair.decode.healthy()
    assert pair.prefill.healthy()
    # Some of these only the decode engine sees, when the prompt has been prefilled already.
    assert sidecar.metrics()("handoffs_total", outcome="released") >= 1
    free(pair.prefill, pair.decode, within_s=SOONER_THAN_A_LEASE_S)


def cached(answer: Answer) -> int:
    """What an answer's usage says of tokens that came from a cache."""
    whole = answer.json if answer.body.startswith(b"{") else None
    for event in (
        [whole] if whole else [json.loads(event) for event in reversed(answer.events) if event != b"[DONE]"]
    ):
        usage = event.get("usage") or (event.get("response") or {}).get("usage")
        if usage:
            details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
            return int(details["cached_tokens"] if details else usage["cache_read_input_tokens"])
    raise AssertionError(answer.body)


@pytest.mark.parametrize("told", [True, False], ids=["told by prefill", "not told by prefill"])
def test_pulled_tokens_are_not_called_cached(pair: Pair, told: bool) -> None:
    tap = pair.tap(pair.prefill)
    sidecar = pair.serve(prefill=tap.address)

    def silent(_passed: object, answer: Any) -> Any:
        answer["kv_transfer_params"].pop("remote_prefill_cached_tokens")
        return answer

    if not told:
        tap.answered = silent
    for api in APIS:
        if api is GENERATE:  # its usage has no details
            continue
        for streamed in (False, True):
            options: dict[str, Any] = {"stream_options": {"include_usage": True}} if streamed else {}
            if api not in (COMPLETIONS, CHAT):
                options = {}
            body = request_body(api, prompt_for(api, 200), stream=streamed, **options)
            first = ask(sidecar, api, body)
            assert first.decision.startswith("remote")
            assert cached(first) == 0, (api.name, streamed)
            again = cached(ask(sidecar, api, body))
            assert again > 100, (api.name, streamed)  # the prefill engine had them in its cache
            assert again % 32 == 0, (api.name, streamed)


def test_request_ids_of_every_kind(pair: Pair, sidecar: Sidecar) -> None:
    """The engines make the names of handoffs from them: one may come twice at a time, or break their heartbeats."""
    questions = Questions(pair.decode)
    for name in ("same", "a,b", "HB:x,y", "x" * 500, "_" * 128, "..", "%00", "a b"):

        def twice(name: str = name) -> None:
            question = questions.next()
            answer = ask(sidecar, question.api, question.body, x_request_id=name)
            assert text_of(answer) == question.text, name
            assert answer.decision.startswith("remote"), name
            assert "," not in (answer.header("x-request-id") or ",")

        together([twice] * 3)


def test_a_prompt_that_fills_the_engine(pair: Pair, sidecar: Sidecar) -> None:
    body = request_body(COMPLETIONS, token_ids(8192 - 12), 12)
    answer = ask(sidecar, COMPLETIONS, body)
    assert answer.decision.startswith("remote")
    assert text_of(answer) == text_of(ask(pair.decode, COMPLETIONS, {**body, "cache_salt": prompt(30)}))


@pytest.mark.parametrize("switch", ["on", "off"])
def test_the_prompt_is_tokenised_once(pair: Pair, switch: str) -> None:
    """Decode gets the ids that prefill made of the prompt, so both mean the same; the answer says nothing."""
    tap = pair.tap(pair.prefill)
    door = pair.tap(pair.decode)
    sidecar = pair.serve("--tokenize-once", switch, prefill=tap.address, decode_port=door.port)
    body = request_body(CHAT, prompt_for(CHAT, 300))
    answer = ask(sidecar, CHAT, body)
    assert answer.decision.startswith("remote")
    (prefill,), (decode,) = tap.seen, [one for one in door.seen if one.path == CHAT.path]
    ids = decode.json["kv_transfer_params"].get("prompt_token_ids")
    assert (ids is not None) is (switch == "on")
    assert prefill.json.get("return_token_ids", False) is (switch == "on")
    assert {key: value for key, value in decode.json.items() if key != "kv_transfer_params"} == body
    assert "prompt_token_ids" not in answer.json or answer.json["prompt_token_ids"] is None
    assert text_of(answer) == text_of(ask(pair.decode, CHAT, {**body, "cache_salt": f"straight {switch}"}))
    if ids is not None:
        told = pair.decode.request("POST", "/tokenize", {"model": "tiny", "messages": body["messages"]}).json()
        assert ids == told["tokens"]
        # The engine believes the ids, not the text: another prompt's text changes nothing.
        other = {**body, "messages": [{"role": "user", "content": "another"}], "cache_salt": "ids"}
        by_ids = ask(pair.decode, CHAT, {**other, "kv_transfer_params": {"prompt_token_ids": ids}})
        assert text_of(by_ids) == text_of(answer)
