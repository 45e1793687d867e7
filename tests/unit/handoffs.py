"""Prefill answers as vLLM 0.32 with NixlConnector writes them, and ways to spoil them."""

import json
from typing import Any

HOST = "10.0.0.5"
ENGINE_ID = "7b1c1c5e-0f5b-4e0e-9d5d-3f6a2d1f9a10"
BLOCK_SIZE = 16


def params(**changes: Any) -> dict[str, Any]:
    """`kv_transfer_params` for a prompt of 40 tokens in blocks of 16; a change to `...` leaves the key out."""
    whole: dict[str, Any] = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[11, 12, 13]],
        "remote_engine_id": ENGINE_ID,
        "remote_request_id": "cmpl-3f2a-0-1a2b3c4d",
        "remote_host": HOST,
        "remote_port": 5600,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 40,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 0,
    }
    whole |= changes
    return {key: value for key, value in whole.items() if value is not ...}


def answer(handoff: Any = None, *, prompt_tokens: int = 40, **more: Any) -> bytes:
    """A whole /v1/completions answer of a prefill leg; without `handoff` a good one, with `...` none at all."""
    whole: dict[str, Any] = {
        "id": "cmpl-3f2a",
        "object": "text_completion",
        "model": "m",
        "choices": [{"index": 0, "text": " a", "finish_reason": "length"}],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": 1, "total_tokens": prompt_tokens + 1},
        "kv_transfer_params": params() if handoff is None else handoff,
    }
    whole |= more
    return json.dumps({key: value for key, value in whole.items() if value is not ...}).encode()
