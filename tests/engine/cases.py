"""Requests that harm no engine: each API with what it takes, what it refuses and what it makes of the rest.

It must not know what is answered.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

_CHAT = [{"role": "user", "content": "Say something about rivers."}]
_TEXT = "The river runs down to the sea and"
_STREAM = {"stream": True}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
_CONTINUOUS = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


def completion(**more: Any) -> dict[str, Any]:
    return {"prompt": _TEXT, "max_tokens": 3, "temperature": 0, "ignore_eos": True, **more}


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": _CHAT, "max_tokens": 3, "temperature": 0, "ignore_eos": True, **more}


def responses(**more: Any) -> dict[str, Any]:
    return {"input": "Say something.", "max_output_tokens": 4, "temperature": 0, "ignore_eos": True, **more}


def messages(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": _CHAT, "max_tokens": 3, "temperature": 0, **more}


def generate(**more: Any) -> dict[str, Any]:
    sampling = {"max_tokens": 3, "temperature": 0, "ignore_eos": True, **more.pop("sampling", {})}
    return {"token_ids": [5, 6, 7, 8], "sampling_params": sampling, **more}


# Another one in each run, so that no prefix cache knows a prompt.
_RUN = uuid.uuid4().hex


# Long enough for several blocks of 32 tokens, whatever the tokeniser.
def long_prompt(number: int) -> str:
    return f"Chapter {number} of {_RUN}. " + " ".join(f"Stone {number} {i} lay in the river." for i in range(60))


SPLIT = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/inference/v1/generate")


def body_for(path: str, model: str, number: int, cap: int) -> dict[str, Any]:
    """A request with the `number`th long prompt and `cap` tokens of answer."""
    text = long_prompt(number)
    said = [{"role": "user", "content": text}]
    if path == "/v1/completions":
        return completion(model=model, prompt=text, max_tokens=cap)
    if path == "/v1/chat/completions":
        return chat(model=model, messages=said, max_tokens=cap)
    if path == "/v1/messages":
        return messages(model, messages=said, max_tokens=cap)
    if path == "/v1/responses":
        return responses(model=model, input=text, max_output_tokens=cap)
    return generate(model=model, token_ids=[5 + number, *range(100, 400)], sampling={"max_tokens": cap})


@dataclass(frozen=True)
class Case:
    name: str
    path: str
    body: Any = None
    method: str = "POST"
    headers: tuple[tuple[str, str], ...] = ()
    to: str = "decode"


def cases(model: str) -> list[Case]:
    """Requests that harm no engine. Names are unique."""
    prefill = {"kv_transfer_params": {"do_remote_decode": True}, "max_tokens": 1}
    text_plain = (("content-type", "text/plain"),)
    rank_7 = (("X-data-parallel-rank", "7"),)
    completions = {
        "plain": completion(),
        "model": completion(model=model),
        "unknown model": completion(model="no-such-model"),
        "unknown model stream": completion(model="no-such-model", **_STREAM),
        "stream": completion(**_STREAM),
        "stream usage": completion(**USAGE),
        "stream continuous usage": completion(**_CONTINUOUS),
        "token ids": completion(prompt=[5, 6, 7]),
        "several prompts": completion(prompt=["one river", "two rivers"]),
        "several prompts stream": completion(prompt=["one river", "two rivers"], max_tokens=1, **_STREAM),
        "nested ids": completion(prompt=[[5, 6], [7, 8]]),
        "two samples": completion(n=2, temperature=1),
        "two samples stream": completion(n=2, temperature=1, max_tokens=1, **_STREAM),
        "two samples greedy": completion(n=2),
        "return token ids": completion(return_token_ids=True),
        "return token ids stream": completion(return_token_ids=True, **_STREAM),
        "echo": completion(echo=True),
        "stop string": completion(stop=["no such string anywhere"]),
        "no prompt": {"max_tokens": 1},
        "null prompt": completion(prompt=None),
        "empty prompt": completion(prompt=""),
        "empty list": completion(prompt=[]),
        "prompt object": completion(prompt={"a": 1}),
        "prompt negative": completion(prompt=[-1]),
        "prompt out of vocabulary": completion(prompt=[2**31 + 5]),
        "prompt out of vocabulary stream": completion(prompt=[2**31 + 5], **_STREAM),
        "stream options without stream": completion(stream_options={"include_usage": True}),
        "null stream options": completion(stream_options=None),
        "min above max": completion(min_tokens=5),
        "min above max stream": completion(min_tokens=5, **_STREAM),
        "max_tokens 0": completion(max_tokens=0),
        "max_tokens null": completion(max_tokens=None),
        "max_tokens negative": completion(max_tokens=-1),
        "max_tokens string": completion(max_tokens="3"),
        "max_tokens word": completion(max_tokens="x"),
        "max_tokens fraction": completion(max_tokens=1.5),
        "max_tokens whole float": completion(max_tokens=2.0),
        "max_tokens beyond context": completion(max_tokens=2**30),
        "n 0": completion(n=0),
        "n null": completion(n=None),
        "temperature 3": completion(temperature=3),
        "temperature negative": completion(temperature=-1),
        "top_p 0": completion(top_p=0),
        "top_k -2": completion(top_k=-2),
        "min_p 2": completion(min_p=2),
        "presence_penalty 3": completion(presence_penalty=3),
        "repetition_penalty 0": completion(repetition_penalty=0),
        "stop empty": completion(stop=[""]),
        "stop number": completion(stop=5),
        "stream word": completion(stream="maybe"),
        "stream 1": completion(stream=1),
        "json_schema missing": completion(response_format={"type": "json_schema"}),
        "cache_salt": completion(cache_salt="abc"),
        "cache_salt empty": completion(cache_salt=""),
        "cache_salt bad": completion(cache_salt="a/b"),
        "cache_salt number": completion(cache_salt=5),
        "unknown field": completion(no_such_field={"a": 1}),
        "request_id": completion(request_id="mine"),
        "beam search stream": completion(use_beam_search=True, n=2, **_STREAM),
        "kv list": completion(kv_transfer_params=[]),
        "kv string": completion(kv_transfer_params="x"),
        "kv empty": completion(kv_transfer_params={}),
        "kv null": completion(kv_transfer_params=None),
        "kv unknown keys": completion(kv_transfer_params={"a": 1}),
        "xargs kv object": completion(vllm_xargs={"kv_transfer_params": {"a": 1}}),
        "xargs kv string": completion(vllm_xargs={"kv_transfer_params": "a"}),
        "xargs": completion(vllm_xargs={"a": "b", "c": 1, "d": ["e"]}),
        "xargs list": completion(vllm_xargs=[]),
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
        "plain": chat(),
        "unknown model": chat(model="no-such-model"),
        "stream": chat(**_STREAM),
        "stream usage": chat(**USAGE),
        "stream continuous usage": chat(**_CONTINUOUS),
        "two samples": chat(n=2, temperature=1),
        "two samples greedy": chat(n=2),
        "max_completion_tokens": chat(max_completion_tokens=2, max_tokens=2**30),
        "max_completion_tokens beyond": chat(max_completion_tokens=2**30),
        "max_tokens 0": chat(max_tokens=0),
        "max_tokens beyond": chat(max_tokens=2**30),
        "return token ids": chat(return_token_ids=True),
        "return token ids stream": chat(return_token_ids=True, **_STREAM),
        "return prompt text": chat(return_prompt_text=True),
        "no messages": {"max_tokens": 1},
        "empty messages": chat(messages=[]),
        "messages string": chat(messages="x"),
        "message list": chat(messages=[[]]),
        "parts": chat(messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}]),
        "stream options without stream": chat(stream_options={"include_usage": True}),
        "tool_choice without tools": chat(tool_choice="auto"),
        "tool_choice none": chat(tools=[_TOOL], tool_choice="none"),
        "tool_choice auto": chat(tools=[_TOOL]),
        "tool_choice unknown": chat(tools=[_TOOL], tool_choice={"type": "function", "function": {"name": "g"}}),
        "tools empty": chat(tools=[]),
        "top_logprobs without logprobs": chat(top_logprobs=2),
        "top_logprobs word": chat(top_logprobs="x"),
        "prompt_logprobs stream": chat(prompt_logprobs=1, **_STREAM),
        "continue and generate": chat(continue_final_message=True, add_generation_prompt=True),
        "reasoning_effort": chat(reasoning_effort="no-such"),
        "kv list": chat(kv_transfer_params=[]),
        "kv empty": chat(kv_transfer_params={}),
        "kv token ids": chat(kv_transfer_params={"prompt_token_ids": [5, 6, 7]}),
        "kv token ids, no messages": chat(messages=[], kv_transfer_params={"prompt_token_ids": [5, 6, 7]}),
        "kv token ids wrong": chat(kv_transfer_params={"prompt_token_ids": ["a"]}),
        "kv token ids empty": chat(kv_transfer_params={"prompt_token_ids": []}),
        "kv token ids out of vocabulary": chat(kv_transfer_params={"prompt_token_ids": [2**31 + 5]}),
        "broken json": b"{bad",
    }
    answers = {
        "plain": responses(),
        "stream": responses(**_STREAM),
        "unknown model": responses(model="no-such-model"),
        "instructions": responses(instructions="Be brief."),
        "items": responses(input=[{"role": "user", "content": "hi"}]),
        "item parts": responses(input=[{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]),
        "no input": {"max_output_tokens": 1},
        "input number": responses(input=5),
        "max_output_tokens 0": responses(max_output_tokens=0),
        "max_output_tokens beyond": responses(max_output_tokens=2**30),
        "max_output_tokens null": responses(max_output_tokens=None, stop=["e", "a", "o", "i"]),
        "tool_choice required": responses(tool_choice="required"),
        "prompt": responses(prompt={"id": "x"}),
        "background": responses(background=True),
        "background without store": responses(background=True, store=False),
        "store false": responses(store=False),
        "previous": responses(previous_response_id="resp_x"),
        "request_id": responses(request_id="resp_mine"),
        "kv list": responses(kv_transfer_params=[]),
        "kv empty": responses(kv_transfer_params={}),
        "temperature 3": responses(temperature=3),
    }
    anthropic = {
        "plain": messages(model),
        "stream": messages(model, **_STREAM),
        "unknown model": messages("no-such-model"),
        "unknown model stream": messages("no-such-model", **_STREAM),
        "system": messages(model, system="Be brief."),
        "blocks": messages(model, messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}]),
        "no max_tokens": {"model": model, "messages": _CHAT},
        "max_tokens 0": messages(model, max_tokens=0),
        "max_tokens beyond": messages(model, max_tokens=2**30),
        "no model": {"messages": _CHAT, "max_tokens": 1},
        "empty model": messages(""),
        "wrong role": messages(model, messages=[{"role": "robot", "content": "x"}]),
        "temperature 3": messages(model, temperature=3),
        "kv list": messages(model, kv_transfer_params=[]),
        "kv empty": messages(model, kv_transfer_params={}),
    }
    generates = {
        "plain": generate(),
        "text": generate(output_mode="text"),
        "stream": generate(**_STREAM),
        "stream usage": generate(**USAGE),
        "stream continuous usage": generate(**_CONTINUOUS),
        "return token ids stream": generate(return_token_ids=True, **_STREAM),
        "two samples": generate(sampling={"n": 2, "temperature": 1}),
        "unknown model": generate(model="no-such-model"),
        "no token ids": {"sampling_params": {}},
        "empty token ids": generate(token_ids=[]),
        "negative token ids": generate(token_ids=[-1]),
        "no sampling_params": {"token_ids": [5]},
        "max_tokens 0": generate(sampling={"max_tokens": 0}),
        "min above max": generate(sampling={"min_tokens": 9}),
        "out of vocabulary": generate(token_ids=[2**31 + 5]),
        "output_mode": generate(output_mode="x"),
        "kv list": generate(kv_transfer_params=[]),
        "kv empty": generate(kv_transfer_params={}),
        "extra_args empty": generate(sampling={"extra_args": {}}),
    }
    invoked = {
        "prompt": completion(),
        "messages": chat(),
        "stream": chat(**_STREAM),
        "neither": {"max_tokens": 1},
        "wrong": {"prompt": {"a": 1}},
        "unknown model": completion(model="no-such-model"),
        "kv list": completion(kv_transfer_params=[]),
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
        Case("completions with query", "/v1/completions?a=b", completion()),
        Case("completions percent-encoded", "/v1/%63ompletions", completion()),
        Case("completions with slash", "/v1/completions/", completion()),
        Case("completions with slash and query", "/v1/completions/?a=b", completion()),
        Case("completions with two slashes", "//v1/completions", completion()),
        Case("completions text/plain", "/v1/completions", completion(), headers=text_plain),
        Case("completions no type", "/v1/completions", completion(), headers=(("content-type", ""),)),
        Case(
            "completions charset",
            "/v1/completions",
            completion(),
            headers=(("content-type", "application/json; charset=utf-8"),),
        ),
        Case(
            "completions gzip",
            "/v1/completions",
            b"\x1f\x8b\x08\x00garbage",
            headers=(("content-encoding", "gzip"),),
        ),
        Case("completions rank 7", "/v1/completions", completion(), headers=rank_7),
        Case("completions rank 7 stream", "/v1/completions", completion(**_STREAM), headers=rank_7),
        Case("responses rank 7", "/v1/responses", responses(), headers=rank_7),
        Case(
            "completions rank word",
            "/v1/completions",
            completion(),
            headers=(("X-data-parallel-rank", "x"),),
        ),
        Case("completions close", "/v1/completions", completion(), headers=(("connection", "close"),)),
        Case("completions origin", "/v1/completions", completion(), headers=(("origin", "http://a.b"),)),
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
        Case("prefill completions", "/v1/completions", completion(**prefill), to="prefill"),
        Case("prefill chat", "/v1/chat/completions", chat(**prefill), to="prefill"),
        Case("prefill messages", "/v1/messages", messages(model, **prefill), to="prefill"),
        Case(
            "prefill responses",
            "/v1/responses",
            responses(max_output_tokens=1, kv_transfer_params={"do_remote_decode": True}),
            to="prefill",
        ),
        Case(
            "prefill generate",
            "/inference/v1/generate",
            generate(sampling={"max_tokens": 1}, kv_transfer_params={"do_remote_decode": True}),
            to="prefill",
        ),
        Case("prefill two tokens", "/v1/completions", completion(**{**prefill, "max_tokens": 2}), to="prefill"),
        Case("prefill stream", "/v1/completions", completion(**prefill, **_STREAM), to="prefill"),
        Case(
            "prefill two samples",
            "/v1/completions",
            completion(**{**prefill, "temperature": 1}, n=2),
            to="prefill",
        ),
        Case("prefill unknown model", "/v1/completions", completion(**prefill, model="none"), to="prefill"),
        Case("prefill min_tokens", "/v1/completions", completion(**prefill, min_tokens=2), to="prefill"),
        Case(
            "prefill short read-back",
            "/v1/completions",
            completion(
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
