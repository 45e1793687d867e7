"""One script of requests for a pair of engines, and a record of what came back that can be compared.

Run against real engines and simulated ones, the records must be equal: that is what keeps the simulation honest.
A record holds status, headers and the *shape* of the answer (keys in order, types, the values of a few fields
that are the same for every model, event kinds in order), never text or numbers. Blocking; knows nothing of the
simulation.

    python -m tests.engine.contract http://127.0.0.1:8100 http://127.0.0.1:8200
"""

from __future__ import annotations

import argparse
import http.client
import json
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec
import zmq

# Fields whose value says something about the protocol, whatever the model.
TELLING = {
    *("object", "type", "role", "status", "finish_reason", "stop_reason", "code", "param", "output_mode"),
    *("do_remote_prefill", "do_remote_decode", "transfer_mode", "tp_size", "pp_size", "dcp_size", "version"),
    *("tool_choice", "truncation", "service_tier", "sequence_number", "remote_blocks_expiry_time"),
}
HEADERS = ("content-type", "transfer-encoding", "allow", "connection", "server", "vary", "www-authenticate")
TIMEOUT_SECONDS = 60.0
DEATH_SECONDS = 1.5
DEATH_AFTER_SECONDS = 1.5  # ten long answers are on their way then
# Blocks that are released are free within a third of a second.
RELEASE_SECONDS = 1.5
# An answer that takes longer than this is none. A cold handshake with a dead side channel takes 5 s.
HANG_SECONDS = 3.0
# What real engines answered, to hold simulated ones against; made by `python -m e2e.test_contract`.
RECORDED = Path(__file__).with_name("recorded.json")


@dataclass
class Reply:
    status: int
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""
    broken: bool = False

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name), None)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Case:
    name: str
    path: str
    body: Any = None
    method: str = "POST"
    headers: tuple[tuple[str, str], ...] = ()
    to: str = "decode"


def send(
    url: str,
    path: str,
    body: Any = None,
    method: str = "POST",
    headers: tuple[tuple[str, str], ...] = (),
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Reply:
    """One request on a connection of its own; `broken` says that the body had no proper end."""
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=timeout_seconds)
    try:
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        sent = dict(headers)
        if raw is not None:
            sent.setdefault("content-type", "application/json")
        connection.request(method, path, raw, sent)
        answer = connection.getresponse()
        try:
            data = answer.read()
        except http.client.IncompleteRead as error:
            return Reply(answer.status, answer.getheaders(), error.partial, broken=True)
        return Reply(answer.status, answer.getheaders(), data)
    finally:
        connection.close()


# -- normalising


def shape(value: Any, key: str = "") -> Any:
    if key in TELLING and not isinstance(value, dict | list):
        return value
    if isinstance(value, dict):
        # `prompt_logprobs` is a map by token id.
        return {"#" if name.isdigit() else name: shape(each, name) for name, each in value.items()}
    if isinstance(value, list):
        shapes: list[Any] = []
        for each in value:
            if (made := shape(each)) not in shapes:
                shapes.append(made)
        return shapes
    return type(value).__name__


def events(body: bytes) -> list[Any]:
    """The events of a stream; a run of events of one shape (tokens) counts once."""
    found: list[Any] = []
    for block in body.decode().split("\n\n"):
        if not block:
            continue
        lines = dict(line.partition(": ")[::2] for line in block.split("\n"))
        data = lines.pop("data", None)
        event: list[Any] = [lines]
        if data in ("[DONE]", None):
            event.append(data)
        else:
            assert data is not None
            parsed = json.loads(data)
            parsed.pop("sequence_number", None)
            event += [shape(parsed), "spaced" if data.startswith('{"error": ') else "compact"]
        if event not in found[-1:]:
            found.append(event)
    return found


def record(reply: Reply) -> dict[str, Any]:
    kept: dict[str, Any] = {"status": reply.status, "broken": reply.broken}
    kept["headers"] = [(name.lower(), value if name.lower() in HEADERS else "...") for name, value in reply.headers]
    kind = reply.header("content-type") or ""
    if kind.startswith("application/json"):
        kept["body"] = shape(reply.json) if reply.body else None
    elif kind.startswith("text/event-stream"):
        kept["events"] = events(reply.body)
    elif kind.startswith("text/plain") and reply.body.startswith(b"# HELP"):
        kept["families"] = "metrics"
    else:
        kept["body"] = reply.body.decode("latin-1")
    return kept


# -- the script

_CHAT = [{"role": "user", "content": "Say something about rivers."}]
_TEXT = "The river runs down to the sea and"
_STREAM = {"stream": True}
_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
_CONTINUOUS = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


def _completion(**more: Any) -> dict[str, Any]:
    return {"prompt": _TEXT, "max_tokens": 3, "temperature": 0, "ignore_eos": True, **more}


def _chat(**more: Any) -> dict[str, Any]:
    return {"messages": _CHAT, "max_tokens": 3, "temperature": 0, "ignore_eos": True, **more}


def _responses(**more: Any) -> dict[str, Any]:
    return {"input": "Say something.", "max_output_tokens": 4, "temperature": 0, "ignore_eos": True, **more}


