"""A request that is split: what each leg gets, and that the client cannot tell from the text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.sidecar import Rig, chat, completion, prompt

Bodies = Callable[..., dict[str, Any]]


def messages(tokens: int = 400, **fields: Any) -> dict[str, Any]:
    return chat(tokens, **fields)


def responses(tokens: int = 400, **fields: Any) -> dict[str, Any]:
    return {"model": "sim", "input": prompt(tokens), "max_output_tokens": 8, **fields}


def generate(tokens: int = 400, **fields: Any) -> dict[str, Any]:
    ids = [1000 + ord(letter) for letter in prompt(tokens)][:tokens]
    return {"model": "sim", "token_ids": ids, "sampling_params": {"max_tokens": 8}, **fields}


APIS: dict[str, Bodies] = {
    "/v1/completions": completion,
    "/v1/chat/completions": chat,
    "/v1/responses": responses,
    "/v1/messages": messages,
    "/inference/v1/generate": generate,
}


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_same_text_as_local_and_all_kv_pulled(rig: Rig, path: str, stream: bool) -> None:
    """Split, the prompt's KV is pulled and the text is the engine's own; nothing stays behind on the prefill
    side."""
    body = APIS[path](**({"stream": True} if stream else {}))
    answer = rig.post(path, body)
    assert answer.status == 200
    assert answer.decision == f"remote; prefill={rig.prefill.address}"
    pulled = rig.decode.counter("prompt_tokens_external_kv_transfer")
    assert pulled >= 400
    rig.decode.restart()  # without the prefix in its cache
    rig.target = ""
    local = rig.post(path, body)
    assert local.decision == "local; reason=no_target"
    assert local.text == answer.text != ""
    assert rig.decode.counter("prompt_tokens_external_kv_transfer") == 0
    assert rig.prefill.held_blocks == 0
