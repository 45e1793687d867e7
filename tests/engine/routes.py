"""Which path goes where, and the small endpoints that need no engine core."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from tests.engine.apis import chat, completions
from tests.engine.apis.schema import json_answer
from tests.engine.wire import Answer, Received

if TYPE_CHECKING:
    from tests.engine.engine import Engine

Handler = Callable[["Engine", Received], Awaitable[Answer]]

_GUARDED = ("/v1", "/v2", "/inference", "/cohere")  # serve/middleware/authenticate.py


async def health(engine: Engine, _received: Received) -> Answer:
    return Answer(200 if engine.alive else 503, body=b"")


ROUTES: dict[str, dict[str, Handler]] = {
    "/health": {"GET": health},
    "/ping": {"GET": health, "POST": health},
    "/v1/completions": {"POST": completions.create},
    "/v1/chat/completions": {"POST": chat.create},
}


async def dispatch(engine: Engine, received: Received) -> Answer:
    path = received.path
    guarded = engine.api_key is not None and path.startswith(_GUARDED)
    if guarded and received.header("authorization") != f"Bearer {engine.api_key}":
        return json_answer({"error": "Unauthorized"}, 401)
    methods = ROUTES.get(path)
    if methods is None:
        return json_answer({"detail": "Not Found"}, 404)
    handler = methods.get(received.method)
    if handler is None:
        answer = json_answer({"detail": "Method Not Allowed"}, 405)
        answer.headers.append((b"allow", ", ".join(methods).encode()))
        return answer
    return await handler(engine, received)
