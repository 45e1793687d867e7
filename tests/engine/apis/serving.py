"""What all generating APIs share: from a checked body to jobs, from jobs to steps, and what happens when it fails.

Knows no API's JSON. Follows vllm/entrypoints/generate/base/serving.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.engine.apis import schema
from tests.engine.apis.schema import ApiError
from tests.engine.run import EngineDeadError, GenerationError, Job, Run, Step
from tests.engine.tokens import VOCAB_SIZE

if TYPE_CHECKING:
    from tests.engine.core import Core
    from tests.engine.engine import Engine
    from tests.engine.http_messages import Received

DONE = b"data: [DONE]\n\n"


def random_id() -> str:
    return os.urandom(8).hex()


def base_request_id(received: Received, body: dict[str, Any]) -> str:
    header = received.header("x-request-id")
    return header if header is not None else body.get("request_id") or random_id()


def check_model(engine: Engine, name: str | None) -> None:
    if name and name not in engine.served_models and not engine.adapters.finds(name):
        aliases = ", ".join(engine.served_models)
        raise ApiError(
            404,
            f"The model `{name}` does not exist. Valid aliases: {aliases}.",
            "NotFoundError",
            "model",
        )


def preflight(engine: Engine, core: Core, samples: int = 1) -> None:
    """Before a stream's 200 is sent (generate/base/serving.py:_preflight)."""
    if not core.alive:
        raise schema.engine_dead()
    limit = engine.limits.max_num_queued_reqs
    if limit is not None and len(core.waiting) + samples > limit:
        core.counters["admission_rejections"] += 1
        raise ApiError(503, "The server is overloaded: too many queued requests.", "ServiceUnavailableError")


def output_limit(engine: Engine, prompt: array[int], max_tokens: int | None, param: str) -> int:
    """The cap, or what is left of the context (renderers/params.py:255, :515; serve/utils/api_utils.py:169)."""
    limit = engine.max_model_len
    if max_tokens is not None and max_tokens > limit:
        raise schema.refused(
            f"{param}={max_tokens} cannot be greater than max_model_len={limit}. "
            "Please request fewer output tokens.",
            param,
            max_tokens,
        )
    if len(prompt) > limit:
        raise schema.refused(
            f"This model's maximum context length is {limit} tokens. However, your prompt contains "
            f"{len(prompt)} input tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt.",
            "input_tokens",
            len(prompt),
        )
    left = limit - len(prompt)
    return left if max_tokens is None else min(max_tokens, left)


def job(body: dict[str, Any], request_id: str, prompt: array[int], max_tokens: int, **more: Any) -> Job:
    stop = body.get("stop")
    return Job(
        request_id=request_id,
        prompt=prompt,
        max_tokens=max_tokens,
        min_tokens=body.get("min_tokens") or 0,
        ignore_eos=bool(body.get("ignore_eos")),
        stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        stop_token_ids=tuple(body.get("stop_token_ids") or ()),
        include_stop=bool(body.get("include_stop_str_in_output")),
        cache_salt=body.get("cache_salt"),
        kv_params=transfer_params(body),
        **more,
    )


def transfer_params(body: dict[str, Any]) -> dict[str, Any] | None:
    """What reaches the engine: `kv_transfer_params`, and it may also be smuggled in through `vllm_xargs`."""
    params = body.get("kv_transfer_params") or None
    if params is None and body.get("vllm_xargs"):
        params = body["vllm_xargs"].get("kv_transfer_params")
        if params is not None:
            # It can't be an object there, and the code that reads it wants one: AttributeError.
            raise ApiError(500, "", "InternalServerError")
    return params


def samples_of(single: Job, count: int) -> list[Job]:
    """One job for each of `n` samples, with the ids of vLLM's ParentRequest."""
    if count == 1:
        return [single]
    return [replace(single, request_id=f"{index}_{single.request_id}", sample=index) for index in range(count)]


@contextlib.asynccontextmanager
async def release_on_rejection(core: Core, params: dict[str, Any] | None) -> AsyncIterator[None]:
    """Whatever leaves this block, a cancelled request included, tells the prefill engine to free its blocks."""
    try:
        yield
    except BaseException:
        if params and params.get("do_remote_prefill"):
            core.reject(params)
        raise


class Result:
    """One sample, complete."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.text = ""
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def add(self, step: Step) -> None:
        self.text += step.text
        self.token_ids += step.token_ids
        self.finish_reason, self.stop_reason = step.finish_reason, step.stop_reason


def check_engine_input(core_count: int, rank: int | None, single: Job) -> None:
    """What the engine itself refuses, after a stream's head is out already (v1/engine/input_processor.py)."""
    if rank is not None and not 0 <= rank < core_count:
        raise ApiError(400, f"data_parallel_rank {rank} is out of range [0, {core_count}).")
    if not single.prompt:
        raise ApiError(400, "The decoder prompt cannot be empty")
    top = max(single.prompt)
    if top >= VOCAB_SIZE:
        raise ApiError(400, f"Token id {top} is out of vocabulary")


async def complete(engine: Engine, core: Core, jobs: Sequence[Job], rank: int | None) -> list[Result]:
    """Run all jobs to their end; the first failure ends the others."""
    for each in jobs:
        check_engine_input(len(engine.cores), rank, each)
    if len(jobs) == 1:
        return [await _complete_one(core, jobs[0])]
    tasks = [asyncio.ensure_future(_complete_one(core, each)) for each in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def _complete_one(core: Core, single: Job) -> Result:
    try:
        async with core.run(single) as run:
            await run.prefill()
            result = Result(run)
            async for step in run.decode():
                result.add(step)
            return result
    except EngineDeadError:
        raise schema.engine_dead() from None
    except GenerationError:
        raise schema.GenerationFailed from None


async def steps(
    engine: Engine, core: Core, jobs: Sequence[Job], rank: int | None
) -> AsyncGenerator[tuple[int, Run, Step], None]:
    """The steps of all jobs as they come; ApiError if one of them fails."""
    for each in jobs:
        check_engine_input(len(engine.cores), rank, each)
    if len(jobs) == 1:
        try:
            async with core.run(jobs[0]) as run:
                await run.prefill()
                async for step in run.decode():
                    yield 0, run, step
        except EngineDeadError:
            raise schema.engine_dead() from None
        except GenerationError:
            raise schema.GenerationFailed from None
        return
    queue: asyncio.Queue[tuple[int, Run, Step] | BaseException | None] = asyncio.Queue()

    async def feed(index: int, single: Job) -> None:
        try:
            async with core.run(single) as run:
                await run.prefill()
                async for step in run.decode():
                    queue.put_nowait((index, run, step))
            queue.put_nowait(None)
        except EngineDeadError:
            queue.put_nowait(schema.engine_dead())
        except GenerationError:
            queue.put_nowait(schema.GenerationFailed())

    tasks = [asyncio.ensure_future(feed(index, single)) for index, single in enumerate(jobs)]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def usage(
    engine: Engine,
    prompt_tokens: int,
    completion_tokens: int,
    cached: int | None,
    created: int | None = None,
) -> dict[str, Any]:
    """`UsageInfo` with every field, in its order."""
    details = None
    if engine.enable_prompt_tokens_details and cached is not None:
        details = {"cached_tokens": cached, "created_cache_tokens": created, "multimodal_tokens": None}
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": details,
        "completion_tokens_details": None,
    }


def without_nones(value: Any) -> Any:
    """As `model_dump(exclude_none=True)`."""
    if isinstance(value, dict):
        return {key: without_nones(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [without_nones(each) for each in value]
    return value
