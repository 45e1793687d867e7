"""What a client may never set does not reach a real engine, wherever it is put and however it is spelled.

`{"kv_transfer_params": {"do_remote_prefill": true}}` alone ends a decode engine that it reaches. Each request here
names it in a place where some API of the engine reads it, with disaggregation on and off; afterwards the same
processes are alive, what reached the decode engine is free of it, and the client got its answer.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from e2e.asking import (
    APIS,
    CHAT,
    COMPLETIONS,
    GENERATE,
    Api,
    ask,
    eventually,
    local_text,
    prompt_for,
    request_body,
    text_of,
)
from e2e.pair import Pair, idle, paired
from tests.integration.client import Client, chunked

if TYPE_CHECKING:
    from e2e.rig import Rig
    from tests.integration.client import Answer
    from tests.integration.sidecar import Sidecar

DEADLY = {"do_remote_prefill": True}
FAR = {
    "do_remote_prefill": True,
    "remote_engine_id": "x",
    "remote_request_id": "x",
    "remote_host": "169.254.169.254",
    "remote_port": 80,
    "remote_block_ids": [[1, 2, 3]],
    "tp_size": 1,
}
HELD = {"do_remote_decode": True}
"""Makes an engine keep the blocks for a lease."""
FORBIDDEN = ("kv_transfer_params", "ec_transfer_params")

TOP = {
    "bare": {"kv_transfer_params": DEADLY},
    "aimed elsewhere": {"kv_transfer_params": FAR},
    "held": {"kv_transfer_params": HELD},
    "null": {"kv_transfer_params": None},
    "list": {"kv_transfer_params": [DEADLY]},
    "encoder": {"ec_transfer_params": {"x": FAR}},
    "both": {"kv_transfer_params": DEADLY, "ec_transfer_params": DEADLY},
    "in vllm_xargs": {"vllm_xargs": {"kv_transfer_params": "x", "ec_transfer_params": 1, "session_id": "7"}},
}
INSIDE = {
    "in extra_args": {"extra_args": {"kv_transfer_params": DEADLY, "ec_transfer_params": FAR}},
    "in extra_args, with others": {"extra_args": {"other": 1, "kv_transfer_params": FAR}},
}


def forged(api: Api, body: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """(how, the request as bytes) for every place and spelling."""
    for name, more in TOP.items():
        yield name, json.dumps({**body, **more}).encode()
    yield "first", json.dumps({"kv_transfer_params": DEADLY, **body}).encode()
    if api is GENERATE:
        for name, more in INSIDE.items():
            inner = {**body["sampling_params"], **more}
            yield name, json.dumps({**body, "sampling_params": inner}).encode()
            escaped = json.dumps({**body, "sampling_params": inner}).replace('"extra_args"', '"ext\\u0072a_args"')
            yield f"{name}, escaped", escaped.encode()
    plain = json.dumps({**body, "kv_transfer_params": DEADLY})
    yield "escaped", plain.replace("kv_transfer", "\\u006bv_tr\\u0061nsfer").encode()
    yield "escaped throughout", plain.replace("kv_transfer_params", _escaped("kv_transfer_params")).encode()
    bare = json.dumps(body)[:-1]
    deadly = json.dumps(DEADLY)
    yield "twice", f'{bare},"kv_transfer_params":null,"kv_transfer_params":{deadly}}}'.encode()
    yield "twice, escaped", f'{bare},"kv_transfer_params":{{}},"kv_transf\\u0065r_params":{deadly}}}'.encode()
    yield "with space", f'\r\n\t {bare} ,\n "kv_transfer_params" \t:\r {deadly}\n}} '.encode()


def _escaped(text: str) -> str:
    return "".join(f"\\u{ord(char):04x}" for char in text)


class Line:
    """A sidecar between the engines; what the decode engine gets is seen."""

    def __init__(self, pair: Pair, disagg: str) -> None:
        self.pair = pair
        self.tap = pair.tap(pair.decode)
        self.sidecar: Sidecar = pair.serve(decode_port=self.tap.port, disagg=disagg)
        self.remote = disagg == "on"

    def check_clean(self) -> None:
        """Nothing of a client's went by, and nothing at all with disaggregation off."""
        for passed in self.tap.seen:
            body = passed.json
            found = [
                *_named(body, without_own=self.remote),
                *_named(body.get("vllm_xargs")),
                *_named((body.get("sampling_params") or {}).get("extra_args")),
            ]
            assert not found, (passed.path, found)
        self.tap.seen.clear()
        assert self.pair.decode.healthy()
        assert self.pair.prefill.healthy()


def _named(value: Any, *, without_own: bool = False) -> list[str]:
    found = [key for key in FORBIDDEN if isinstance(value, dict) and key in value]
    if without_own and "kv_transfer_params" in found:
        # Ours is whole, and of the engine that was asked.
        ours = value["kv_transfer_params"]
        if isinstance(ours, dict) and str(ours.get("remote_host")).startswith("127.77."):
            found.remove("kv_transfer_params")
    return found


@pytest.fixture(scope="module", params=["off", "on"])
def line(rig: Rig, request: pytest.FixtureRequest) -> Iterator[Line]:
    with paired(rig.prefill[0], rig.decode[0]) as pair:
        line = Line(pair, request.param)
        yield line
        idle(line.sidecar)


@pytest.mark.parametrize("api", APIS, ids=str)
def test_on_every_api(line: Line, pair: Pair, api: Api) -> None:
    body = request_body(api, prompt_for(api, 100), 4)
    text = local_text(pair.decode, api, body)
    sessions = pair.decode.session, pair.prefill.session
    for how, forgery in forged(api, body):
        answer = ask(line.sidecar, api, forgery)
        assert text_of(answer) == text, how
        assert answer.decision.startswith("remote" if line.remote else "local"), how
        line.check_clean()
    assert (pair.decode.session, pair.prefill.session) == sessions