def _messages(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": _CHAT, "max_tokens": 3, "temperature": 0, **more}


def _generate(**more: Any) -> dict[str, Any]:
    sampling = {"max_tokens": 3, "temperature": 0, "ignore_eos": True, **more.pop("sampling", {})}
    return {"token_ids": [5, 6, 7, 8], "sampling_params": sampling, **more}


def cases(model: str) -> list[Case]:
    """Requests that harm no engine. Names are unique."""
    prefill = {"kv_transfer_params": {"do_remote_decode": True}, "max_tokens": 1}
    text_plain = (("content-type", "text/plain"),)
    rank_7 = (("X-data-parallel-rank", "7"),)
    completions = {
        "plain": _completion(),
        "model": _completion(model=model),
        "unknown model": _completion(model="no-such-model"),
        "unknown model stream": _completion(model="no-such-model", **_STREAM),
        "stream": _completion(**_STREAM),
        "stream usage": _completion(**_USAGE),
        "stream continuous usage": _completion(**_CONTINUOUS),
        "token ids": _completion(prompt=[5, 6, 7]),
        "several prompts": _completion(prompt=["one river", "two rivers"]),
        "several prompts stream": _completion(prompt=["one river", "two rivers"], max_tokens=1, **_STREAM),
        "nested ids": _completion(prompt=[[5, 6], [7, 8]]),
        "two samples": _completion(n=2, temperature=1),
        "two samples stream": _completion(n=2, temperature=1, max_tokens=1, **_STREAM),
        "two samples greedy": _completion(n=2),
        "return token ids": _completion(return_token_ids=True),
        "return token ids stream": _completion(return_token_ids=True, **_STREAM),
        "echo": _completion(echo=True),
        "stop string": _completion(stop=["no such string anywhere"]),
        "no prompt": {"max_tokens": 1},
        "null prompt": _completion(prompt=None),
        "empty prompt": _completion(prompt=""),
        "empty list": _completion(prompt=[]),
        "prompt object": _completion(prompt={"a": 1}),
        "prompt negative": _completion(prompt=[-1]),
        "prompt out of vocabulary": _completion(prompt=[2**31 + 5]),
        "prompt out of vocabulary stream": _completion(prompt=[2**31 + 5], **_STREAM),
        "stream options without stream": _completion(stream_options={"include_usage": True}),
        "null stream options": _completion(stream_options=None),
        "min above max": _completion(min_tokens=5),
        "min above max stream": _completion(min_tokens=5, **_STREAM),
        "max_tokens 0": _completion(max_tokens=0),
        "max_tokens null": _completion(max_tokens=None),
        "max_tokens negative": _completion(max_tokens=-1),
        "max_tokens string": _completion(max_tokens="3"),
        "max_tokens word": _completion(max_tokens="x"),
        "max_tokens fraction": _completion(max_tokens=1.5),
        "max_tokens whole float": _completion(max_tokens=2.0),
        "max_tokens beyond context": _completion(max_tokens=2**30),
        "n 0": _completion(n=0),
        "n null": _completion(n=None),
        "temperature 3": _completion(temperature=3),
        "temperature negative": _completion(temperature=-1),
        "top_p 0": _completion(top_p=0),
        "top_k -2": _completion(top_k=-2),
        "min_p 2": _completion(min_p=2),
        "presence_penalty 3": _completion(presence_penalty=3),
        "repetition_penalty 0": _completion(repetition_penalty=0),
        "stop empty": _completion(stop=[""]),
        "stop number": _completion(stop=5),
        "stream word": _completion(stream="maybe"),
        "stream 1": _completion(stream=1),
        "json_schema missing": _completion(response_format={"type": "json_schema"}),
        "cache_salt": _completion(cache_salt="abc"),
        "cache_salt empty": _completion(cache_salt=""),
        "cache_salt bad": _completion(cache_salt="a/b"),
        "cache_salt number": _completion(cache_salt=5),
        "unknown field": _completion(no_such_field={"a": 1}),
        "request_id": _completion(request_id="mine"),
        "beam search stream": _completion(use_beam_search=True, n=2, **_STREAM),
        "kv list": _completion(kv_transfer_params=[]),
        "kv string": _completion(kv_transfer_params="x"),
        "kv empty": _completion(kv_transfer_params={}),
        "kv null": _completion(kv_transfer_params=None),
        "kv unknown keys": _completion(kv_transfer_params={"a": 1}),
        "xargs kv object": _completion(vllm_xargs={"kv_transfer_params": {"a": 1}}),
        "xargs kv string": _completion(vllm_xargs={"kv_transfer_params": "a"}),
        "xargs": _completion(vllm_xargs={"a": "b", "c": 1, "d": ["e"]}),
        "xargs list": _completion(vllm_xargs=[]),
        "array": [1],
        "string": "x",
        "null": b"null",
        "nothing": b"",
        "broken json": b"{bad",
        "cut json": b'{"prompt":',
        "not utf-8": b'{"prompt":"\xff"}',
        "deep json": b'{"prompt":' + b"[" * 20000 + b"]" * 20000 + b"}",
        "NaN": b'{"prompt":"x","temperature":NaN,"max_tokens":1}',
        "repeated key": b'{"prompt":5,"prompt":"ho","max_tokens":1}',
        "escaped key": b'{"prompt":"ho","max_t\\u006fkens":1}',
    }
    chats = {
        "plain": _chat(),
        "unknown model": _chat(model="no-such-model"),
        "stream": _chat(**_STREAM),
        "stream usage": _chat(**_USAGE),
        "stream continuous usage": _chat(**_CONTINUOUS),
        "two samples": _chat(n=2, temperature=1),
        "two samples greedy": _chat(n=2),
        "max_completion_tokens": _chat(max_completion_tokens=2, max_tokens=2**30),
        "max_completion_tokens beyond": _chat(max_completion_tokens=2**30),
        "max_tokens 0": _chat(max_tokens=0),
        "max_tokens beyond": _chat(max_tokens=2**30),
        "return token ids": _chat(return_token_ids=True),
        "return token ids stream": _chat(return_token_ids=True, **_STREAM),
        "return prompt text": _chat(return_prompt_text=True),
        "no messages": {"max_tokens": 1},
        "empty messages": _chat(messages=[]),
        "messages string": _chat(messages="x"),
        "message list": _chat(messages=[[]]),
        "parts": _chat(messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}]),
        "stream options without stream": _chat(stream_options={"include_usage": True}),
        "tool_choice without tools": _chat(tool_choice="auto"),
        "tool_choice none": _chat(tools=[_TOOL], tool_choice="none"),
        "tool_choice auto": _chat(tools=[_TOOL]),
        "tool_choice unknown": _chat(tools=[_TOOL], tool_choice={"type": "function", "function": {"name": "g"}}),
        "tools empty": _chat(tools=[]),
        "top_logprobs without logprobs": _chat(top_logprobs=2),
        "top_logprobs word": _chat(top_logprobs="x"),
        "prompt_logprobs stream": _chat(prompt_logprobs=1, **_STREAM),
        "continue and generate": _chat(continue_final_message=True, add_generation_prompt=True),
        "reasoning_effort": _chat(reasoning_effort="no-such"),
        "kv list": _chat(kv_transfer_params=[]),
        "kv empty": _chat(kv_transfer_params={}),
        "kv token ids": _chat(kv_transfer_params={"prompt_token_ids": [5, 6, 7]}),
        "kv token ids, no messages": _chat(messages=[], kv_transfer_params={"prompt_token_ids": [5, 6, 7]}),
        "kv token ids wrong": _chat(kv_transfer_params={"prompt_token_ids": ["a"]}),
        "kv token ids empty": _chat(kv_transfer_params={"prompt_token_ids": []}),
        "kv token ids out of vocabulary": _chat(kv_transfer_params={"prompt_token_ids": [2**31 + 5]}),
        "broken json": b"{bad",
    }
    answers = {
        "plain": _responses(),
        "stream": _responses(**_STREAM),
        "unknown model": _responses(model="no-such-model"),
        "instructions": _responses(instructions="Be brief."),
        "items": _responses(input=[{"role": "user", "content": "hi"}]),
        "item parts": _responses(input=[{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]),
        "no input": {"max_output_tokens": 1},
        "input number": _responses(input=5),
        "max_output_tokens 0": _responses(max_output_tokens=0),
        "max_output_tokens beyond": _responses(max_output_tokens=2**30),
        "max_output_tokens null": _responses(max_output_tokens=None, stop=["e", "a", "o", "i"]),
        "tool_choice required": _responses(tool_choice="required"),
        "prompt": _responses(prompt={"id": "x"}),
        "background": _responses(background=True),
        "background without store": _responses(background=True, store=False),
        "store false": _responses(store=False),
        "previous": _responses(previous_response_id="resp_x"),
        "request_id": _responses(request_id="resp_mine"),
        "kv list": _responses(kv_transfer_params=[]),
        "kv empty": _responses(kv_transfer_params={}),
        "temperature 3": _responses(temperature=3),
    }
    anthropic = {
        "plain": _messages(model),
        "stream": _messages(model, **_STREAM),
        "unknown model": _messages("no-such-model"),
        "unknown model stream": _messages("no-such-model", **_STREAM),
        "system": _messages(model, system="Be brief."),
        "blocks": _messages(model, messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}]),
        "no max_tokens": {"model": model, "messages": _CHAT},
        "max_tokens 0": _messages(model, max_tokens=0),
        "max_tokens beyond": _messages(model, max_tokens=2**30),
        "no model": {"messages": _CHAT, "max_tokens": 1},
        "empty model": _messages(""),
        "wrong role": _messages(model, messages=[{"role": "robot", "content": "x"}]),
        "temperature 3": _messages(model, temperature=3),
        "kv list": _messages(model, kv_transfer_params=[]),
        "kv empty": _messages(model, kv_transfer_params={}),
    }
    generates = {
        "plain": _generate(),
        "text": _generate(output_mode="text"),
        "stream": _generate(**_STREAM),
        "stream usage": _generate(**_USAGE),
        "stream continuous usage": _generate(**_CONTINUOUS),
        "return token ids stream": _generate(return_token_ids=True, **_STREAM),
        "two samples": _generate(sampling={"n": 2, "temperature": 1}),
        "unknown model": _generate(model="no-such-model"),
        "no token ids": {"sampling_params": {}},
        "empty token ids": _generate(token_ids=[]),
        "negative token ids": _generate(token_ids=[-1]),
        "no sampling_params": {"token_ids": [5]},
        "max_tokens 0": _generate(sampling={"max_tokens": 0}),
        "min above max": _generate(sampling={"min_tokens": 9}),
        "out of vocabulary": _generate(token_ids=[2**31 + 5]),
        "output_mode": _generate(output_mode="x"),
        "kv list": _generate(kv_transfer_params=[]),
        "kv empty": _generate(kv_transfer_params={}),
        "extra_args empty": _generate(sampling={"extra_args": {}}),
    }
    invoked = {
        "prompt": _completion(),
        "messages": _chat(),
        "stream": _chat(**_STREAM),
        "neither": {"max_tokens": 1},
        "wrong": {"prompt": {"a": 1}},
        "unknown model": _completion(model="no-such-model"),
        "kv list": _completion(kv_transfer_params=[]),
        "broken json": b"{bad",
    }
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": completions,
        "/v1/chat/completions": chats,
        "/v1/responses": answers,
        "/v1/messages": anthropic,
        "/inference/v1/generate": generates,
        "/invocations": invoked,
    }
    listed = [Case(f"{path} {name}", path, body) for path, named in bodies.items() for name, body in named.items()]
    listed += [
        Case("get health", "/health", method="GET"),
        Case("post health", "/health", {}),
        Case("head health", "/health", method="HEAD"),
        Case("get ping", "/ping", method="GET"),
        Case("post ping", "/ping", {}),
        Case("models", "/v1/models", method="GET"),
        Case("version", "/version", method="GET"),
        Case("load", "/load", method="GET"),
        Case("metrics", "/metrics", method="GET"),
        Case("kv_event_sources", "/kv_event_sources", method="GET"),
        Case("no such path", "/no/such/path", {}),
        Case("get completions", "/v1/completions", method="GET"),
        Case("put completions", "/v1/completions", {}, "PUT"),
        Case("options completions", "/v1/completions", method="OPTIONS"),
        Case("completions with query", "/v1/completions?a=b", _completion()),
        Case("completions percent-encoded", "/v1/%63ompletions", _completion()),
        Case("completions with slash", "/v1/completions/", _completion()),
        Case("completions with slash and query", "/v1/completions/?a=b", _completion()),
        Case("completions with two slashes", "//v1/completions", _completion()),
        Case("completions text/plain", "/v1/completions", _completion(), headers=text_plain),
        Case("completions no type", "/v1/completions", _completion(), headers=(("content-type", ""),)),
        Case(
            "completions charset",
            "/v1/completions",
            _completion(),
            headers=(("content-type", "application/json; charset=utf-8"),),
        ),
        Case(
            "completions gzip",
            "/v1/completions",
            b"\x1f\x8b\x08\x00garbage",
            headers=(("content-encoding", "gzip"),),
        ),
        Case("completions rank 7", "/v1/completions", _completion(), headers=rank_7),
        Case("completions rank 7 stream", "/v1/completions", _completion(**_STREAM), headers=rank_7),
        Case("responses rank 7", "/v1/responses", _responses(), headers=rank_7),
        Case(
            "completions rank word",
            "/v1/completions",
            _completion(),
            headers=(("X-data-parallel-rank", "x"),),
        ),
        Case("completions close", "/v1/completions", _completion(), headers=(("connection", "close"),)),
        Case("completions origin", "/v1/completions", _completion(), headers=(("origin", "http://a.b"),)),
        Case("tokenize prompt", "/tokenize", {"prompt": "hello"}),
        Case("tokenize strings", "/tokenize", {"prompt": "hello", "return_token_strs": True}),
        Case("tokenize chat", "/tokenize", {"messages": _CHAT}),
        Case("tokenize nothing", "/tokenize", {}),
        Case("detokenize", "/detokenize", {"tokens": [5, 6]}),
        Case("count tokens", "/v1/messages/count_tokens", {"model": model, "messages": _CHAT}),
        Case("responses get", "/v1/responses/resp_x", method="GET"),
        Case("responses cancel", "/v1/responses/resp_x/cancel", {}),
        Case("abort", "/inference/v1/abort_requests", {"request_ids": []}),
        Case("abort nothing", "/inference/v1/abort_requests", {}),
        Case("lora", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"}),
        # The prefill leg. A stream or a second sample leaves blocks behind until the lease ends.
        Case("prefill completions", "/v1/completions", _completion(**prefill), to="prefill"),
        Case("prefill chat", "/v1/chat/completions", _chat(**prefill), to="prefill"),
        Case("prefill messages", "/v1/messages", _messages(model, **prefill), to="prefill"),
        Case(
            "prefill responses",
            "/v1/responses",
            _responses(max_output_tokens=1, kv_transfer_params={"do_remote_decode": True}),
            to="prefill",
        ),
        Case(
            "prefill generate",
            "/inference/v1/generate",
            _generate(sampling={"max_tokens": 1}, kv_transfer_params={"do_remote_decode": True}),
            to="prefill",
        ),
        Case("prefill two tokens", "/v1/completions", _completion(**{**prefill, "max_tokens": 2}), to="prefill"),
        Case("prefill stream", "/v1/completions", _completion(**prefill, **_STREAM), to="prefill"),
        Case(
            "prefill two samples",
            "/v1/completions",
            _completion(**{**prefill, "temperature": 1}, n=2),
            to="prefill",
        ),
        Case("prefill unknown model", "/v1/completions", _completion(**prefill, model="none"), to="prefill"),
        Case("prefill min_tokens", "/v1/completions", _completion(**prefill, min_tokens=2), to="prefill"),
        Case(
            "prefill short read-back",
            "/v1/completions",
            _completion(
                max_tokens=1,
                kv_transfer_params={
                    "do_remote_decode": True,
                    "remote_block_ids": [[1]],
                    "remote_engine_id": "x",
                    "remote_request_id": "y",
                    "remote_host": "127.0.0.1",
                    "remote_port": 1,
                    "remote_num_tokens": 5,
                },
            ),
            to="prefill",
        ),
    ]
    return listed


def contract(prefill_url: str, decode_url: str, *, model: str) -> dict[str, Any]:
    """The record of everything that harms no engine, by case name."""
    urls = {"prefill": prefill_url, "decode": decode_url}
    found: dict[str, Any] = {}
    for case in cases(model):
        found[case.name] = record(send(urls[case.to], case.path, case.body, case.method, case.headers))
    found.update(handoffs(prefill_url, decode_url))
    found.update(every_api(prefill_url, decode_url, model))
    return found


# -- handoffs that harm nobody


# Another one in each run, so that no prefix cache knows a prompt.
_RUN = uuid.uuid4().hex


# Long enough for several blocks of 32 tokens, whatever the tokeniser.
def long_prompt(number: int) -> str:
    return f"Chapter {number} of {_RUN}. " + " ".join(f"Stone {number} {i} lay in the river." for i in range(60))


def prefill_of(prefill_url: str, prompt: str, **more: Any) -> Reply:
    body = _completion(prompt=prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True}, **more)
    return send(prefill_url, "/v1/completions", body)


