"""The official client libraries of the APIs, as users have them, through the sidecar to real engines.

What a library makes of a remote prefill (streamed tool calls, structured output, whole answers) must equal what it
makes of the same call to the decode engine alone, to the last count of its usage.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anthropic
import openai
import pytest

from e2e.asking import eventually, prompt
from e2e.essence import essence
from e2e.pair import LEASE_S, SOONER_THAN_A_LEASE_S, Pair, free, idle, paired
from e2e.rig import Rig
from tests.libraries import ANTHROPIC, LIBRARIES, OPENAI, Library

if TYPE_CHECKING:
    from pydantic import BaseModel

    from e2e.engines import Engine
    from tests.integration.sidecar import Sidecar

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Oslo", "Rome", "Lima"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "metric": {"type": "boolean"},
    },
    "required": ["city", "days", "metric"],
    "additionalProperties": False,
}
"""What the tools take: small enough that random weights, held to it, come to an end."""
TOKENS = 160
ENGINE_FLAGS = [
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--structured-outputs-config", '{"backend":"xgrammar","disable_any_whitespace":true}'),
]


@pytest.fixture(scope="module")
def tools_rig() -> Iterator[Rig]:
    # Its developer mode has a way to empty the prefix cache: the same call can be asked twice and be new twice.
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_RESPONSES_API_STORE": "1"}
    with Rig("tiny", lease_seconds=LEASE_S, extra_flags=ENGINE_FLAGS, extra_env=env) as rig:
        yield rig


@pytest.fixture
def pair(tools_rig: Rig) -> Iterator[Pair]:
    with paired(tools_rig.prefill[0], tools_rig.decode[0]) as pair:
        yield pair


@pytest.fixture
def sidecar(pair: Pair) -> Iterator[Sidecar]:
    sidecar = pair.serve()
    yield sidecar
    idle(sidecar)


# -- one call of each kind -------------------------------------------------------------------------------------


def _weather(**more: Any) -> dict[str, Any]:
    return {"name": "weather", "description": "The weather of a city", "strict": True, **more}


CHAT_TOOL = {"type": "function", "function": _weather(parameters=SCHEMA)}
RESPONSES_TOOL = {"type": "function", **_weather(parameters=SCHEMA)}
MESSAGES_TOOL = _weather(input_schema=SCHEMA)


def chat(where: Sidecar | Engine, said: str, *, streamed: bool, **more: Any) -> BaseModel:
    body: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": said}],
        "max_tokens": TOKENS,
        "temperature": 0,
        **more,
    }
    with OPENAI.client(where.port) as client:
        if not streamed:
            return client.chat.completions.create(**body)
        with client.chat.completions.stream(**body, stream_options={"include_usage": True}) as stream:
            seen = {event.type for event in stream}
            assert "chunk" in seen
            return stream.current_completion_snapshot


def responses(where: Sidecar | Engine, said: str, *, streamed: bool, **more: Any) -> BaseModel:
    body: dict[str, Any] = {
        "model": "tiny",
        "input": said,
        "max_output_tokens": TOKENS,
        "temperature": 0,
        **more,
    }
    with OPENAI.client(where.port) as client:
        if not streamed:
            return client.responses.create(**body)
        with client.responses.stream(**body) as stream:
            seen = [event.type for event in stream]
            assert seen[0] == "response.created"
            assert seen[-1] == "response.completed"
            return stream.get_final_response()


def messages(where: Sidecar | Engine, said: str, *, streamed: bool, **more: Any) -> BaseModel:
    body: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": said}],
        "max_tokens": TOKENS,
        **more,
    }
    # The library knows no temperature any more, the engine does.
    body["extra_body"] = {"temperature": body.pop("temperature", 0)}
    with ANTHROPIC.client(where.port) as client:
        if not streamed:
            return client.messages.create(**body)
        with client.messages.stream(**body) as stream:
            seen = [event.type for event in stream]
            assert seen[0] == "message_start"
            assert seen[-1] == "message_stop"
            return stream.get_final_message()


@dataclass(frozen=True)
class Kind:
    ask: Callable[..., BaseModel]
    options: dict[str, Any]
    arguments: Callable[[Any], Any] | None = None
    """Finds in an answer what the model was held to; None: it was free."""


def _chat_call(answer: Any) -> Any:
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    return json.loads(call.function.arguments)


def _responses_call(answer: Any) -> Any:
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert call.name == "weather"
    return json.loads(call.arguments)


def _messages_call(answer: Any) -> Any:
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert answer.stop_reason == "tool_use"
    assert call.name == "weather"
    return call.input


JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "weather", "strict": True, "schema": SCHEMA}}
RESPONSES_SCHEMA = {"format": {"type": "json_schema", "name": "weather", "strict": True, "schema": SCHEMA}}
KINDS = {
    "chat": Kind(chat, {"max_tokens": 24}),
    "chat, a named tool": Kind(
        chat,
        {"tools": [CHAT_TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
        _chat_call,
    ),
    "chat, any tool": Kind(chat, {"tools": [CHAT_TOOL], "tool_choice": "required"}, _chat_call),
    "chat, a schema": Kind(
        chat, {"response_format": JSON_SCHEMA}, lambda answer: json.loads(answer.choices[0].message.content)
    ),
    "responses": Kind(responses, {"max_output_tokens": 24}),
    "responses, a named tool": Kind(
        responses,
        {"tools": [RESPONSES_TOOL], "tool_choice": {"type": "function", "name": "weather"}},
        _responses_call,
    ),
    "responses, any tool": Kind(responses, {"tools": [RESPONSES_TOOL], "tool_choice": "required"}, _responses_call),
    "responses, a schema": Kind(
        responses, {"text": RESPONSES_SCHEMA}, lambda answer: json.loads(answer.output_text)
    ),
    "messages": Kind(messages, {"max_tokens": 24, "system": "Be brief."}),
    "messages, a named tool": Kind(
        messages, {"tools": [MESSAGES_TOOL], "tool_choice": {"type": "tool", "name": "weather"}}, _messages_call
    ),
    "messages, any tool": Kind(
        messages, {"tools": [MESSAGES_TOOL], "tool_choice": {"type": "any"}}, _messages_call
    ),
}


def object_of(answer: BaseModel) -> Any:
    """All of an answer but the names that are made up for each call and where its prompt was computed."""
    return _told(essence(answer.model_dump()))


def _told(value: Any) -> Any:
    if isinstance(value, list):
        return [_told(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    told = {key: _told(inner) for key, inner in value.items() if key != "call_id"}
    if "cache_creation_input_tokens" in told:
        # /v1/messages takes off the prompt's length what its engine computed and put into its cache.
        told["input_tokens"] += told.pop("cache_creation_input_tokens") or 0
    return told


def forget(engine: Engine) -> None:
    """The engine's prefix cache is empty again."""
    assert engine.request("POST", "/reset_prefix_cache").status == 200


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", KINDS)
def test_the_same_object_as_without_a_sidecar(pair: Pair, sidecar: Sidecar, name: str, streamed: bool) -> None:
    kind, text = KINDS[name], prompt(300)
    local = kind.ask(pair.decode, text, streamed=streamed, **kind.options)
    eventually(lambda: pair.decode.metrics().total("vllm:num_requests_running") == 0)
    forget(pair.decode)
    before = pair.decode.prompt_tokens_by_source()
    remote = kind.ask(sidecar, text, streamed=streamed, **kind.options)
    assert [one["decision"] for one in sidecar.decisions()] == ["remote"]
    after = pair.decode.prompt_tokens_by_source()
    assert after["external_kv_transfer"] - before["external_kv_transfer"] > 200, "no KV was pulled"
    assert after["local_compute"] == before["local_compute"]
    assert object_of(remote) == object_of(local)
    if kind.arguments is not None:
        arguments = kind.arguments(remote)
        assert arguments == kind.arguments(local)
        assert set(arguments) == set(SCHEMA["required"])
        assert arguments["city"] in ("Oslo", "Rome", "Lima")


