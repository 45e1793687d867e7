"""The APIs that can be split, and a request for each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.integration.sidecar import chat, completion, prompt


def responses(tokens: int = 400, **fields: Any) -> dict[str, Any]:
    return {"model": "sim", "input": prompt(tokens), "max_output_tokens": 8, **fields}


def generate(tokens: int = 400, *, sampling: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    ids = [1000 + ord(letter) for letter in prompt(tokens)][:tokens]
    return {"model": "sim", "token_ids": ids, "sampling_params": {"max_tokens": 8, **(sampling or {})}, **fields}


COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
GENERATE = "/inference/v1/generate"

APIS: dict[str, Callable[..., dict[str, Any]]] = {
    COMPLETIONS: completion,
    CHAT: chat,
    RESPONSES: responses,
    MESSAGES: chat,
    GENERATE: generate,
}
