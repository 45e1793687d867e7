"""/v1/responses (vllm/entrypoints/openai/responses)."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from tests.engine.apis import chat, serving
from tests.engine.apis.schema import (
    COMMON,
    ApiError,
    boolean,
    check,
    check_cache_salt,
    check_sampling,
    either,
    integer,
    json_answer,
    list_of,
    mapping,
    nullable,
    one_of,
    parse_json,
    refused,
    string,
)
from tests.engine.http_messages import EVENT_STREAM, Answer, Received, json_bytes

if TYPE_CHECKING:
    from tests.engine.core import Core
    from tests.engine.engine import Engine
    from tests.engine.run import Run

_SHARED = [
    "model",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "user",
    "priority",
    "request_id",
    "session_id",
    "cache_salt",
    "kv_transfer_params",
    "ec_transfer_params",
    "vllm_xargs",
    "structured_outputs",
    "logit_bias",
]
FIELDS = {
    **{name: COMMON[name] for name in _SHARED},
    "background": nullable(boolean),
    "input": either(string(), list_of(mapping)),
    "instructions": nullable(string()),
    "max_output_tokens": nullable(integer()),
    "metadata": nullable(mapping),
    "parallel_tool_calls": nullable(boolean),
    "previous_response_id": nullable(string()),
    "reasoning": nullable(mapping),
    "store": nullable(boolean),
    "text": nullable(mapping),
    "tool_choice": either(string(), mapping),
    "tools": list_of(mapping),
    "truncation": nullable(one_of("auto", "disabled")),
    "chat_template_kwargs": nullable(mapping),
}


def validate(body: dict[str, Any]) -> None:
    """The model's "before" validators (responses/protocol.py), on the raw body."""
    tools, choice = body.get("tools"), body.get("tool_choice", "auto")
    if not tools:
        if choice in ("auto", "none"):
            body["tool_choice"] = "none"
        elif choice == "required":
            raise refused("Tool choice 'required' must be specified with 'tools' parameter.", "tool_choice")
    if body.get("prompt") is not None:
        raise refused("prompt template is not supported", "prompt")
    if body.get("background") and not body.get("store", True):
        raise refused("background can only be used when `store` is true", "background")
    check_cache_salt(body)


async def create(engine: Engine, received: Received) -> Answer:
    raw = parse_json(received)
    validate(raw)
    body = check(raw, FIELDS, ("input",))
    core = engine.cores[0]  # the rank header is not read here
    async with serving.release_on_rejection(core, body.get("kv_transfer_params")):
        serving.check_model(engine, body.get("model"))
        if body.get("store", True) and body.get("background"):
            raise ApiError(
                400,
                "This vLLM engine does not support `store=True` and therefore does not support the background "
                "mode. To enable these features, set the environment variable "
                "`VLLM_ENABLE_RESPONSES_API_STORE=1` when launching the vLLM server.",
                "invalid_request_error",
                "background",
            )
        serving.preflight(engine, core)
        if body.get("previous_response_id") is not None:
            raise _not_found(body["previous_response_id"])
        request = _Request(engine, body)
        if body.get("stream"):
            return Answer(content_type=EVENT_STREAM, events=request.events(core))
        return json_answer(await request.whole(core))


def _not_found(response_id: str) -> ApiError:
    return ApiError(404, f"Response with id '{response_id}' not found.", "invalid_request_error", "response_id")


async def retrieve(_engine: Engine, received: Received) -> Answer:
    # Nothing is stored unless VLLM_ENABLE_RESPONSES_API_STORE is set.
    raise _not_found(received.path.removeprefix("/v1/responses/").removesuffix("/cancel"))


