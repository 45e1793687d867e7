"""/v1/completions (vllm/entrypoints/openai/completion)."""

from __future__ import annotations

import time
from array import array
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from tests.engine import tokens
from tests.engine.apis import logprobs, serving
from tests.engine.apis.schema import (
    COMMON,
    ApiError,
    anything,
    boolean,
    check,
    check_prompt_logprobs,
    check_sampling,
    check_whole,
    either,
    integer,
    json_answer,
    list_of,
    nullable,
    parse_json,
    refused,
    string,
)
from tests.engine.http_messages import EVENT_STREAM, Answer, Received, json_bytes

if TYPE_CHECKING:
    from tests.engine.core import Core
    from tests.engine.engine import Engine
    from tests.engine.run import Job

_IDS = list_of(integer(0))
FIELDS = {
    **COMMON,
    "prompt": nullable(either(_IDS, list_of(_IDS), string(), list_of(string()))),
    "echo": nullable(boolean),
    "logprobs": nullable(integer()),
    "n": integer(),
    "suffix": nullable(string()),
    "prompt_embeds": anything,
}


def validate(body: dict[str, Any]) -> None:
    """The model's "before" validators (completion/protocol.py), on the raw body."""
    if body.get("prompt") in (None, "") and not body.get("prompt_embeds"):
        raise refused("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    check_prompt_logprobs(body, "logprobs")
    wanted = body.get("logprobs")
    if wanted is not None and wanted < 0 and wanted != -1:
        raise refused("`logprobs` must be a positive value or -1.", "logprobs", wanted)
    check_whole(body)


async def create(engine: Engine, received: Received) -> Answer:
    return await serve(engine, received, parse_json(received))


async def serve(engine: Engine, received: Received, raw: dict[str, Any]) -> Answer:
    validate(raw)
    body = check(raw, FIELDS)
    core, rank = engine.choose_core(received)
    async with serving.release_on_rejection(core, body.get("kv_transfer_params")):
        if body.get("stream") and body.get("use_beam_search"):
            raise ApiError(400, "Streaming is not currently supported with beam search")
        serving.check_model(engine, body.get("model"))
        serving.preflight(engine, core, body.get("n", 1))
        request = _Request(engine, body, received)
        if body.get("stream"):
            return Answer(content_type=EVENT_STREAM, events=request.events(core, rank))
        return json_answer(await request.whole(core, rank))


class _Request:
    def __init__(self, engine: Engine, body: dict[str, Any], received: Received) -> None:
        self.engine = engine
        self.body = body
        self.id = f"cmpl-{serving.base_request_id(received, body)}"
        self.created = int(time.time())
        self.model = engine.lora_of(body.get("model")) or engine.served_models[0]
        self.samples = body.get("n", 1)
        self.prompts = _prompts(body)
        self.echo = bool(body.get("echo"))
        self.return_ids = bool(body.get("return_token_ids"))
        asked = body.get("max_tokens")
        self.max_tokens = 16 if asked is None else asked
        self.jobs = [
            each
            for index, prompt in enumerate(self.prompts)
            for each in serving.samples_of(self._job(index, prompt), self.samples)
        ]

    def _job(self, index: int, prompt: array[int]) -> Job:
        engine, body = self.engine, self.body
        limit = serving.output_limit(engine, prompt, self.max_tokens, "max_tokens")
        if self.echo and self.max_tokens == 0:
            limit = 1
        check_sampling(body, limit)
        wanted = body.get("prompt_logprobs")
        return serving.job(
            body,
            f"{self.id}-{index}",
            prompt,
            limit,
            lora=engine.lora_of(body.get("model")),
            prompt_logprobs=wanted is not None or (self.echo and body.get("logprobs") is not None),
        )

    async def whole(self, core: Core, rank: int | None) -> dict[str, Any]:
        results = await serving.complete(self.engine, core, self.jobs, rank)
        choices = []
        for index, result in enumerate(results):
            prompt = self.prompts[index // self.samples]
            text = result.text
            ids = result.token_ids
            if self.echo:
                shown = tokens.decode(prompt)
                text, ids = (shown, []) if self.max_tokens == 0 else (shown + text, ids)
            choices.append(
                {
                    "index": index,
                    "text": text,
                    "logprobs": logprobs.completion(self.body, list(prompt) if self.echo else [], ids),
                    "finish_reason": result.finish_reason,
                    "stop_reason": result.stop_reason,
                    "token_ids": result.token_ids if self.return_ids else None,
                    "prompt_logprobs": logprobs.prompt(self.body, prompt),
                    "prompt_token_ids": list(prompt) if self.return_ids else None,
                    "routed_experts": None,
                }
            )
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": self.engine.fingerprint,
            "usage": serving.usage(
                self.engine,
                sum(len(prompt) for prompt in self.prompts),
                sum(len(result.token_ids) for result in results),
                results[-1].run.cached_tokens,
            ),
            # Of several prompts or samples only the first one's handoff comes back; the others stay pinned.
            "kv_transfer_params": results[0].run.kv_transfer_params,
            "ec_transfer_params": None,
            "metrics": None,
        }

    async def events(self, core: Core, rank: int | None) -> AsyncGenerator[bytes, None]:
        options = self.body.get("stream_options") or {}
        include_usage = bool(options.get("include_usage"))
        continuous = include_usage and bool(options.get("continuous_usage_stats"))
        counts = [0] * len(self.jobs)
        cached: int | None = None
        head = {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
        }
        stream = serving.steps(self.engine, core, self.jobs, rank)
        try:
            async for index, run, step in stream:
                first = not counts[index]
                if cached is None:
                    cached = run.cached_tokens
                counts[index] += len(step.token_ids)
                prompt = self.prompts[index // self.samples]
                text = step.text
                if self.echo and first:
                    text = tokens.decode(prompt) + ("" if self.max_tokens == 0 else text)
                chunk: dict[str, Any] = {
                    **head,
                    "choices": [
                        {
                            "index": index,
                            "text": text,
                            "logprobs": logprobs.completion(self.body, [], step.token_ids),
                            "finish_reason": step.finish_reason,
                            "stop_reason": step.stop_reason,
                            "prompt_token_ids": (
                                list(prompt) if first and (self.return_ids or self.echo) else None
                            ),
                            "token_ids": step.token_ids if self.return_ids else None,
                        }
                    ],
                }
                if continuous:
                    chunk["usage"] = {
                        "prompt_tokens": len(prompt),
                        "total_tokens": len(prompt) + counts[index],
                        "completion_tokens": counts[index],
                    }
                if step.finish_reason is not None and not include_usage:
                    chunk["system_fingerprint"] = self.engine.fingerprint
                yield b"data: " + json_bytes(chunk) + b"\n\n"
            if include_usage:
                total = serving.usage(self.engine, sum(len(prompt) for prompt in self.prompts), sum(counts), cached)
                last = {**head, "choices": [], "usage": total, "system_fingerprint": self.engine.fingerprint}
                yield b"data: " + json_bytes(serving.without_nones(last)) + b"\n\n"
        except ApiError as error:
            yield error.event()
        finally:
            await stream.aclose()
        yield serving.DONE


def _prompts(body: dict[str, Any]) -> list[array[int]]:
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return [tokens.encode(prompt)]
    if not prompt:
        raise ApiError(400, "You must pass at least one prompt")
    if isinstance(prompt[0], int):
        return [_ids(prompt)]
    return [tokens.encode(each) if isinstance(each, str) else _ids(each) for each in prompt]


def _ids(ids: list[int]) -> array[int]:
    # Ids beyond 32 bits can't be in the array; they are out of vocabulary in any case.
    return array("I", [min(token, 2**32 - 1) for token in ids])
