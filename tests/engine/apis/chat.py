"""/v1/chat/completions (vllm/entrypoints/openai/chat_completion)."""

from __future__ import annotations

import time
from array import array
from collections.abc import AsyncGenerator, Iterator
from typing import TYPE_CHECKING, Any

from tests.engine import tokens
from tests.engine.apis import logprobs, serving
from tests.engine.apis.schema import (
    COMMON,
    ApiError,
    GenerationFailed,
    boolean,
    check,
    check_prompt_logprobs,
    check_sampling,
    check_whole,
    either,
    integer,
    json_answer,
    list_of,
    mapping,
    message,
    nullable,
    one_of,
    parse_json,
    refused,
)
from tests.engine.http_messages import EVENT_STREAM, Answer, Received, json_bytes

if TYPE_CHECKING:
    from tests.engine.core import Core
    from tests.engine.engine import Engine

FIELDS = {
    **COMMON,
    "messages": list_of(message(branch="ChatCompletionDeveloperMessageParam")),
    "logprobs": nullable(boolean),
    "top_logprobs": nullable(integer()),
    "max_completion_tokens": nullable(integer()),
    "n": nullable(integer()),
    "tools": nullable(list_of(mapping)),
    "tool_choice": nullable(either(one_of("none", "auto", "required"), mapping)),
    "parallel_tool_calls": nullable(boolean),
    "reasoning_effort": nullable(one_of("none", "minimal", "low", "medium", "high", "xhigh", "max")),
    "include_reasoning": boolean,
    "echo": boolean,
    "add_generation_prompt": boolean,
    "continue_final_message": boolean,
    "chat_template_kwargs": nullable(mapping),
    "return_prompt_text": nullable(boolean),
}


