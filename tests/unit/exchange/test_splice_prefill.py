"""The prefill body: what each API caps, drops and keeps, held against the contract of each."""

import json
from typing import Any

import pytest
from hypothesis import given

from sidecar.exchange.apis import APIS, Api
from sidecar.exchange.splice import decode_body, fields
from tests.unit.exchange.bodies import PARAMS, STORIES, Writer, bounded, pairs, prefilled

MODEL = ("model", "temperature", "top_p", "seed", "cache_salt", "logit_bias", "lora", "priority", "user")

CONTRACT: dict[str, tuple[dict[str, Any], set[str], tuple[str, ...]]] = {
    "completions": (
        {"stream": False, "max_tokens": 1, "ignore_eos": True},
        {"n", "stop", "stop_token_ids", "min_tokens", "stream_options"},
        ("prompt", "suffix", "add_special_tokens", "mm_processor_kwargs", *MODEL),
    ),
    "chat": (
        {"stream": False, "max_tokens": 1, "max_completion_tokens": 1, "ignore_eos": True},
        {"n", "stop", "stop_token_ids", "min_tokens", "stream_options"},
        ("messages", "tools", "tool_choice", "chat_template", "chat_template_kwargs", "documents", *MODEL),
    ),
    "responses": (
        {"stream": False, "max_output_tokens": 1, "store": False},
        {"stop", "stop_token_ids", "stream_options"},
        ("input", "instructions", "tools", "tool_choice", "reasoning", "text", "metadata", *MODEL),
    ),
    "messages": (
        {"stream": False, "max_tokens": 1},
        {"stop_sequences"},
        ("messages", "system", "tools", "tool_choice", "thinking", "metadata", *MODEL),
    ),
    "generate": (
        {"stream": False},
        {"stream_options"},
        ("token_ids", "features", *MODEL),
    ),
}
"""By API, and not taken from `apis.py`: what the prefill body must hold, what it must not, what must not change."""

INNER_CONTRACT = ({"max_tokens": 1, "ignore_eos": True}, {"n", "stop", "stop_token_ids", "min_tokens"})
"""The same for the `sampling_params` of generate."""

LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "n", "best_of")


def body_for(api: Api, story: bytes) -> bytes:
    """A body of this API with any of its limits, repeated, absent, null, in any order."""
    writer = Writer(story)
    caps, dropped, prompt = CONTRACT[api.name]
    keys = (*caps, *dropped, *prompt, *LIMITS, "response_format", "logprobs")
    drawn = writer.members(lambda: writer.pick(keys), 9)
    if api.sampling:
        inner_keys = (*INNER_CONTRACT[0], *INNER_CONTRACT[1], "temperature", "seed", "logprobs", "extra_args")
        for _ in range(writer.choose(3)):
            inner = writer.object(writer.members(lambda: writer.pick(inner_keys), 6))
            drawn.insert(writer.choose(len(drawn) + 1), writer.member("sampling_params", inner))
    return writer.object(drawn).encode()


@pytest.mark.parametrize("api", APIS.values(), ids=lambda api: api.name)
@bounded
@given(story=STORIES)
def test_prefill_body(api: Api, story: bytes) -> None:
    """Cases 15 to 19: every limit of every API, present, absent or null; all that shapes the prompt as it was."""
    body = body_for(api, story)
    caps, dropped, _ = CONTRACT[api.name]
    before, out = fields(body), prefilled(api, fields(body), PARAMS)
    after = fields(out)
    meaning = pairs(out)
    assert len(meaning) == len(dict(meaning)), "a key stands twice"
    assert bytes(after["kv_transfer_params"]) == PARAMS
    for key, value in caps.items():
        assert json.loads(bytes(after[key])) == value
        assert type(json.loads(bytes(after[key]))) is type(value)
    assert not dropped & set(after)
    for key, raw in before.items():
        if key not in caps and key not in dropped and key != api.sampling:
            assert bytes(after[key]) == bytes(raw), f"{key} has changed"
    assert [key for key in after if key in before] == [key for key in before if key in after], "another order"
    if api.sampling:
        _check_sampling(before.get(api.sampling), after[api.sampling])


def _check_sampling(before: Any, after: Any) -> None:
    caps, dropped = INNER_CONTRACT
    old = fields(before) if before is not None else {}
    new = fields(after)
    assert {key: json.loads(bytes(new[key])) for key in caps} == caps
    assert not dropped & set(new)
    for key, raw in old.items():
        if key not in caps and key not in dropped:
            assert bytes(new[key]) == bytes(raw)


@pytest.mark.parametrize("api", APIS.values(), ids=lambda api: api.name)
def test_contract_is_whole(api: Api) -> None:
    """Caps that this file does not know of would go untested."""
    caps, dropped, _ = CONTRACT[api.name]
    if api.sampling:
        assert (set(api.caps), api.drop) == (set(INNER_CONTRACT[0]), INNER_CONTRACT[1])
        assert (set(api.outer_caps), api.outer_drop) == (set(caps), dropped)
    else:
        assert set(api.caps) - {"ignore_eos"} == set(caps) - {"ignore_eos"}
        assert api.drop == dropped


@pytest.mark.parametrize("limit", ["100", "null", "0", "1", "-1", '"5"', "1e3", None])
@pytest.mark.parametrize("api", APIS.values(), ids=lambda api: api.name)
def test_limits_at_both_legs(api: Api, limit: str | None) -> None:
    """Case 17: absent stays absent, null stays null and 0 stays 0 at decode; prefill makes one token."""
    names = [name for name in api.caps if name.startswith("max_")]
    inner = ",".join(f'"{name}":{limit}' for name in names) if limit is not None else '"seed":1'
    body = (f'{{"{api.sampling}":{{{inner}}},"a":1}}' if api.sampling else f'{{{inner},"a":1}}').encode()
    prefill = json.loads(prefilled(api, fields(body), PARAMS))
    prefill = prefill[api.sampling] if api.sampling else prefill
    assert [prefill[name] for name in names] == [1] * len(names)
    head, rest = decode_body(body, PARAMS)
    assert (head + bytes(rest)).endswith(body[1:])


def test_order_of_tool_schemas_is_kept() -> None:
    """Case 18."""
    tools = b'[ {"type":"function", "function":{"name":"z","parameters":{"b":1,"a":{"d":1.0,"c":2}}}} ]'
    body = b'{"tools":' + tools + b',"messages":[],"max_tokens":7}'
    assert tools in prefilled(APIS[b"/v1/chat/completions"], fields(body), PARAMS)
