"""Handoffs that hang engines or kill them, what dies along, and what frees blocks: a script for a pair of engines.

Run against real engines and simulated ones, the records must be equal. Knows nothing of the simulation.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec
import zmq

from tests.engine.cases import SPLIT, body_for, completion, long_prompt
from tests.engine.contract import first_model, meet, prefill_of
from tests.engine.record import record, send

DEATH_SECONDS = 1.5
DEATH_AFTER_SECONDS = 1.5  # ten long answers are on their way then
# Blocks that are released are free within a third of a second.
RELEASE_SECONDS = 1.5
# An answer that takes longer than this is none. A cold handshake with a dead side channel takes 5 s.
HANG_SECONDS = 3.0


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
        body = completion(prompt=prompt(own) if prompt else own, max_tokens=8, kv_transfer_params=params)
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
    model = first_model(pair.decode_url)
    found: dict[str, Any] = {}

    def ask(path: str, mode: str) -> None:
        body = body_for(path, model, 500 + SPLIT.index(path), 7000)
        if mode == "stream":
            body["stream"] = True
        found[f"{path} {mode}"] = record(send(pair.decode_url, path, body))

    asked = [threading.Thread(target=ask, args=(path, mode)) for path in SPLIT for mode in ("whole", "stream")]
    for thread in asked:
        thread.start()
    time.sleep(DEATH_AFTER_SECONDS)
    killer = completion(kv_transfer_params={"do_remote_prefill": True})
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
        first = send(pair.prefill_url, path, {**body_for(path, model, number, 1), **flag})
        params = first.json["kv_transfer_params"]
        held = _settles(lambda: _used(pair.prefill_url) > free_before)
        act(path, {**body_for(path, model, number, 4), "kv_transfer_params": params})
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

    model = first_model(pair.decode_url)
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
