"""Every byte the rig sends: client requests, the engines' answers, stream events, probes.

The answers have the shape of vLLM 0.32's own (`kv_transfer_params` of its NIXL pull connector, chat completion
and chunk objects), so that a router which checks or retypes them does its real work.
It must not know how the bytes travel or what is measured with them.
"""

from __future__ import annotations

import functools
import gzip
import json
import struct
from dataclasses import dataclass
from typing import Any

HOLE = "@" * 16  # the rig writes a counter here (rig.c, HOLE_MARK)
STAMP = "t=" + "#" * 16  # the rig writes the send time after "t=" (rig.c, STAMP_MARK)
MODEL = "bench/model"
BLOCK_TOKENS = 16  # vLLM's default on GPUs
CHARACTERS_PER_TOKEN = 4
TOKENS_PER_IMAGE = 1500
ENGINE_ID = "7b6f0d4e-51f4-4a0e-9d1c-0a8b0f4a2c11"

# Escapes, non-ASCII, digits and quotes as prompts have them: a parser's fast path on plain ASCII would flatter.
_SENTENCE = (
    'The operator said: "drain node 17 by 09:45", then asked why p99 rose from 38.2 ms to 112 ms.\n'
    "Le café was closed - naïve retries (x3) hit \\\\store\\kv\\0007 again; see <https://example.invalid/a?b=1&c=2>.\n"
)


@dataclass(frozen=True)
class Prompt:
    """A request body and what it means for the engines."""

    body: bytes
    prompt_tokens: int

    def gzipped(self) -> Prompt:
        """The same prompt, sent with `Content-Encoding: gzip`."""
        return Prompt(gzip.compress(self.body, 6, mtime=0), self.prompt_tokens)


@functools.cache
def chat_body(body_bytes: int, *, stream: bool, usage: bool = False) -> Prompt:
    """A chat completion request of exactly `body_bytes` bytes.

    Up to 2 MB it is text in turns of at most 24 KB; beyond that a real request carries an image, so it does.
    """
    document: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "system", "content": "You are a careful assistant for operators."}],
        "max_tokens": 256,
        "temperature": 0.7,
        "top_p": 0.95,
        "seed": 1234567890123456789,
        "stop": ["\n\nHuman:"],
        "user": "tenant-42",
        "stream": stream,
    }
    if usage:
        document["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    messages = document["messages"]
    image = body_bytes > 2_000_000
    turn_bytes = 24_000

    def encoded() -> bytes:
        return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()

    if image:
        part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
        messages.append({"role": "user", "content": [{"type": "text", "text": _SENTENCE}, part]})
        room = body_bytes - len(encoded())
        pattern = "iVBORw0KGgoAAAANSUhEUgAABAAAAAQACAYAAAB/HSuDAAEAAElEQVR4nOz9eZAs2Xn" * 16
        part["image_url"]["url"] += (pattern * (room // len(pattern) + 1))[:room]  # type: ignore[index]
    else:
        role = "user"
        while True:
            messages.append({"role": role, "content": ""})
            room = body_bytes - len(encoded())
            if room <= 0:
                messages.pop()
                break
            text = _SENTENCE * (min(room, turn_bytes) // len(_SENTENCE))
            messages[-1]["content"] = text
            while len(encoded()) > body_bytes:
                text = text[:-16]
                messages[-1]["content"] = text
            role = "assistant" if role == "user" else "user"
            if room < turn_bytes:
                break
        messages[-1]["content"] += "a" * (body_bytes - len(encoded()))
    body = encoded()
    assert len(body) == body_bytes, (len(body), body_bytes)
    tokens = TOKENS_PER_IMAGE + 100 if image else max(1, body_bytes // CHARACTERS_PER_TOKEN)
    return Prompt(body, tokens)


def http_request(port: int, body: bytes, extra_headers: dict[str, str]) -> bytes:
    """The head is what an EPP and Envoy in front of a sidecar send along with an SDK's request."""
    headers = {
        "Host": f"127.0.0.1:{port}",
        "User-Agent": "OpenAI/Python 2.25.0",
        "Accept": "application/json",
        "Content-Type": "application/json",
        "Authorization": "Bearer sk-bench-0123456789abcdef0123456789abcdef",
        "X-Stainless-Lang": "python",
        "X-Stainless-Retry-Count": "0",
        "X-Forwarded-For": "203.0.113.9",
        "X-Forwarded-Proto": "https",
        "X-Request-Id": f"bench-{HOLE}",
        "Content-Length": str(len(body)),
        **extra_headers,
    }
    head = "POST /v1/chat/completions HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in headers.items())
    return head.encode() + b"\r\n" + body


def _response(body: bytes, content_type: str = "application/json") -> bytes:
    head = (
        "HTTP/1.1 200 OK\r\ndate: Mon, 01 Jun 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
        f"content-length: {len(body)}\r\ncontent-type: {content_type}\r\n\r\n"
    )
    return head.encode() + body


def _completion(
    text: str,
    prompt_tokens: int,
    completion_tokens: int,
    handoff: dict[str, Any] | None,
    cached_tokens: int | None = None,
) -> bytes:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": text,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": [],
        "reasoning": None,
    }
    document = {
        "id": f"chatcmpl-{HOLE}" if handoff is None else "chatcmpl-bench",
        "object": "chat.completion",
        "created": 1780272000,
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": message,
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
                "token_ids": None,
            }
        ],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
            "prompt_tokens_details": None if cached_tokens is None else {"cached_tokens": cached_tokens},
        },
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "kv_transfer_params": handoff,
    }
    return json.dumps(document, separators=(",", ":")).encode()


@functools.cache
def prefill_answer(prompt_tokens: int, side_channel_port: int, cached_tokens: int | None = None) -> bytes:
    """What a prefill engine answers: one token and a handoff whose blocks cover the prompt.

    With `cached_tokens` it says how many it had cached, so that a router has counts to correct in the stream.
    """
    blocks = -(-prompt_tokens // BLOCK_TOKENS)
    handoff = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(range(1000, 1000 + blocks))],
        "remote_engine_id": ENGINE_ID,
        "remote_request_id": f"chatcmpl-bench-{HOLE}",
        "remote_host": "127.0.0.1",
        "remote_port": side_channel_port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": prompt_tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
    }
    return _response(_completion(" The", prompt_tokens, 1, handoff, cached_tokens))


