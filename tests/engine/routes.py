"""Which path goes where, and the small endpoints that need no engine core."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from tests.engine import metrics
from tests.engine.apis import adapters, chat, completions, generate, messages, responses, serving
from tests.engine.apis.schema import ApiError, FieldError, json_answer, parse_json
from tests.engine.http_messages import Answer, Received

if TYPE_CHECKING:
    from tests.engine.engine import Engine

Handler = Callable[["Engine", Received], Awaitable[Answer]]

_GUARDED = ("/v1", "/v2", "/inference", "/cohere")  # serve/middleware/authenticate.py
_SCALE_OUT = (
    "/v1/completions/render",
    "/v1/chat/completions/render",
    "/v1/responses/render",
    "/v1/messages/render",
    "/v1/completions/derender",
    "/v1/chat/completions/derender",
    "/inference/v1/generate",
    "/inference/v1/abort_requests",
)
_RESPONSE = re.compile(r"/v1/responses/[^/]+(/cancel)?")


async def health(engine: Engine, _received: Received) -> Answer:
    return Answer(200 if engine.alive else 503, body=b"")


async def models(engine: Engine, _received: Received) -> Answer:
    def card(name: str, root: str, parent: str | None) -> dict[str, object]:
        permission = {
            "id": f"modelperm-{serving.random_id()}",
            "object": "model_permission",
            "created": int(engine.started_at),
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        return {
            "id": name,
            "object": "model",
            "created": int(engine.started_at),
            "owned_by": "vllm",
            "root": root,
            "parent": parent,
            "max_model_len": engine.max_model_len if parent is None else None,
            "permission": [permission],
        }

    data = [card(name, engine.model, None) for name in engine.served_models]
    data += [card(name, path, engine.served_models[0]) for name, path in engine.adapters.loaded.items()]
    return json_answer({"object": "list", "data": data})


async def version(engine: Engine, _received: Received) -> Answer:
    return json_answer({"version": engine.version})


async def load(_engine: Engine, _received: Received) -> Answer:
    return json_answer({"server_load": 0})


async def kv_event_sources(engine: Engine, _received: Received) -> Answer:
    sources = {str(rank): core.events.config for rank, core in enumerate(engine.cores) if core.events is not None}
    return json_answer(sources)


async def show_metrics(engine: Engine, _received: Received) -> Answer:
    kind = b"text/plain; version=1.0.0; charset=utf-8"
    return Answer(content_type=kind, body=metrics.exposition(engine).encode())


async def show_families(engine: Engine, received: Received) -> Answer:
    """prometheus_client's own application, which is mounted behind the other one: it reads `name[]`."""
    names = parse_qs(received.target.partition("?")[2]).get("name[]", [])
    kind = b"text/plain; version=0.0.4; charset=utf-8"
    return Answer(content_type=kind, body=metrics.exposition(engine, names).encode())


async def invocations(engine: Engine, received: Received) -> Answer:
    """SageMaker's: the first API whose model takes the body (serve/sagemaker/api_router.py)."""
    try:
        raw = parse_json(received)
    except FieldError as error:
        raise ApiError(400, f"JSON decode error: {error}", "Bad Request") from None
    # A header names the adapter here; what the body says is dropped (inject_adapter_id).
    raw.pop("model", None)
    for serve in (chat.serve, completions.serve):
        try:
            return await serve(engine, received, dict(raw))
        except FieldError:
            continue
    raise ApiError(400, "Cannot find suitable handler for request.")


async def realtime(_engine: Engine, received: Received) -> Answer:
    """An echo for WebSockets. Real engines have this path only with speech models."""
    if (received.header("upgrade") or "").lower() != "websocket":
        return json_answer({"detail": "Not Found"}, 404)
    return Answer(101, websocket=True)


ROUTES: dict[str, dict[str, Handler]] = {
    "/health": {"GET": health},
    "/ping": {"GET": health, "POST": health},
    "/load": {"GET": load},
    "/version": {"GET": version},
    "/metrics": {"GET": show_metrics},
    "/metrics/": {"GET": show_families},
    "/kv_event_sources": {"GET": kv_event_sources},
    "/tokenize": {"POST": generate.tokenize},
    "/detokenize": {"POST": generate.detokenize},
    "/invocations": {"POST": invocations},
    "/v1/models": {"GET": models},
    "/v1/completions": {"POST": completions.create},
    "/v1/chat/completions": {"POST": chat.create},
    "/v1/responses": {"POST": responses.create},
    "/v1/messages": {"POST": messages.create},
    "/v1/messages/count_tokens": {"POST": messages.count_tokens},
    "/v1/realtime": {"GET": realtime},
    "/inference/v1/generate": {"POST": generate.create},
    "/inference/v1/abort_requests": {"POST": generate.abort_requests},
}


RUNTIME_LORA_ROUTES: dict[str, dict[str, Handler]] = {
    "/v1/load_lora_adapter": {"POST": adapters.load},
    "/v1/unload_lora_adapter": {"POST": adapters.unload},
}


async def dispatch(engine: Engine, received: Received) -> Answer:
    path = received.path
    guarded = engine.api_key is not None and path.startswith(_GUARDED) and received.method != "OPTIONS"
    if guarded and received.header("authorization") != f"Bearer {engine.api_key}":
        return json_answer({"error": "Unauthorized"}, 401)
    if path in _SCALE_OUT and not engine.enable_scale_out:
        message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
        raise ApiError(403, message, "PermissionDeniedError")
    methods = ROUTES.get(path) or (RUNTIME_LORA_ROUTES.get(path) if engine.adapters.runtime else None)
    if methods is None and (found := _RESPONSE.fullmatch(path)):
        methods = {"POST" if found[1] else "GET": responses.retrieve}
    if methods is None:
        return _missing(received)
    handler = methods.get(received.method)
    if handler is None:
        answer = json_answer({"detail": "Method Not Allowed"}, 405)
        answer.headers.append((b"allow", ", ".join(methods).encode()))
        return answer
    return await handler(engine, received)


def _missing(received: Received) -> Answer:
    """404, or a redirect where only the slash at the end is too much (starlette's redirect_slashes)."""
    shorter = received.path.rstrip("/")
    if shorter != received.path and shorter in ROUTES:
        query = received.target.partition("?")[2]
        place = f"http://{received.header('host') or ''}{shorter}" + (f"?{query}" if query else "")
        return Answer(307, [], body=b"", appended=[(b"location", place.encode())])
    return json_answer({"detail": "Not Found"}, 404)