def _text(reply: Reply) -> Any:
    return reply.json["choices"][0]["text"] if reply.status == 200 else None


def meet(prefill_url: str, decode_url: str) -> None:
    """The first handoff between two engines; the handshake may take its time."""
    params = prefill_of(prefill_url, long_prompt(0)).json["kv_transfer_params"]
    send(decode_url, "/v1/completions", _completion(prompt=long_prompt(0), kv_transfer_params=params))


def handoffs(prefill_url: str, decode_url: str) -> dict[str, Any]:
    """What happens to handoffs that kill nobody, and whether the text is that of the own prompt."""
    found: dict[str, Any] = {}
    meet(prefill_url, decode_url)

    def tried(name: str, number: int, change: Callable[[dict[str, Any]], Any], **more: Any) -> None:
        prompt = long_prompt(number)
        expected = _text(send(prefill_url, "/v1/completions", _completion(prompt=prompt, max_tokens=8)))
        reply = prefill_of(prefill_url, prompt)
        params = change(reply.json["kv_transfer_params"])
        body = _completion(prompt=prompt, max_tokens=8, kv_transfer_params=params)
        got = send(decode_url, "/v1/completions", {**body, **more})
        kept = record(got)
        if got.header("content-type") == "application/json" and got.status == 200:
            usage = got.json["usage"]
            if "temperature" not in more:
                kept["own text"] = _text(got) == expected
            kept["cached"] = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0) > 0
        found[f"handoff {name}"] = kept

    def without(*keys: str) -> Callable[[dict[str, Any]], Any]:
        return lambda params: {key: value for key, value in params.items() if key not in keys}

    def put(**values: Any) -> Callable[[dict[str, Any]], Any]:
        return lambda params: {**params, **values}

    optional = ("tp_size", "dcp_size", "pp_size", "remote_num_tokens", "transfer_mode")
    tried("good", 1, lambda params: params)
    tried("good stream", 2, lambda params: params, **_USAGE)
    tried("without the optional keys", 3, without(*optional, "remote_blocks_expiry_time"))
    tried("without cached tokens", 4, without("remote_prefill_cached_tokens"))
    tried("flag false", 5, put(do_remote_prefill=False))
    tried("flag absent", 6, without("do_remote_prefill"))
    tried("port as string", 7, lambda params: {**params, "remote_port": str(params["remote_port"])})
    tried("two groups", 8, lambda params: {**params, "remote_block_ids": params["remote_block_ids"] * 2})
    tried(
        "floats",
        9,
        lambda params: {**params, "remote_block_ids": [[float(b) for b in params["remote_block_ids"][0]]]},
    )
    tried("out of range", 10, lambda p: {**p, "remote_block_ids": [[2**30 + b for b in p["remote_block_ids"][0]]]})
    tried("request id null", 11, put(remote_request_id=None))
    tried("request id wrong", 12, put(remote_request_id="cmpl-nobody-0-00000000"))
    tried("engine id unknown", 13, put(remote_engine_id="nobody"))
    tried("host empty", 14, put(remote_host="", remote_engine_id="nobody-1"))
    tried("port 99999", 15, put(remote_port=99999, remote_engine_id="nobody-2"))
    tried("unknown model", 16, lambda params: params, model="no-such-model")
    tried("max_tokens beyond", 17, lambda params: params, max_tokens=2**30)
    tried("cached tokens forged", 18, put(remote_prefill_cached_tokens=10**9))
    tried("prompt_logprobs", 19, lambda params: params, prompt_logprobs=0)
    tried("two samples", 20, lambda params: params, n=2, temperature=1)

    def other(_params: dict[str, Any]) -> Any:
        return prefill_of(prefill_url, long_prompt(98)).json["kv_transfer_params"]

    def of_other_blocks(params: dict[str, Any]) -> Any:
        foreign = other(params)["remote_block_ids"][0]
        own = params["remote_block_ids"][0]
        return {**params, "remote_block_ids": [(foreign * 2)[: len(own)]]}

    tried("foreign blocks", 21, of_other_blocks)
    return found