# -- the second turn -------------------------------------------------------------------------------------------


def test_a_tools_answer_goes_back(pair: Pair, sidecar: Sidecar) -> None:
    """The turn after a tool call, as an agent sends it: call and result are part of the prompt."""
    text = prompt(300)
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}}
    turns = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    blocks = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}]},
    ]
    for ask, options in (
        (chat, {"messages": turns, "tools": [CHAT_TOOL], "tool_choice": "required"}),
        (messages, {"messages": blocks, "tools": [MESSAGES_TOOL], "tool_choice": {"type": "any"}}),
    ):
        local = ask(pair.decode, text, streamed=True, **options)
        eventually(lambda: pair.decode.metrics().total("vllm:num_requests_running") == 0)
        forget(pair.decode)
        before = pair.pulled_tokens()
        remote = ask(sidecar, text, streamed=True, **options)
        assert pair.pulled_tokens() - before > 200
        assert object_of(remote) == object_of(local)


def test_a_stored_response_is_decodes_alone(pair: Pair, sidecar: Sidecar) -> None:
    """What a turn refers to exists on one engine: its prompt is prefilled remotely, the next turn's is not."""
    with OPENAI.client(sidecar.port) as client, OPENAI.client(pair.prefill.port) as prefill:
        common: dict[str, Any] = {"model": "tiny", "max_output_tokens": 16, "temperature": 0}
        first = client.responses.create(input=prompt(300), store=True, **common)
        assert sidecar.decisions()[0]["decision"] == "remote"
        assert client.responses.retrieve(first.id).output_text == first.output_text
        with pytest.raises(openai.NotFoundError):
            prefill.responses.retrieve(first.id)
        second = client.responses.create(input="And then?", previous_response_id=first.id, **common)
        latest = sidecar.decisions()[0]
        assert (latest["decision"], latest["reason"], latest["detail"]) == (
            "local",
            "shape",
            "previous_response_id",
        )
        assert second.usage is not None
        assert first.usage is not None
        assert second.usage.input_tokens > first.usage.input_tokens
        with OPENAI.client(pair.decode.port) as straight:
            again = straight.responses.create(input="And then?", previous_response_id=first.id, **common)
        assert second.output_text == again.output_text
        with pytest.raises(openai.NotFoundError):
            client.responses.create(input="And then?", previous_response_id="resp_unknown", **common)


