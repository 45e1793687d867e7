"""What becomes of requests in trouble: the sidecar beside vllm-router and smg, on simulated engines.

    python -m e2e.bench.troubles            # plays and prints
    python -m e2e.bench.troubles --write    # and writes docs/bench/troubles.md

Each trouble gets fresh engines and a fresh router with its own defaults (proxies.py). What is noted is what the
client got and whether the decode engine lives; nothing is judged here.
"""

from __future__ import annotations

import argparse
import datetime
import json
import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e import machine
from e2e.bench.install import WHEELS, install
from e2e.bench.proxies import SPECS, NotReadyError, Proxy
from e2e.ending import end_what_was_started
from e2e.rounds import table
from tests.engine import Fault, ThreadedEngine
from tests.integration.client import Answer, Client, Cut
from tests.integration.sidecar import chat

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "bench" / "troubles.md"
ROUTERS = ("sidecar", "vllm-router", "smg")
PLAIN_HANDS = ("smg",)
"""Routers that send these engines no handoff."""
TRIES = 20
PATIENCE_S = 15.0
"""A client that waits longer has left."""
PATH = "/v1/chat/completions"
EVIL = {"do_remote_prefill": True}
"""What a client may not set: a real decode engine dies of it."""


def fresh_chat() -> dict[str, Any]:
    """A request whose prompt no engine has in its cache."""
    body = chat()
    body["messages"][0]["content"] = f"{secrets.token_hex(8)} {body['messages'][0]['content']}"
    return body


@dataclass
class Stage:
    """One router between two engines."""

    proxy: Proxy
    prefill: ThreadedEngine
    decode: ThreadedEngine

    def ask(self, body: dict[str, Any] | None = None) -> str:
        """One request, and what its client got."""
        body = body or fresh_chat()
        headers = list(self.proxy.spec.headers(self.proxy.place).items())
        began = time.monotonic()
        try:
            with Client(("127.0.0.1", self.proxy.place.port), timeout_s=PATIENCE_S) as client:
                client.request("POST", PATH, body, headers)
                answer = client.answer("POST")
        except TimeoutError:
            return f"nothing within {PATIENCE_S:g} s"
        except Cut as cut:
            return f"{cut.answer.status}, cut"
        except ConnectionError:
            return "the connection was closed"
        said = f"{answer.status}{self._text(answer, body)}"
        seconds = time.monotonic() - began
        return f"{said} after {seconds:.1f} s" if seconds > 1 else said

    def pulls(self) -> bool:
        """Whether the KV of one request crosses. On a busy machine the first may not."""
        before = self.decode.counter("prompt_tokens_external_kv_transfer")
        self.ask()
        return bool(self.decode.counter("prompt_tokens_external_kv_transfer") > before)

    def _text(self, answer: Answer, body: dict[str, Any]) -> str:
        if answer.status != 200:
            return ""
        try:
            text = answer.text
        except (AssertionError, ValueError):
            return ", not a whole answer"
        if '"error"' in answer.body.decode(errors="replace"):
            return ", an error inside"
        with Client(("127.0.0.1", self.decode.port)) as client:
            client.request("POST", PATH, {key: value for key, value in body.items() if key in PLAIN})
            expected = client.answer("POST")
        return ", right text" if expected.status == 200 and text == expected.text else ", wrong text"


PLAIN = ("model", "messages", "max_tokens")


def _lost(stage: Stage, change: Callable[[dict[str, Any]], Any]) -> None:
    stage.prefill.fault(Fault(handoff=change))


def untroubled(stage: Stage) -> str:
    """none"""
    before = stage.decode.counter("prompt_tokens_external_kv_transfer")
    said = stage.ask()
    pulled = stage.decode.counter("prompt_tokens_external_kv_transfer") - before
    return f"{said}; {pulled:.0f} tokens pulled"


def refused(stage: Stage) -> str:
    """the prefill engine is gone"""
    stage.prefill.kill()
    return stage.ask()


def unavailable(stage: Stage) -> str:
    """prefill answers 503"""
    stage.prefill.fault(Fault(status=503), when=_posts)
    return stage.ask()


def silent(stage: Stage) -> str:
    """prefill accepts and never answers"""
    stage.prefill.freeze()
    try:
        return stage.ask()
    finally:
        stage.prefill.thaw()


def no_handoff(stage: Stage) -> str:
    """prefill answers 200 without a handoff, ten times: prefills paid for in vain"""
    stage.prefill.fault(Fault(handoff_absent=True))
    before = len(_prompts(stage.prefill))
    said = [stage.ask() for _ in range(10)]
    return f"{said[-1]}; {len(_prompts(stage.prefill)) - before} in vain"


def no_blocks(stage: Stage) -> str:
    """the handoff has no block ids"""
    _lost(stage, lambda handoff: {key: value for key, value in handoff.items() if key != "remote_block_ids"})
    return stage.ask()


def half_a_handoff(stage: Stage) -> str:
    """the handoff does not say where from"""
    _lost(stage, lambda handoff: {key: value for key, value in handoff.items() if key != "remote_host"})
    return stage.ask()


def too_few_blocks(stage: Stage) -> str:
    """the handoff has fewer blocks than the prompt needs"""
    _lost(stage, lambda handoff: {**handoff, "remote_block_ids": [handoff["remote_block_ids"][0][:1]]})
    return stage.ask()


def side_channel_dead(stage: Stage) -> str:
    """prefill's side channel is dead, its `/health` well"""
    stage.decode.forget_peers()
    stage.prefill.break_side_channel()
    return stage.ask()


def load_fails(stage: Stage) -> str:
    """decode cannot load the KV (vLLM's policy `fail`), streamed"""
    stage.decode.faults.once(Fault(error_event_first=True), path=PATH)
    return stage.ask(chat(stream=True))