@pytest.mark.parametrize("shape", [COMPLETIONS, CHAT], ids=str)
def test_on_invocations(line: Line, pair: Pair, shape: Api) -> None:
    invocations = Api("invocations", "/invocations", shape.body)
    body = request_body(shape, prompt_for(shape, 100), 4)
    text = local_text(pair.decode, shape, body)
    for how, forgery in forged(shape, body):
        assert text_of(ask(line.sidecar, invocations, forgery)) == text, how
        line.check_clean()


BATCH = {"messages": [[{"role": "user", "content": "one"}], [{"role": "user", "content": "two"}]], "max_tokens": 2}
CHATTED = {"messages": [{"role": "user", "content": "one"}], "max_tokens": 2}
OTHER_PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions/batch": BATCH,
    "/v1/chat/completions/render": CHATTED,
    "/v1/completions/render": {"prompt": "one", "max_tokens": 2},
    "/v1/responses/render": {"input": "one", "max_output_tokens": 2},
    "/v1/messages/render": CHATTED,
    "/v1/messages/count_tokens": CHATTED,
    "/tokenize": {"prompt": "one"},
    "/generative_scoring": {"query": "one", "items": ["two"], "label_token_ids": [300, 301]},
}


@pytest.mark.parametrize("path", OTHER_PATHS)
def test_on_paths_that_are_only_relayed(line: Line, pair: Pair, path: str) -> None:
    api = Api(path, path, lambda _p, _n: {})
    body = {"model": "tiny", "temperature": 0, **OTHER_PATHS[path]}
    assert ask(line.sidecar, api, body).status == 200
    for how, forgery in forged(api, body):
        assert ask(line.sidecar, api, forgery).status == 200, how
        line.check_clean()


def _raw(path: str, body: bytes, *headers: str) -> bytes:
    lines = "".join(f"{header}\r\n" for header in ("Host: x", "Content-Type: application/json", *headers))
    return f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + body


def _with_length(path: str, body: bytes, *headers: str) -> bytes:
    return _raw(path, body, f"Content-Length: {len(body)}", *headers)


def test_by_every_way_that_a_body_can_be_sent(line: Line, pair: Pair) -> None:
    body = request_body(COMPLETIONS, prompt_for(COMPLETIONS, 100), 4)
    text = local_text(pair.decode, COMPLETIONS, body)
    deadly = json.dumps({**body, "kv_transfer_params": DEADLY}).encode()
    one_by_one = chunked(*(deadly[n : n + 7] for n in range(0, len(deadly), 7)))
    answered = {
        "chunked": _raw(COMPLETIONS.path, one_by_one, "Transfer-Encoding: chunked"),
        "gzip": _with_length(COMPLETIONS.path, gzip.compress(deadly), "Content-Encoding: gzip"),
        "a query": _with_length(f"{COMPLETIONS.path}?a=b", deadly),
        "a path in other letters": _with_length("/v1/%63ompletions", deadly),
        "an absolute target": _with_length(f"http://x{COMPLETIONS.path}", deadly),
    }
    for how, request in answered.items():
        with Client(("127.0.0.1", line.sidecar.port), timeout_s=60) as client:
            client.send(request)
            assert text_of(client.answer("POST")) == text, how
        line.check_clean()
    refused = {
        "UTF-16": json.dumps({**body, "kv_transfer_params": DEADLY}).encode("utf-16"),
        "UTF-32": json.dumps({**body, "kv_transfer_params": DEADLY}).encode("utf-32-le"),
        "a byte order mark": b"\xef\xbb\xbf" + deadly,
        "NaN beside it": deadly[:-1] + b',"x":NaN}',
        "a lone surrogate beside it": deadly[:-1] + b',"x":"\\ud800"}',
        "nested beyond reading": deadly[:-1] + b',"x":' + b"[" * 900 + b"]" * 900 + b"}",
    }
    for how, sent in refused.items():
        for path in (COMPLETIONS.path, "/invocations"):
            with Client(("127.0.0.1", line.sidecar.port), timeout_s=60) as client:
                client.send(_with_length(path, sent))
                answer = client.answer("POST")
            assert answer.status in (200, 400), (how, answer.body)
            line.check_clean()


@pytest.mark.parametrize("kind", ["", "text/plain", "multipart/form-data; boundary=x", "application/octet-stream"])
def test_under_another_content_type(line: Line, pair: Pair, kind: str) -> None:
    bodies = {
        **{api.path: request_body(api, prompt_for(api, 100), 2) for api in APIS},
        "/invocations": request_body(CHAT, prompt_for(CHAT, 100), 2),
        **{path: {"model": "tiny", **body} for path, body in OTHER_PATHS.items()},
    }
    for path, body in bodies.items():
        with Client(("127.0.0.1", line.sidecar.port), timeout_s=60) as client:
            deadly = json.dumps({**body, "kv_transfer_params": DEADLY}).encode()
            client.request("POST", path, deadly, [("Content-Type", kind)] if kind else [("Accept", "*/*")])
            status = client.answer("POST").status
        # The engine takes a body without a type for JSON, and refuses to read any other.
        assert status == (400 if kind else 200), path
        if kind:
            line.tap.seen.clear()
        line.check_clean()


def test_sent_to_an_engine_without_a_sidecar_it_ends_it(pair: Pair) -> None:
    """The reason for all of the above, shown once."""
    body = request_body(COMPLETIONS, prompt_for(COMPLETIONS, 100), kv_transfer_params=DEADLY)
    answer: Answer = ask(pair.decode, COMPLETIONS, body)
    assert answer.status == 500
    eventually(lambda: not pair.decode.alive())
