"""/inference/v1/generate: tokens in, tokens out (vllm/entrypoints/scale_out/token_in_token_out)."""

from __future__ import annotations

import time
from array import array
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from tests.engine import tokens
from tests.engine.apis import chat, serving
from tests.engine.apis.schema import (
    INT64_MAX,
    INT64_MIN,
    ApiError,
    boolean,
    check,
    check_cache_salt,
    check_sampling,
    field_problem,
    integer,
    json_answer,
    list_of,
    mapping,
    nullable,
    number,
    one_of,
    parse_json,
    string,
)
from tests.engine.http_messages import EVENT_STREAM, Answer, Received, json_bytes

if TYPE_CHECKING:
    from tests.engine.core import Core
    from tests.engine.engine import Engine

FIELDS = {
    "token_ids": list_of(integer(), 1),
    "sampling_params": mapping,
    "model": nullable(string()),
    "stream": nullable(boolean),
    "stream_options": nullable(mapping),
    "request_id": string(),
    "return_token_ids": nullable(boolean),
    "output_mode": one_of("tokens", "text"),
    "cache_salt": nullable(string(1, 1024)),
    "priority": integer(INT64_MIN, INT64_MAX),
    "kv_transfer_params": nullable(mapping),
    "ec_transfer_params": nullable(mapping),
}
_SAMPLING_FIELDS = {
    "max_tokens": nullable(integer()),
    "min_tokens": integer(),
    "n": integer(),
    "temperature": number,
    "top_p": number,
    "top_k": integer(),
    "stop_token_ids": nullable(list_of(integer())),
    "ignore_eos": boolean,
    "logprobs": nullable(integer()),
    "prompt_logprobs": nullable(integer()),
    "extra_args": nullable(mapping),
}


async def create(engine: Engine, received: Received) -> Answer:
    raw = parse_json(received)
    check_cache_salt(raw)
    body = check(raw, FIELDS, ("token_ids", "sampling_params"))
    if any(token < 0 for token in body["token_ids"]):
        raise field_problem("token_ids", "token_ids must not contain negative values", body["token_ids"])
    sampling = check(body["sampling_params"], _SAMPLING_FIELDS)
    check_sampling(sampling, sampling.get("max_tokens"))
    core, rank = engine.choose_core(received)
    # No release of the prefill engine's blocks when this fails: that wrapper is only around the OpenAI APIs.
    serving.check_model(engine, body.get("model"))
    serving.preflight(engine, core)
    request = _Request(engine, body, sampling, received)
    if body.get("stream"):
        return Answer(content_type=EVENT_STREAM, events=request.events(core, rank))
    return json_answer(await request.whole(core, rank))


