"""What of an answer must be the same, whoever gives it."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.integration.client import Answer

VOLATILE = {
    *("id", "created", "created_at", "completed_at", "request_id", "item_id", "sequence_number", "cache_salt"),
    *("created_cache_tokens", "cache_write_tokens"),  # where the prompt was computed
}
"""Members that differ between any two answers, or may."""


def essence(value: Any) -> Any:
    """An answer without what is never the same twice; numbers to three places, as rounding is the engine's."""
    if isinstance(value, dict):
        return {key: essence(inner) for key, inner in value.items() if key not in VOLATILE}
    if isinstance(value, list):
        return [essence(inner) for inner in value]
    if isinstance(value, float) and math.isfinite(value):
        return round(value, 3)
    return value


def essence_of(answer: Answer) -> Any:
    if (answer.header("content-type") or "").startswith("text/event-stream"):
        return [essence(json.loads(event)) if event != b"[DONE]" else "[DONE]" for event in answer.events]
    return essence(answer.json)
