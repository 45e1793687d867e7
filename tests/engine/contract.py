"""One script of requests for a pair of engines, and a record of what came back.

Run against real engines and simulated ones, the records must be equal: that is what keeps the simulation honest.
What hangs engines or kills them is in harms.py. Knows nothing of the simulation.

    python -m tests.engine.contract http://127.0.0.1:8100 http://127.0.0.1:8200
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from tests.engine.cases import SPLIT, USAGE, body_for, cases, completion, long_prompt
from tests.engine.record import Reply, difference, record, send


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


def first_model(url: str) -> str:
    name: str = send(url, "/v1/models", method="GET").json["data"][0]["id"]
    return name


def prefill_of(prefill_url: str, prompt: str, **more: Any) -> Reply:
    body = completion(prompt=prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True}, **more)
    return send(prefill_url, "/v1/completions", body)


def _text(reply: Reply) -> Any:
    return reply.json["choices"][0]["text"] if reply.status == 200 else None


def meet(prefill_url: str, decode_url: str) -> None:
    """The first handoff between two engines; the handshake may take its time."""
    params = prefill_of(prefill_url, long_prompt(0)).json["kv_transfer_params"]
    send(decode_url, "/v1/completions", completion(prompt=long_prompt(0), kv_transfer_params=params))


def handoffs(prefill_url: str, decode_url: str) -> dict[str, Any]:
    """What happens to handoffs that kill nobody, and whether the text is that of the own prompt."""
    found: dict[str, Any] = {}
    meet(prefill_url, decode_url)

    def tried(name: str, number: int, change: Callable[[dict[str, Any]], Any], **more: Any) -> None:
        prompt = long_prompt(number)
        expected = _text(send(prefill_url, "/v1/completions", completion(prompt=prompt, max_tokens=8)))
        reply = prefill_of(prefill_url, prompt)
        params = change(reply.json["kv_transfer_params"])
        body = completion(prompt=prompt, max_tokens=8, kv_transfer_params=params)
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
    tried("good stream", 2, lambda params: params, **USAGE)
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
                first = send(prefill_url, path, {**body_for(path, model, number, 1), **flag})
                params = change(first.json["kv_transfer_params"])
                body = {**body_for(path, model, number, 4), "kv_transfer_params": params}
                if mode == "stream":
                    body["stream"] = True
                found[f"{path} handoff {kind} {mode}"] = record(send(decode_url, path, body))
    return found


# -- by hand


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
