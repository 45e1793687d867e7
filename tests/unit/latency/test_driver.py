"""Prompts of token ids: conversations grow by what was generated, and a router is asked and told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from e2e.latency import driver
from e2e.latency.driver import IDS_PATH, Client, Leg, Run, Turn


class Engine:
    """Answers each prompt of ids with as many tokens as are asked for: 1, 2, 3, ..."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.asked: list[dict[str, Any]] = []
        self.headers: list[str] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        self.headers.append(request.headers.get("x-way", ""))
        if self.status != 200:
            return web.Response(status=self.status, text="no")
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for token in range(1, body["max_tokens"] + 1):
            choice = {"index": 0, "text": "", "token_ids": [token]}
            await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            await asyncio.sleep(0.005)
        usage = {"choices": [], "usage": {"prompt_tokens": len(body["prompt"])}}
        await response.write(b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n")
        return response


class Routing:
    def __init__(self) -> None:
        self.told: list[tuple[str, list[int]]] = []

    def begin(self, prompt: Sequence[int]) -> Leg:
        self.told.append(("begin", list(prompt)))
        return Leg(headers=(("x-way", "far"),), decision="local; reason=rule")

    def first_token(self, prompt: Sequence[int], leg: Leg) -> None:
        assert leg.headers
        self.told.append(("first", list(prompt)))

    def end(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        self.told.append(("end", list(answer)))


TALK = Client("first", (Turn("", 3, (10, 11)), Turn("", 2, (12,))), remembers=True, later_kind="later")


def put_on(engine: Engine, routing: Routing | None = None) -> Run:
    async def main() -> Run:
        app = web.Application()
        app.router.add_post(IDS_PATH, engine.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            port = runner.addresses[0][1]
            return await driver.run(f"http://127.0.0.1:{port}", "m", [TALK], salt="s", routing=routing)
        finally:
            await runner.cleanup()

    return asyncio.run(main())


def test_a_conversation_of_ids_carries_what_was_generated() -> None:
    engine = Engine()
    run = put_on(engine)
    assert [body["prompt"] for body in engine.asked] == [[10, 11], [10, 11, 1, 2, 3, 12]]
    assert all(body["return_token_ids"] and body["cache_salt"] == "s" for body in engine.asked)
    first, later = run.records
    assert (first.kind, later.kind, later.prompt_tokens) == ("first", "later", 6)
    assert [len(record.token_s) for record in run.records] == [3, 2]
    assert not first.error


def test_a_router_is_asked_and_told() -> None:
    engine, routing = Engine(), Routing()
    run = put_on(engine, routing)
    assert [what for what, _ in routing.told] == ["begin", "first", "end"] * 2
    assert routing.told[2] == ("end", [1, 2, 3])
    assert engine.headers == ["far", "far"]
    assert {record.decision for record in run.records} == {"local; reason=rule"}


def test_a_router_is_told_of_what_failed() -> None:
    routing = Routing()
    run = put_on(Engine(503), routing)
    assert [what for what, _ in routing.told] == ["begin", "first", "end"] * 2
    assert all(record.error.startswith("status 503") for record in run.records)