def _as_chat(body: dict[str, Any]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    if isinstance(body["input"], str):
        messages.append({"role": "user", "content": body["input"]})
    else:
        messages += [
            item if "role" in item else {"role": item.get("type", "user"), "content": item}
            for item in body["input"]
        ]
    converted: dict[str, Any] = {"messages": messages}
    if body.get("tools"):
        converted["tools"] = body["tools"]
    for key in ("chat_template_kwargs", "kv_transfer_params"):
        if body.get(key):
            converted[key] = body[key]
    return converted


class _Request:
    def __init__(self, engine: Engine, body: dict[str, Any]) -> None:
        self.engine = engine
        self.body = body
        # The header X-Request-Id is not read here, only the field.
        self.id = body.get("request_id") or f"resp_{serving.random_id()}"
        self.message_id = f"msg_{serving.random_id()}"
        self.created = int(time.time())
        self.model = engine.lora_of(body.get("model")) or engine.served_models[0]
        converted = _as_chat(body)
        self.prompt = chat.prompt_of(converted)
        asked = body.get("max_output_tokens")
        self.limit = serving.output_limit(engine, self.prompt, asked, "max_output_tokens")
        check_sampling(body, self.limit)
        merged = {**body, "kv_transfer_params": converted.get("kv_transfer_params")}
        lora = engine.lora_of(body.get("model"))
        self.job = serving.job(merged, f"{self.id}_0", self.prompt, self.limit, lora=lora)

    async def whole(self, core: Core) -> dict[str, Any]:
        (result,) = await serving.complete(self.engine, core, [self.job], None)
        usage = self._usage(result.run, len(result.token_ids))
        return self._response(result.finish_reason, result.text, usage, result.run.kv_transfer_params)

    def _usage(self, run: Run, completed: int) -> dict[str, Any]:
        return {
            "input_tokens": len(self.prompt),
            "input_tokens_details": {
                "cached_tokens": run.cached_tokens,
                "cache_write_tokens": run.created_tokens,
                "input_tokens_per_turn": [],
                "cached_tokens_per_turn": [],
            },
            "output_tokens": completed,
            "output_tokens_details": {
                "reasoning_tokens": 0,
                "tool_output_tokens": 0,
                "output_tokens_per_turn": [],
                "tool_output_tokens_per_turn": [],
            },
            "total_tokens": len(self.prompt) + completed,
        }

    def _part(self, text: str) -> dict[str, Any]:
        return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}

    def _item(self, status: str, text: str | None) -> dict[str, Any]:
        return {
            "id": self.message_id,
            "content": [self._part(text)] if text else [],
            "role": "assistant",
            "status": status,
            "type": "message",
            "phase": None,
        }

    def _response(
        self,
        finish: str | None,
        text: str | None,
        usage: dict[str, Any] | None,
        params: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        body = self.body
        status = "completed" if finish is not None else "in_progress"
        if finish == "length":
            status = "incomplete"
        tokens = body.get("parallel_tool_calls")
        return {
            "id": self.id,
            "created_at": self.created,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata"),
            "model": self.model,
            "object": "response",
            "output": [self._item("completed", text)] if text is not None else [],
            "parallel_tool_calls": True if tokens is None else tokens,
            "temperature": 1.0 if body.get("temperature") is None else body["temperature"],
            "tool_choice": body.get("tool_choice", "auto"),
            "tools": body.get("tools", []),
            "top_p": 1.0 if body.get("top_p") is None else body["top_p"],
            "background": bool(body.get("background")),
            "max_output_tokens": self.limit,
            "max_tool_calls": body.get("max_tool_calls"),
            "previous_response_id": None,
            "prompt": None,
            "reasoning": body.get("reasoning"),
            "service_tier": body.get("service_tier", "auto"),
            "status": status,
            "text": body.get("text"),
            "top_logprobs": None,
            "truncation": body.get("truncation") or "disabled",
            "usage": usage,
            "user": body.get("user"),
            "presence_penalty": body.get("presence_penalty") or 0.0,
            "frequency_penalty": body.get("frequency_penalty") or 0.0,
            "kv_transfer_params": params,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }

    async def events(self, core: Core) -> AsyncGenerator[bytes, None]:
        number = 0

        def event(kind: str, **data: Any) -> bytes:
            nonlocal number
            # pydantic writes the fields in the order of the SDK's models, which is the alphabet.
            packed = json_bytes(dict(sorted({**data, "sequence_number": number, "type": kind}.items())))
            number += 1
            return b"event: " + kind.encode() + b"\ndata: " + packed + b"\n\n"

        started = self._response(None, None, None)
        yield event("response.created", response=started)
        yield event("response.in_progress", response=started)
        place = {"item_id": self.message_id, "output_index": 0, "content_index": 0}
        text = ""
        completed = 0
        is_open = False
        finish: str | None = None
        usage: dict[str, Any] = {}
        params: dict[str, Any] | None = None
        stream = serving.steps(self.engine, core, [self.job], None)
        try:
            async for _, run, step in stream:
                if not is_open:
                    is_open = True
                    item = self._item("in_progress", None)
                    yield event("response.output_item.added", output_index=0, item=item)
                    yield event("response.content_part.added", **place, part={**self._part(""), "logprobs": []})
                text += step.text
                completed += len(step.token_ids)
                finish = step.finish_reason
                usage = self._usage(run, completed)
                params = run.kv_transfer_params
                yield event("response.output_text.delta", **place, delta=step.text, logprobs=[])
        finally:
            # An error inside the stream is not caught here: the connection breaks off, without an event.
            await stream.aclose()
        yield event("response.output_text.done", **place, text=text, logprobs=[])
        yield event("response.content_part.done", **place, part=self._part(text))
        yield event("response.output_item.done", output_index=0, item=self._item("completed", text))
        yield event("response.completed", response=self._response(finish, text, usage, params))