SPLIT = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/inference/v1/generate")


def _body(path: str, model: str, number: int, cap: int) -> dict[str, Any]:
    """A request with the `number`th long prompt and `cap` tokens of answer."""
    text = long_prompt(number)
    messages = [{"role": "user", "content": text}]
    if path == "/v1/completions":
        return _completion(model=model, prompt=text, max_tokens=cap)
    if path == "/v1/chat/completions":
        return _chat(model=model, messages=messages, max_tokens=cap)
    if path == "/v1/messages":
        return _messages(model, messages=messages, max_tokens=cap)
    if path == "/v1/responses":
        return _responses(model=model, input=text, max_output_tokens=cap)
    return _generate(model=model, token_ids=[5 + number, *range(100, 400)], sampling={"max_tokens": cap})


def _first_model(url: str) -> str:
    name: str = send(url, "/v1/models", method="GET").json["data"][0]["id"]
    return name


def every_api(prefill_url: str, decode_url: str, model: str) -> dict[str, Any]:
    """A good handoff, and one whose blocks can't be read, through each API, streamed and whole."""
    found: dict[str, Any] = {}

    def unreadable(params: dict[str, Any]) -> dict[str, Any]:
        return {**params, "remote_block_ids": [[-1 for _ in params["remote_block_ids"][0]]]}

    number = 300
    for path in SPLIT:
        for kind, change in (("good", dict), ("unreadable", unreadable)):
            for mode in ("whole", "stream"):
                number += 1
                flag = {"kv_transfer_params": {"do_remote_decode": True}}
                first = send(prefill_url, path, {**_body(path, model, number, 1), **flag})
                params = change(first.json["kv_transfer_params"])
                body = {**_body(path, model, number, 4), "kv_transfer_params": params}
                if mode == "stream":
                    body["stream"] = True
                found[f"{path} handoff {kind} {mode}"] = record(send(decode_url, path, body))
    return found


