"""/v1/messages: the Anthropic API on top of chat (vllm/entrypoints/anthropic)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from tests.engine import tokens
from tests.engine.apis import chat, serving
from tests.engine.apis.schema import (
    ApiError,
    GenerationFailed,
    boolean,
    check,
    either,
    field_problem,
    integer,
    json_answer,
    list_of,
    mapping,
    message,
    nullable,
    number,
    parse_json,
    string,
    xargs,
)
from tests.engine.http_messages import EVENT_STREAM, Answer, Received, json_bytes

if TYPE_CHECKING:
    from tests.engine.core import Core
    from tests.engine.engine import Engine

FIELDS = {
    "model": string(),
    "messages": list_of(message(roles=("user", "assistant", "system"))),
    "max_tokens": integer(),
    "metadata": nullable(mapping),
    "stop_sequences": nullable(list_of(string(), maximum=64)),
    "stream": nullable(boolean),
    "system": nullable(either(string(), list_of(mapping))),
    "temperature": nullable(number),
    "top_k": nullable(integer()),
    "top_p": nullable(number),
    "tools": nullable(list_of(mapping)),
    "tool_choice": nullable(mapping),
    "thinking": nullable(mapping),
    "cache_salt": nullable(string(1, 1024)),
    "kv_transfer_params": nullable(mapping),
    "ec_transfer_params": nullable(mapping),
    "vllm_xargs": nullable(xargs),
    "chat_template_kwargs": nullable(mapping),
}


async def create(engine: Engine, received: Received) -> Answer:
    body = check(parse_json(received), FIELDS, ("model", "messages", "max_tokens"))
    _validate(body)
    try:
        return await _serve(engine, received, body)
    except ApiError as error:
        shape = {"type": "error", "error": {"type": error.kind, "message": str(error)}}
        return json_answer(shape, error.status)


def _validate(body: dict[str, Any]) -> None:
    if not body["model"]:
        raise field_problem("model", "Model is required", body["model"])
    if body["max_tokens"] <= 0:
        raise field_problem("max_tokens", "max_tokens must be positive", body["max_tokens"])
    thinking = body.get("thinking") or {}
    prefill = (body.get("kv_transfer_params") or {}).get("do_remote_decode")
    if thinking.get("type") == "enabled" and not prefill:
        budget = thinking.get("budget_tokens")
        if not isinstance(budget, int) or budget < 1024 or budget >= body["max_tokens"]:
            raise field_problem("thinking", "thinking.budget_tokens must be less than max_tokens", budget)


def to_chat(body: dict[str, Any]) -> dict[str, Any]:
    messages = list(body["messages"])
    if body.get("system"):
        messages.insert(0, {"role": "system", "content": body["system"]})
    taken = ("model", "max_tokens", "temperature", "top_p", "top_k", "cache_salt", "kv_transfer_params")
    converted = {key: body[key] for key in (*taken, "vllm_xargs", "chat_template_kwargs") if key in body}
    converted["messages"] = messages
    if body.get("stop_sequences"):
        converted["stop"] = body["stop_sequences"]
    if body.get("tools"):
        converted["tools"] = [
            {
                "type": "function",
                "function": {"name": tool.get("name"), "parameters": tool.get("input_schema")},
            }
            for tool in body["tools"]
        ]
        converted["tool_choice"] = "auto"
    return converted


async def _serve(engine: Engine, received: Received, body: dict[str, Any]) -> Answer:
    converted = to_chat(body)
    core, rank = engine.choose_core(received)
    async with serving.release_on_rejection(core, body.get("kv_transfer_params")):
        serving.check_model(engine, body["model"])
        serving.preflight(engine, core)
        chat.check_tool_support(engine, converted)
        request = chat.Request(engine, converted, received)
        if body.get("stream"):
            return Answer(content_type=EVENT_STREAM, events=_events(request, core, rank))
        return json_answer(await _whole(request, core, rank))


def _reason(finish: str | None, stop: int | str | None) -> tuple[str | None, str | None]:
    if finish == "length":
        return "max_tokens", None
    if isinstance(stop, str):
        return "stop_sequence", stop
    return "end_turn", None


def _usage(request: chat.Request, completed: int, counts: tuple[int, int] | None) -> dict[str, Any]:
    """`total_input == input_tokens + cache_read + cache_creation`."""
    prompt = len(request.prompt)
    if counts is None or not request.engine.enable_prompt_tokens_details:
        return {"input_tokens": prompt, "output_tokens": completed}
    cached, created = counts
    return {
        "input_tokens": prompt - cached - created,
        "output_tokens": completed,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": cached,
    }


async def _whole(request: chat.Request, core: Core, rank: int | None) -> dict[str, Any]:
    (result,) = await serving.complete(request.engine, core, request.jobs, rank)
    reason, sequence = _reason(result.finish_reason, result.stop_reason)
    counts = (result.run.cached_tokens, result.run.created_tokens)
    answer: dict[str, Any] = serving.without_nones(
        {
            "id": request.id,
            "type": "message",
            "role": "assistant",
            "content": [{"type": "text", "text": result.text}] if result.text else [],
            "model": request.model,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": _usage(request, len(result.token_ids), counts),
        }
    )
    if result.run.kv_transfer_params is not None:
        answer["kv_transfer_params"] = result.run.kv_transfer_params
    return answer


def _event(kind: str, **data: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + json_bytes({"type": kind, **data}) + b"\n\n"


def _opening(request: chat.Request) -> bytes:
    return _event(
        "message_start",
        message={
            "id": request.id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": request.model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(request, 0, None),
        },
    )


async def _events(request: chat.Request, core: Core, rank: int | None) -> AsyncGenerator[bytes, None]:
    completed = 0
    is_open = False
    counts = (0, 0)
    finish: str | None = None
    stop: int | str | None = None
    stream = serving.steps(request.engine, core, request.jobs, rank)
    try:
        async for _, run, step in stream:
            if not completed:
                counts = (run.cached_tokens, run.created_tokens)
                yield _opening(request)
            completed += len(step.token_ids)
            finish, stop = step.finish_reason, step.stop_reason
            if step.text:
                if not is_open:
                    is_open = True
                    yield _event("content_block_start", content_block={"type": "text", "text": ""}, index=0)
                yield _event("content_block_delta", delta={"type": "text_delta", "text": step.text}, index=0)
        if is_open:
            yield _event("content_block_stop", index=0)
        reason, sequence = _reason(finish, stop)
        yield _event(
            "message_delta",
            delta={"stop_reason": reason, "stop_sequence": sequence},
            usage=_usage(request, completed, counts),
        )
    except ApiError as error:
        if not completed and isinstance(error, GenerationFailed):
            yield _opening(request)
        # The converter takes the chat stream's error event for a chunk, and says what it misses in it.
        message = f"5 validation errors for ChatCompletionStreamResponse ({error.kind})"
        yield _event("error", error={"type": "internal_error", "message": message})
        return
    finally:
        await stream.aclose()
    yield _event("message_stop")


async def count_tokens(engine: Engine, received: Received) -> Answer:
    body = check(parse_json(received), FIELDS, ("model", "messages"))
    try:
        serving.check_model(engine, body["model"])
    except ApiError as error:
        shape = {"type": "error", "error": {"type": error.kind, "message": str(error)}}
        return json_answer(shape, error.status)
    count = len(tokens.encode(chat.render(to_chat(body))))
    return json_answer({"input_tokens": count, "context_management": {"original_input_tokens": count}})