def decode_answer(prompt_tokens: int) -> bytes:
    """A short whole answer of about 1 KB."""
    return _response(_completion("The node was drained in time. " * 20, prompt_tokens, 160, None))


def stream_head() -> bytes:
    return (
        b"HTTP/1.1 200 OK\r\ndate: Mon, 01 Jun 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
        b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
    )


@functools.cache
def stream_events(count: int = 97, *, usage: bool = False) -> bytes:
    """Framed SSE events of 60 to 400 bytes, each in an HTTP chunk of its own as uvicorn sends them.

    With `usage` every event carries the counts that `continuous_usage_stats` asks for.
    Format for the rig: count, then length, offset of the stamp's digits and the bytes of each.
    """
    packed = [struct.pack("<I", count)]
    for number in range(count):
        wanted_bytes = 60 + (number * 131) % 341
        choice: dict[str, Any] = {"index": 0, "delta": {"content": STAMP}}
        event: dict[str, Any] = {"choices": [choice]}
        if wanted_bytes > 190 or usage:
            choice |= {"logprobs": None, "finish_reason": None}
            event = {
                "id": "chatcmpl-bench-0a1b2c3d",
                "object": "chat.completion.chunk",
                "created": 1780272000,
                "model": MODEL,
                "choices": [choice],
            }
        if usage:
            event["usage"] = {
                "prompt_tokens": 256,
                "total_tokens": 256 + number,
                "completion_tokens": number,
                "prompt_tokens_details": {"cached_tokens": 0},
            }
        bare = len(json.dumps(event, separators=(",", ":"))) + 8
        choice["delta"]["content"] = STAMP + "a" * max(0, wanted_bytes - bare)
        data = f"data: {json.dumps(event, separators=(',', ':'))}\n\n".encode()
        framed = f"{len(data):x}\r\n".encode() + data + b"\r\n"
        digits = framed.index(STAMP.encode()) + 2
        packed.append(struct.pack("<II", len(framed), digits) + framed)
    return b"".join(packed)


def stream_end() -> bytes:
    return b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def canned(side_channel_port: int) -> bytes:
    """What routers ask engines besides requests: health, models, metrics, the engine's configuration."""
    models = {
        "object": "list",
        "data": [{"id": MODEL, "object": "model", "owned_by": "vllm", "max_model_len": 4194304}],
    }
    kv = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "engine_id": ENGINE_ID}
    server = {
        "vllm_config": {"kv_transfer_config": kv},
        "vllm_env": {"VLLM_NIXL_SIDE_CHANNEL_PORT": side_channel_port},
    }
    metrics = (
        "# HELP vllm:num_requests_running Number of requests in model execution batches.\n"
        "# TYPE vllm:num_requests_running gauge\n"
        f'vllm:num_requests_running{{engine="0",model_name="{MODEL}"}} 0.0\n'
        "# TYPE vllm:num_requests_waiting gauge\n"
        f'vllm:num_requests_waiting{{engine="0",model_name="{MODEL}"}} 0.0\n'
        "# TYPE vllm:kv_cache_usage_perc gauge\n"
        f'vllm:kv_cache_usage_perc{{engine="0",model_name="{MODEL}"}} 0.0\n'
        "# TYPE vllm:cache_config_info gauge\n"
        f'vllm:cache_config_info{{block_size="{BLOCK_TOKENS}",hash_block_size="{BLOCK_TOKENS}",'
        'num_gpu_blocks="262144",enable_prefix_caching="True",prefix_caching_hash_algo="sha256",engine="0"} 1.0\n'
    )
    answers = {
        "GET /health": _response(b""),
        "GET /ping": _response(b""),
        "GET /version": _response(b'{"version":"0.32.0"}'),
        "GET /v1/models": _response(json.dumps(models).encode()),
        "GET /server_info": _response(json.dumps(server).encode()),
        "GET /metrics": _response(metrics.encode(), "text/plain; version=0.0.4; charset=utf-8"),
    }
    packed = [struct.pack("<I", len(answers))]
    for key, answer in answers.items():
        packed += [struct.pack("<I", len(key)), key.encode(), struct.pack("<I", len(answer)), answer]
    return b"".join(packed)