# -- handoffs that harm


class Pair(Protocol):
    """Two engines, the second of which may be started again."""

    prefill_url: str
    decode_url: str
    side_channel_port: int

    def revive(self) -> None:
        """A decode engine that is alive and has met nobody; at the same address or another."""

    def revive_prefill(self) -> None: ...


# Each of these kills an engine of the same cause as one of the others.
_ALIKE = {
    "block ids empty",
    "one block out of range",
    "block ids words",
    "no remote_engine_id",
    "no remote_port",
    "engine id object",
    "tp_size word, cold",
}


def hazards(pair: Pair, *, thorough: bool = True) -> dict[str, Any]:
    """What hangs and what kills: the answer, and whether the decode engine still lives a moment later.

    A request id that is a number is not among them: that kills only if a heartbeat happens to be due.
    """
    found: dict[str, Any] = {}

    def tried(name: str, change: Callable[[dict[str, Any]], Any], *, cold: bool = False, **more: Any) -> None:
        if name in _ALIKE and not thorough:
            return
        if not _healthy(pair.decode_url) or cold:
            pair.revive()
        if not cold:
            meet(pair.prefill_url, pair.decode_url)
        prompt = more.pop("prompt", None)
        own = long_prompt(len(found) + 100)
        params = change(prefill_of(pair.prefill_url, own).json["kv_transfer_params"])
        body = _completion(prompt=prompt(own) if prompt else own, max_tokens=8, kv_transfer_params=params)
        try:
            kept = record(send(pair.decode_url, "/v1/completions", {**body, **more}, timeout_seconds=HANG_SECONDS))
        except TimeoutError:
            kept = {"status": "hangs"}
        except (ConnectionError, http.client.HTTPException):
            kept = {"status": "breaks off"}
        kept["alive"] = _survives(pair.decode_url)
        kept["side channel"] = _answers(pair.side_channel_port)
        found[name] = kept

    def without(*keys: str) -> Callable[[dict[str, Any]], Any]:
        return lambda params: {key: value for key, value in params.items() if key not in keys}

    def blocks(change: Callable[[list[int]], Any]) -> Callable[[dict[str, Any]], Any]:
        return lambda params: {**params, "remote_block_ids": change(params["remote_block_ids"][0])}

    def put(**values: Any) -> Callable[[dict[str, Any]], Any]:
        return lambda params: {**params, **values}

    def flag_only(_params: dict[str, Any]) -> Any:
        return {"do_remote_prefill": True}

    def same(params: dict[str, Any]) -> Any:
        return params

    tried("only the flag", flag_only)
    tried("only the flag, stream", flag_only, stream=True)
    tried("only the flag, refused", flag_only, max_tokens=2**30)
    tried("only the flag, invalid", flag_only, max_tokens="x")
    tried("no block ids", without("remote_block_ids"))
    tried("block ids empty", put(remote_block_ids=[]))
    tried("a group empty", put(remote_block_ids=[[]]))
    tried("too few blocks", blocks(lambda ids: [ids[:1]]))
    tried("one block out of range", put(remote_block_ids=[[999999]]))
    tried("too many blocks", blocks(lambda ids: [[*ids, ids[0]]]))
    tried("flat block ids", blocks(lambda ids: ids))
    tried("block ids string", put(remote_block_ids="abc"))
    tried("block ids words", blocks(lambda ids: [[str(block) + "x" for block in ids]]))
    tried("negative block ids", blocks(lambda ids: [[-block - 1 for block in ids]]))
    for key in ("remote_request_id", "remote_engine_id", "remote_host", "remote_port"):
        tried(f"no {key}", without(key))
    tried("no remote_request_id, stream", without("remote_request_id"), stream=True)
    tried("request id list", put(remote_request_id=["x"]))
    tried("engine id object", put(remote_engine_id={"x": 1}))
    tried("engine id number", put(remote_engine_id=5))
    tried("prompt shorter", same, prompt=lambda own: own[: len(own) // 2])
    tried("prompt longer", same, prompt=lambda own: own + " And so on, and on, and on it went." * 8)
    tried("two prompts", same, prompt=lambda own: [own, own[: len(own) // 3]])
    tried("tp_size 0, cold", put(tp_size=0), cold=True)
    tried("tp_size word, cold", put(tp_size="1"), cold=True)
    tried("pp_size 2, cold", put(pp_size=2), cold=True)
    pair.revive_prefill()
    tried("good after all", same)
    return found


def deaths(pair: Pair) -> dict[str, Any]:
    """What requests see that run while the engine dies of another one: each API, streamed and whole."""
    if not _healthy(pair.decode_url):
        pair.revive()
    model = _first_model(pair.decode_url)
    found: dict[str, Any] = {}

    def ask(path: str, mode: str) -> None:
        body = _body(path, model, 500 + SPLIT.index(path), 7000)
        if mode == "stream":
            body["stream"] = True
        found[f"{path} {mode}"] = record(send(pair.decode_url, path, body))

    asked = [threading.Thread(target=ask, args=(path, mode)) for path in SPLIT for mode in ("whole", "stream")]
    for thread in asked:
        thread.start()
    time.sleep(DEATH_AFTER_SECONDS)
    killer = _completion(kv_transfer_params={"do_remote_prefill": True})
    found["killer"] = record(send(pair.decode_url, "/v1/completions", killer))
    for thread in asked:
        thread.join()
    return dict(sorted(found.items()))


def releases(pair: Pair) -> dict[str, Any]:
    """What frees the prefill engine's blocks, and what leaves them held. The lease is to outlast this."""
    found: dict[str, Any] = {}

    def tried(name: str, act: Callable[[str, dict[str, Any]], Any], path: str = "/v1/completions") -> None:
        number = len(found) + 400
        free_before = _used(pair.prefill_url)
        flag = {"kv_transfer_params": {"do_remote_decode": True}}
        params = send(pair.prefill_url, path, {**_body(path, model, number, 1), **flag}).json["kv_transfer_params"]
        held = _settles(lambda: _used(pair.prefill_url) > free_before)
        act(path, {**_body(path, model, number, 4), "kv_transfer_params": params})
        freed = _settles(lambda: _used(pair.prefill_url) <= free_before)
        found[name] = {"held": held, "freed": freed}

    def ask(**change: Any) -> Callable[[str, dict[str, Any]], Any]:
        def asked(path: str, body: dict[str, Any]) -> None:
            kv = {**body["kv_transfer_params"], **change.get("kv", {})}
            rest = {key: value for key, value in change.items() if key != "kv"}
            send(pair.decode_url, path, {**body, "kv_transfer_params": kv, **rest})

        return asked

    def leave(*, stream: bool) -> Callable[[str, dict[str, Any]], Any]:
        def left(path: str, body: dict[str, Any]) -> None:
            more = {"stream": stream, "max_tokens": 2000}
            place = urlsplit(pair.decode_url)
            connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=20)
            sent = json.dumps({**body, **more})
            connection.request("POST", path, sent, {"content-type": "application/json"})
            if stream:
                connection.getresponse().read(100)
            else:
                time.sleep(0.3)
            connection.close()

        return left

    model = _first_model(pair.decode_url)
    pair.revive()
    tried("nothing", lambda _path, _body: None)
    tried("cold, unknown model", ask(model="no-such-model"))
    meet(pair.prefill_url, pair.decode_url)
    tried("decode", ask())
    tried("unknown model", ask(model="no-such-model"))
    tried("max_tokens beyond", ask(max_tokens=2**30))
    tried("max_tokens word", ask(max_tokens="x"))
    tried("stream options without stream", ask(stream_options={"include_usage": True}))
    tried("flag false", ask(kv={"do_remote_prefill": False}))
    tried("request id null", ask(kv={"remote_request_id": None}))
    tried("request id wrong", ask(kv={"remote_request_id": "nobody"}))
    tried("engine id unknown", ask(kv={"remote_engine_id": "nobody"}))
    tried("prompt_logprobs", ask(prompt_logprobs=0))
    tried("two samples", ask(n=2, temperature=1))
    tried("client leaves the stream", leave(stream=True))
    tried("client leaves", leave(stream=False))
    for path in ("/v1/messages", "/v1/responses", "/inference/v1/generate"):
        tried(f"{path} decode", ask(), path)
        tried(f"{path} unknown model", ask(model="no-such-model"), path)

    def abort(_path: str, body: dict[str, Any]) -> None:
        ids = [body["kv_transfer_params"]["remote_request_id"]]
        send(pair.prefill_url, "/inference/v1/abort_requests", {"request_ids": ids})

    tried("abort on the prefill engine", abort)
    return found


def _used(url: str) -> float:
    """The share of KV blocks in use."""
    text = send(url, "/metrics", method="GET").body.decode()
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith("vllm:kv_cache_usage_perc{")
    )


def _settles(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + RELEASE_SECONDS
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def _healthy(url: str) -> bool:
    try:
        return send(url, "/health", method="GET", timeout_seconds=2).status == 200
    except (OSError, http.client.HTTPException):
        return False


def _survives(url: str) -> bool:
    """A death takes under a second from the answer to the closed port."""
    until = time.monotonic() + DEATH_SECONDS
    while time.monotonic() < until:
        if not _healthy(url):
            return False
        time.sleep(0.05)
    return True


def _answers(port: int) -> bool:
    """Whether a prefill engine's side channel answers a request for its metadata (vllm: nixl/metadata.py)."""
    context = zmq.Context()
    try:
        socket = context.socket(zmq.REQ)
        socket.setsockopt(zmq.RCVTIMEO, 1000)  # ms
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.send(msgspec.msgpack.encode((b"get_meta_msg", 0, 0)))
        return len(socket.recv_multipart()) == 2
    except zmq.Again:
        return False
    finally:
        context.destroy(linger=0)


def difference(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two records differ, one line for each place."""
    if isinstance(one, dict) and isinstance(other, dict):
        lines = [f"{where}/{key}: only in the first" for key in one if key not in other]
        lines += [f"{where}/{key}: only in the second" for key in other if key not in one]
        if not lines and list(one) != list(other):
            lines.append(f"{where}: order {list(one)} against {list(other)}")
        for key in one:
            if key in other:
                lines += difference(one[key], other[key], f"{where}/{key}")
        return lines
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        return [
            line
            for index, (left, right) in enumerate(zip(one, other, strict=True))
            for line in difference(left, right, f"{where}[{index}]")
        ]
    return [] if one == other else [f"{where}: {one!r} against {other!r}"]


def plain(found: dict[str, Any]) -> dict[str, Any]:
    """As it is when it was written and read again."""
    again: dict[str, Any] = json.loads(json.dumps(found))
    return again


def save(sections: dict[str, dict[str, Any]], path: Path = RECORDED) -> None:
    """Records by section and case; equal ones are written once, each on a line of its own."""
    shapes: list[str] = []
    places: dict[str, dict[str, int]] = {}
    for section, found in sections.items():
        places[section] = {}
        for name, kept in found.items():
            text = json.dumps(kept, separators=(",", ":"))
            if text not in shapes:
                shapes.append(text)
            places[section][name] = shapes.index(text)
    lines = ",\n".join(shapes)
    cases = json.dumps(places, indent=0)
    path.write_text(f'{{"shapes": [\n{lines}\n],\n"cases": {cases}}}\n')


def load(path: Path = RECORDED) -> dict[str, dict[str, Any]]:
    stored = json.loads(path.read_text())
    return {
        section: {name: stored["shapes"][place] for name, place in found.items()}
        for section, found in stored["cases"].items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("prefill")
    parser.add_argument("decode")
    parser.add_argument("--model", help="served model name (default: the first that /v1/models names)")
    parser.add_argument("--compare", nargs=2, metavar="URL", help="a second pair, to show differences with")
    options = parser.parse_args()
    model = options.model or send(options.decode, "/v1/models", method="GET").json["data"][0]["id"]
    found = contract(options.prefill, options.decode, model=model)
    if options.compare:
        second = options.model or send(options.compare[1], "/v1/models", method="GET").json["data"][0]["id"]
        lines = difference(found, contract(*options.compare, model=second))
        print("\n".join(lines) or f"{len(found)} cases, no difference")
    else:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