def client_made(stage: Stage) -> str:
    """a client sends a handoff of its own, on a path that is not split"""
    body = {**chat(), "kv_transfer_params": EVIL}
    with Client(("127.0.0.1", stage.proxy.place.port), timeout_s=PATIENCE_S) as client:
        try:
            client.request("POST", "/v1/responses", {"model": "sim", "input": "x", "kv_transfer_params": EVIL})
            first = str(client.answer("POST").status)
        except (OSError, AssertionError) as error:
            first = type(error).__name__
    return f"{first}, then {stage.ask(body)}"


def breaks_off(stage: Stage) -> str:
    """decode breaks off in mid-stream"""
    stage.decode.fault(Fault(cut_after_events=3), when=_posts)
    return stage.ask(chat(stream=True))


def bytes_kept(stage: Stage) -> str:
    """decode's body: order of keys, large integers, floats as the client wrote them"""
    body = ('{"zeta": {"b": 1, "a": 2.50}, "seed": 9007199254740993, ' + json.dumps(chat())[1:]).encode()
    stage.decode.requests.clear()
    with Client(("127.0.0.1", stage.proxy.place.port), timeout_s=PATIENCE_S) as client:
        client.request("POST", PATH, body, list(stage.proxy.spec.headers(stage.proxy.place).items()))
        client.answer("POST")
    got = next((one.body for one in stage.decode.requests if one.method == "POST"), b"")
    kept = [b'"b": 1' in got or b'"b":1' in got, b"9007199254740993" in got, b"2.50" in got]
    order = got.find(b'"b"') < got.find(b'"a"')
    names = [name for name, ok in zip(("unknown fields", "integers", "floats"), kept, strict=True) if ok]
    return ", ".join([*names, *(["order"] if order and kept[0] else [])]) or "none of them"


HANDOFFS = (no_handoff, no_blocks, half_a_handoff, too_few_blocks, side_channel_dead, load_fails)
"""Nothing to be learnt from a router that sends none."""
TROUBLES = (
    untroubled,
    refused,
    unavailable,
    silent,
    no_handoff,
    no_blocks,
    half_a_handoff,
    too_few_blocks,
    side_channel_dead,
    load_fails,
    client_made,
    breaks_off,
    bytes_kept,
)


def _posts(received: Any) -> bool:
    return bool(received.method == "POST")


def _prompts(engine: ThreadedEngine) -> list[Any]:
    return [one for one in list(engine.requests) if one.method == "POST"]


def play(router: str, trouble: Callable[[Stage], str], binary: Path, folder: Path) -> str:
    """One trouble with one router."""
    with ExitStack() as stack:
        prefill, decode = (stack.enter_context(ThreadedEngine()) for _ in range(2))
        proxy = Proxy(SPECS[router], binary, 0, (prefill.port, decode.port), folder)
        stack.callback(proxy.close)
        try:
            proxy.wait_ready(json.dumps(chat()).encode())
        except NotReadyError as error:
            return f"not ready: {error}"
        stage = Stage(proxy, prefill, decode)
        if router not in PLAIN_HANDS and not any(stage.pulls() for _ in range(TRIES)):
            return "no KV crossed before the trouble: nothing to be seen"
        said = trouble(stage)
        cause = decode.cause_of_death
        return f"{said}; **the decode engine is dead**" if cause else said


def report(cells: dict[str, dict[str, str]], described: dict[str, Any], started: str) -> str:
    """Markdown."""
    rows = [[name, *(row.get(router, "-") for router in ROUTERS)] for name, row in cells.items()]
    versions = ", ".join(requirement for name, requirement in WHEELS.items() if name in ROUTERS)
    return "\n".join(
        [
            "# Requests in trouble",
            "",
            f"Written by `python -m e2e.bench.troubles --write`; do not edit. Taken {started}, revision",
            f"{described['revision']}; {versions}.",
            "",
            "Simulated engines (`tests/engine`), which hang and die of the handoffs that vLLM 0.32 hangs and dies",
            "of; each cell has fresh engines and a fresh router with its own defaults, and one prefill engine (so",
            "retrying elsewhere, which smg and the sidecar do, helps nobody). What is noted is what the client got",
            f"within {PATIENCE_S:g} s, and whether the decode engine lives. smg learns the connector from labels",
            "or over gRPC and sends these engines no handoff, so nothing is said of what it would do with one.",
            "",
            *table(["trouble", *ROUTERS], rows),
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m e2e.bench.troubles", description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"write docs/bench/{DOCUMENT.name}")
    parser.add_argument("--router", action="append", choices=ROUTERS, help="only this one (repeatable)")
    options = parser.parse_args()
    started = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    described = machine.describe({}, sys.executable)
    peers = install([peer for router in ROUTERS if (peer := SPECS[router].peer)])
    cells: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for trouble in TROUBLES:
            name = " ".join((trouble.__doc__ or "").split())
            for router in options.router or ROUTERS:
                if router in PLAIN_HANDS and trouble in HANDOFFS:
                    continue
                peer = SPECS[router].peer
                if peer in peers.absent:
                    cells.setdefault(name, {})[router] = "not installed"
                    continue
                binary = peers.binaries[peer] if peer else Path()
                where = Path(folder) / f"{trouble.__name__}-{router}"
                cells.setdefault(name, {})[router] = play(router, trouble, binary, where)
                print(f"{name} | {router}: {cells[name][router]}", flush=True)
    if options.write:
        DOCUMENT.write_text(report(cells, described, started), encoding="utf-8")
    return 0


if __name__ == "__main__":
    end_what_was_started()
    sys.exit(main())