# -- mistakes and farewells ------------------------------------------------------------------------------------


def _raised(call: Callable[[], Any]) -> Any:
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as raised:
        call()
    return raised.value


MISTAKES: dict[str, tuple[dict[str, Any], type[Exception], type[Exception]]] = {
    "a model that is not there": ({"model": "other"}, openai.NotFoundError, anthropic.NotFoundError),
    "a temperature below zero": ({"temperature": -1.0}, openai.BadRequestError, anthropic.BadRequestError),
    "a prompt that is too long": (
        {"messages": [{"role": "user", "content": "work " * 9000}]},
        openai.BadRequestError,
        anthropic.BadRequestError,
    ),
}


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_raise_what_the_engine_alone_makes_them_raise(
    pair: Pair, sidecar: Sidecar, name: str, streamed: bool
) -> None:
    options, *kinds = MISTAKES[name]
    for ask, kind in zip((chat, messages), kinds, strict=True):
        local = _raised(lambda ask=ask: ask(pair.decode, prompt(300), streamed=streamed, **options))
        remote = _raised(lambda ask=ask: ask(sidecar, prompt(300), streamed=streamed, **options))
        assert type(remote) is type(local) is kind
        assert remote.message == local.message
        assert remote.body == local.body
        assert remote.request_id or remote.response.headers["x-request-id"]
    free(pair.prefill, pair.decode, within_s=SOONER_THAN_A_LEASE_S)


def test_a_decode_engine_that_is_not_there(pair: Pair, sidecar: Sidecar) -> None:
    pair.decode.kill()
    for ask, kind in ((chat, openai.InternalServerError), (messages, anthropic.InternalServerError)):
        error = _raised(lambda ask=ask: ask(sidecar, prompt(300), streamed=True))
        assert isinstance(error, kind)
        assert error.status_code == 503
        assert str(pair.decode.port) in error.message
        assert int(error.response.headers["retry-after"]) >= 1


LONG = 4000
"""Tokens that nobody waits for."""


@pytest.mark.parametrize("library", LIBRARIES, ids=str)
def test_a_stream_that_is_closed_ends_the_work(pair: Pair, sidecar: Sidecar, library: Library) -> None:
    free(pair.prefill, within_s=LEASE_S + 15)  # a decode engine that was not there has left blocks to the lease
    before = pair.decode.metrics().total("vllm:generation_tokens_total")
    more = {"extra_body": {"ignore_eos": True}} if library is OPENAI else {}
    with (
        library.client(sidecar.port) as client,
        library.ask(client, prompt(300), model="tiny", max_tokens=LONG, stream=True, **more) as stream,
    ):
        for _ in range(4):
            next(stream)
        assert pair.decode.metrics().total("vllm:num_requests_running") == 1
    free(pair.prefill, pair.decode, within_s=SOONER_THAN_A_LEASE_S)
    assert [one["decision"] for one in sidecar.decisions()] == ["remote"]
    made = pair.decode.metrics().total("vllm:generation_tokens_total") - before
    assert 0 < made < LONG / 2, "the engine went on for nobody"