def validate(body: dict[str, Any]) -> None:
    """The model's "before" validators (chat_completion/protocol.py), on the raw body."""
    check_whole(body)
    check_prompt_logprobs(body, "top_logprobs")
    top = body.get("top_logprobs")
    if top is not None:
        if top < 0 and top != -1:
            raise refused("`top_logprobs` must be a positive value or -1.", "top_logprobs")
        if top and not body.get("logprobs"):
            raise refused("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
    _validate_tools(body)
    if body.get("continue_final_message") and body.get("add_generation_prompt"):
        raise refused("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")


def _validate_tools(body: dict[str, Any]) -> None:
    tools = body.get("tools")
    if tools == []:
        raise refused("`tools` must not be an empty array.", "tools")
    if "tool_choice" not in body and tools:
        body["tool_choice"] = "auto"
    choice = body.get("tool_choice")
    if choice in (None, "none"):
        return
    if tools is None:
        raise refused("When using `tool_choice`, `tools` must be set.", "tool_choice")
    if isinstance(choice, dict):
        function = choice.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise refused("Expected field `name` in `function` in `tool_choice`!", "tool_choice.function")
        if all(tool.get("function", {}).get("name") != function["name"] for tool in tools):
            raise refused(
                "The tool specified in `tool_choice` does not match any of the specified `tools`",
                "tool_choice",
            )


def render(body: dict[str, Any]) -> str:
    """A chat template: everything that shapes a real prompt shapes this one, and key order counts."""
    parts = []
    if body.get("tools") and body.get("tool_choice") != "none":
        parts.append("<|im_start|>tools\n" + json_bytes(body["tools"]).decode() + "<|im_end|>\n")
    if body.get("chat_template_kwargs"):
        parts.append("<|template|>" + json_bytes(body["chat_template_kwargs"]).decode())
    for each in body["messages"]:
        calls = each.get("tool_calls")
        text = flatten(each.get("content")) + (json_bytes(calls).decode() if calls else "")
        parts.append(f"<|im_start|>{each.get('role', 'user')}\n{text}<|im_end|>\n")
    if body.get("continue_final_message"):
        return "".join(parts).removesuffix("<|im_end|>\n")
    if body.get("add_generation_prompt", True):
        parts.append("<|im_start|>assistant\n")
    return "".join(parts)


def flatten(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(
            part["text"]
            if isinstance(part, dict) and isinstance(part.get("text"), str)
            else json_bytes(part).decode()
            for part in content
        )
    return json_bytes(content).decode()


def prompt_of(body: dict[str, Any]) -> array[int]:
    """The prompt's tokens: those that the prefill leg forwarded in the handoff, or rendered here.

    renderers/online_renderer.py:_reused_prompt_token_ids; ignored with media and with `echo`.
    """
    params = body.get("kv_transfer_params")
    if isinstance(params, dict) and params.get("prompt_token_ids") is not None:
        ids = params["prompt_token_ids"]
        body["kv_transfer_params"] = {key: each for key, each in params.items() if key != "prompt_token_ids"}
        media = any(
            isinstance(part, dict) and part.get("type", "text") not in ("text", "input_text", "output_text")
            for message in body.get("messages", ())
            if isinstance(message.get("content"), list)
            for part in message["content"]
        )
        if not media and not body.get("echo"):
            if not isinstance(ids, list) or not ids or any(type(i) is not int or i < 0 for i in ids):
                raise refused(
                    "`kv_transfer_params['prompt_token_ids']` must be a non-empty list of non-negative integers.",
                    "kv_transfer_params.prompt_token_ids",
                )
            if max(ids) >= tokens.VOCAB_SIZE:
                raise refused(f"Token id {max(ids)} is out of vocabulary", "kv_transfer_params.prompt_token_ids")
            return array("I", ids)
    if not body["messages"]:
        raise ApiError(400, "Cannot apply chat template to an empty conversation. Provide at least one message.")
    return tokens.encode(render(body))


async def create(engine: Engine, received: Received) -> Answer:
    return await serve(engine, received, parse_json(received))


async def serve(engine: Engine, received: Received, raw: dict[str, Any]) -> Answer:
    validate(raw)
    body = check(raw, FIELDS, ("messages",))
    core, rank = engine.choose_core(received)
    async with serving.release_on_rejection(core, body.get("kv_transfer_params")):
        serving.check_model(engine, body.get("model"))
        serving.preflight(engine, core, body.get("n") or 1)
        check_tool_support(engine, body)
        request = Request(engine, body, received)
        if body.get("stream"):
            return Answer(content_type=EVENT_STREAM, events=request.events(core, rank))
        return json_answer(await request.whole(core, rank))


def check_tool_support(engine: Engine, body: dict[str, Any]) -> None:
    if body.get("tool_choice") == "auto" and not engine.tool_parser:
        raise ApiError(
            400, '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
        )


class Request:
    """A chat request on its way: also what /v1/messages makes of its own."""

    def __init__(self, engine: Engine, body: dict[str, Any], received: Received) -> None:
        self.engine = engine
        self.body = body
        self.id = f"chatcmpl-{serving.base_request_id(received, body)}"
        self.created = int(time.time())
        self.model = engine.lora_of(body.get("model")) or engine.served_models[0]
        self.samples = body.get("n") or 1
        self.prompt = prompt_of(body)
        self.return_ids = bool(body.get("return_token_ids"))
        capped_by = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
        limit = serving.output_limit(engine, self.prompt, body.get(capped_by), capped_by)
        check_sampling(body, limit)
        self.jobs = serving.samples_of(
            serving.job(
                body,
                self.id,
                self.prompt,
                limit,
                lora=engine.lora_of(body.get("model")),
                prompt_logprobs=body.get("prompt_logprobs") is not None,
            ),
            self.samples,
        )

    async def whole(self, core: Core, rank: int | None) -> dict[str, Any]:
        results = await serving.complete(self.engine, core, self.jobs, rank)
        choices = [
            {
                "index": index,
                "message": {
                    "role": "assistant",
                    "content": result.text,
                    "refusal": None,
                    "annotations": None,
                    "audio": None,
                    "function_call": None,
                    "reasoning": None,
                },
                "logprobs": logprobs.chat(self.body, result.token_ids),
                "finish_reason": result.finish_reason,
                "stop_reason": result.stop_reason,
                "token_ids": result.token_ids if self.return_ids else None,
                "routed_experts": None,
            }
            for index, result in enumerate(results)
        ]
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": self.engine.fingerprint,
            "usage": serving.usage(
                self.engine,
                len(self.prompt),
                sum(len(result.token_ids) for result in results),
                results[0].run.cached_tokens,
                results[0].run.created_tokens,
            ),
            "prompt_logprobs": logprobs.prompt(self.body, self.prompt),
            "prompt_token_ids": list(self.prompt) if self.return_ids else None,
            "prompt_text": render(self.body) if self.body.get("return_prompt_text") else None,
            "kv_transfer_params": results[0].run.kv_transfer_params,
            "ec_transfer_params": None,
            "metrics": None,
        }

    async def events(self, core: Core, rank: int | None) -> AsyncGenerator[bytes, None]:
        options = self.body.get("stream_options") or {}
        include_usage = bool(options.get("include_usage"))
        continuous = include_usage and bool(options.get("continuous_usage_stats"))
        counts = [0] * self.samples
        cached: int | None = None
        created = 0
        head = {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
        }

        def packed(choice: dict[str, Any], completed: int, **more: Any) -> bytes:
            chunk = {**head, "choices": [choice]}
            if continuous:
                chunk["usage"] = {
                    "prompt_tokens": len(self.prompt),
                    "total_tokens": len(self.prompt) + completed,
                    "completion_tokens": completed,
                    "completion_tokens_details": None,
                }
            return b"data: " + json_bytes({**chunk, **more}) + b"\n\n"

        def openings() -> Iterator[bytes]:
            for each in range(self.samples):
                yield packed(
                    {
                        "index": each,
                        "delta": {"role": "assistant", "content": ""},
                        "logprobs": None,
                        "finish_reason": None,
                    },
                    0,
                    prompt_token_ids=list(self.prompt) if self.return_ids else None,
                    prompt_text=render(self.body) if self.body.get("return_prompt_text") else None,
                )

        stream = serving.steps(self.engine, core, self.jobs, rank)
        try:
            async for index, run, step in stream:
                if cached is None:
                    cached, created = run.cached_tokens, run.created_tokens
                    for first in openings():
                        yield first
                counts[index] += len(step.token_ids)
                choice: dict[str, Any] = {
                    "index": index,
                    "delta": {"content": step.text},
                    "logprobs": logprobs.chat(self.body, step.token_ids),
                    "finish_reason": step.finish_reason,
                }
                if step.finish_reason is not None:
                    choice["stop_reason"] = step.stop_reason
                choice["token_ids"] = step.token_ids if self.return_ids else None
                more: dict[str, Any] = {}
                if step.finish_reason is not None and not include_usage:
                    more["system_fingerprint"] = self.engine.fingerprint
                yield packed(choice, counts[index], **more)
            if include_usage:
                last = {
                    **head,
                    "choices": [],
                    "usage": serving.usage(self.engine, len(self.prompt), sum(counts), cached, created),
                    "system_fingerprint": self.engine.fingerprint,
                }
                yield b"data: " + json_bytes(serving.without_nones(last)) + b"\n\n"
        except ApiError as error:
            if cached is None and isinstance(error, GenerationFailed):
                for first in openings():
                    yield first
            yield error.event()
        finally:
            await stream.aclose()
        yield serving.DONE
