"""Log probabilities that are made up but deterministic and of the right shape."""

from __future__ import annotations

import math
from array import array
from typing import Any

from tests.engine import tokens


def _logprob(token: int) -> float:
    return -math.log(2 + token % 97)


def completion(body: dict[str, Any], before: list[int], token_ids: list[int]) -> dict[str, Any] | None:
    """`CompletionLogProbs`."""
    wanted = body.get("logprobs")
    if wanted is None:
        return None
    every = before + token_ids
    texts = [tokens.decode([token]) for token in every]
    offsets = [sum(len(text) for text in texts[:index]) for index in range(len(texts))]
    return {
        "text_offset": offsets,
        "token_logprobs": [_logprob(token) for token in every],
        "tokens": texts,
        "top_logprobs": [{text: _logprob(token)} for text, token in zip(texts, every, strict=True)],
    }


def chat(body: dict[str, Any], token_ids: list[int]) -> dict[str, Any] | None:
    """`ChatCompletionLogProbs`."""
    if not body.get("logprobs"):
        return None
    content = []
    for token in token_ids:
        text = tokens.decode([token])
        entry: dict[str, Any] = {
            "token": text,
            "logprob": _logprob(token),
            "bytes": list(text.encode()),
        }
        top = [dict(entry)] if body.get("top_logprobs") else []
        content.append({**entry, "top_logprobs": top})
    return {"content": content}


def prompt(body: dict[str, Any], ids: array[int]) -> list[Any] | None:
    """`prompt_logprobs`: nothing for the first token, then a map by token id."""
    wanted = body.get("prompt_logprobs")
    if wanted is None:
        return None
    entries: list[Any] = [None]
    for token in ids[1:]:
        text = tokens.decode([token])
        entries.append({str(token): {"logprob": _logprob(token), "rank": 1, "decoded_token": text}})
    return entries