class _Request:
    def __init__(self, engine: Engine, body: dict[str, Any], sampling: dict[str, Any], received: Received) -> None:
        self.engine = engine
        self.body = body
        self.id = f"generate-tokens-{serving.base_request_id(received, body)}"
        self.model = engine.lora_of(body.get("model")) or engine.served_models[0]
        self.prompt = array("I", [min(token, 2**32 - 1) for token in body["token_ids"]])
        self.samples = sampling.get("n", 1)
        self.text = body.get("output_mode") == "text"
        # Without a cap of its own the answer may fill the context, unlike SamplingParams' default of 16.
        limit = serving.output_limit(engine, self.prompt, sampling.get("max_tokens"), "max_tokens")
        extra = sampling.get("extra_args") or {}
        params = body.get("kv_transfer_params") or extra.get("kv_transfer_params")
        merged = {**sampling, "kv_transfer_params": params, "cache_salt": body.get("cache_salt")}
        self.jobs = serving.samples_of(
            serving.job(
                merged,
                self.id,
                self.prompt,
                limit,
                lora=engine.lora_of(body.get("model")),
                prompt_logprobs=sampling.get("prompt_logprobs") is not None,
            ),
            self.samples,
        )

    def _choice(
        self,
        index: int,
        token_ids: list[int],
        text: str,
        reasons: tuple[str | None, int | str | None],
        total: int,
    ) -> dict[str, Any]:
        ended = reasons[0] is not None
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": reasons[0],
            "stop_reason": reasons[1],
            "token_ids": token_ids,
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": [{"version": "default", "start": 0, "end": total}] if ended else None,
        }
        if self.text:
            choice["text"] = text
        choice["logprobs"] = None
        return choice

    async def whole(self, core: Core, rank: int | None) -> dict[str, Any]:
        results = await serving.complete(self.engine, core, self.jobs, rank)
        return {
            "request_id": self.id,
            "model": self.model,
            "created": int(time.time()),
            "usage": serving.usage(
                self.engine,
                len(self.prompt),
                sum(len(result.token_ids) for result in results),
                results[0].run.cached_tokens,
            ),
            "prompt_logprobs": None,
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": list(self.prompt) if self.body.get("return_token_ids") else None,
            "mm_placeholders": None,
            "metrics": None,
            "kv_transfer_params": results[0].run.kv_transfer_params,
            "ec_transfer_params": None,
            "output_mode": "text" if self.text else "tokens",
            "choices": [
                self._choice(
                    index,
                    result.token_ids,
                    result.text,
                    (result.finish_reason, result.stop_reason),
                    len(result.token_ids),
                )
                for index, result in enumerate(results)
            ],
        }

    async def events(self, core: Core, rank: int | None) -> AsyncGenerator[bytes, None]:
        options = self.body.get("stream_options") or {}
        include_usage = bool(options.get("include_usage"))
        continuous = include_usage and bool(options.get("continuous_usage_stats"))
        counts = [0] * self.samples
        cached: int | None = None
        stream = serving.steps(self.engine, core, self.jobs, rank)
        try:
            async for index, run, step in stream:
                counts[index] += len(step.token_ids)
                usage = None
                if continuous:
                    usage = serving.usage(self.engine, len(self.prompt), counts[index], None)
                chunk: dict[str, Any] = {"request_id": self.id, "usage": usage}
                if cached is None:
                    cached = run.cached_tokens
                    if self.body.get("return_token_ids"):
                        chunk["prompt_token_ids"] = list(self.prompt)
                chunk["output_mode"] = "text" if self.text else "tokens"
                reasons = (step.finish_reason, step.stop_reason)
                chunk["choices"] = [self._choice(index, step.token_ids, step.text, reasons, counts[index])]
                yield b"data: " + json_bytes(chunk) + b"\n\n"
            if include_usage:
                total = serving.usage(self.engine, len(self.prompt), sum(counts), cached)
                last = {
                    "request_id": self.id,
                    "usage": serving.without_nones(total),
                    "output_mode": "text" if self.text else "tokens",
                    "choices": [],
                }
                yield b"data: " + json_bytes(last) + b"\n\n"
        except ApiError as error:
            yield error.event()
        finally:
            await stream.aclose()
        yield serving.DONE


async def abort_requests(_engine: Engine, received: Received) -> Answer:
    """Knows only running requests; a finished prefill keeps its blocks (v1/core/sched/scheduler.py:2679)."""
    raw = parse_json(received)
    if raw.get("request_ids") is None:
        raise ApiError(400, "Missing 'request_ids' in request body", "Bad Request")
    return Answer(200, body=b"")


async def tokenize(engine: Engine, received: Received) -> Answer:
    raw = parse_json(received)
    body = check(raw, {"prompt": string(), "messages": list_of(mapping), "model": nullable(string())})
    if "messages" not in body and "prompt" not in body:
        check(body, {}, ("prompt",))
    serving.check_model(engine, body.get("model"))
    ids = tokens.encode(chat.render(body) if "messages" in body else body["prompt"])
    strings = [tokens.decode([token]) for token in ids] if body.get("return_token_strs") else None
    return json_answer(
        {
            "count": len(ids),
            "max_model_len": engine.max_model_len,
            "tokens": list(ids),
            "token_strs": strings,
        }
    )


async def detokenize(_engine: Engine, received: Received) -> Answer:
    body = check(parse_json(received), {"tokens": list_of(integer(0, INT64_MAX))}, ("tokens",))
    return json_answer({"prompt": tokens.decode(body["tokens"])})
