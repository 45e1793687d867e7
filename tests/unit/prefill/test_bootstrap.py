"""The bootstrap server's word on a handoff: asked once for all who wait, reused briefly, dropped on a failure."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from sidecar.background import Background
from sidecar.connectors.connector import Handoff, Rejection
from sidecar.prefill.address import Address, AllowList
from sidecar.prefill.bootstrap import FRESH_S, BootstrapGate
from sidecar.prefill.endpoints import Endpoint, Endpoints
from tests.scarce import no_descriptors

QUICK_S = 0.3


def entry(engine_id: str) -> dict[str, Any]:
    return {"engine_id": engine_id, "worker_addr": {"0": {"0": "tcp://10.0.0.5:39337"}}}


class World:
    """A gate, an endpoint, and a bootstrap server that answers as the test says."""

    def __init__(self, gate: BootstrapGate, server: TestServer) -> None:
        self.gate, self.server = gate, server
        self.clock = 100.0
        self.asked = 0
        self.answer: Any = {"0": entry("one"), "1": entry("two")}
        self.status = 200
        self.delay_s = 0.0
        self.pause_s = 0.0
        """In the middle of the answer."""
        self.endpoint = Endpoint(Address("127.0.0.1", 8000), configured=True)

    async def reply(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        await asyncio.sleep(self.delay_s)
        text = self.answer if isinstance(self.answer, str) else json.dumps(self.answer)
        if self.pause_s:
            response = web.StreamResponse(headers={"content-length": str(len(text))})
            await response.prepare(request)
            await response.write(text[:20].encode())
            await asyncio.sleep(self.pause_s)
            await response.write(text[20:].encode())
            return response
        return web.Response(status=self.status, text=text, headers={"location": "/elsewhere"})

    async def admit(self, rank: int = 0) -> Handoff | Rejection:
        found: asyncio.Future[Handoff | Rejection] = asyncio.get_running_loop().create_future()
        params = b'{"do_remote_prefill":true,"transfer_id":"x"}'
        handoff = Handoff(params, 40, host="127.0.0.1", port=self.server.port or 0, rank=rank, blocks=3)
        self.gate.admit(self.endpoint, handoff, found.set_result)
        return await found


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    app = web.Application()
    holder: list[World] = []

    async def reply(request: web.Request) -> web.StreamResponse:
        return await holder[0].reply(request)

    app.router.add_get("/query", reply)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        gate = BootstrapGate(Background(), session, QUICK_S, lambda: holder[0].clock)
        holder.append(World(gate, server))
        yield holder[0]


def run(test: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        async with world() as one:
            await test(one)

    asyncio.run(main())


def engine_of(result: Handoff | Rejection) -> str:
    assert isinstance(result, Handoff), result
    assert json.loads(result.params)["remote_engine_id"] == result.engine_id
    return result.engine_id


def test_nobody_is_to_blame_where_we_can_ask_nobody() -> None:
    async def test(one: World) -> None:
        with no_descriptors():
            result = await one.admit()
        assert isinstance(result, Rejection)
        assert result.fault == "unverifiable"
        assert engine_of(await one.admit()) == "one"

    run(test)


def test_the_engine_of_each_rank() -> None:
    async def test(one: World) -> None:
        assert [engine_of(await one.admit(rank)) for rank in (0, 1, 0)] == ["one", "two", "one"]
        assert one.asked == 1
        unknown = await one.admit(2)
        assert isinstance(unknown, Rejection)
        assert unknown.fault == "side_channel_dead"

    run(test)


def test_an_answer_in_several_packets() -> None:
    """That of an engine with many ranks and workers is."""

    async def test(one: World) -> None:
        one.pause_s = 0.02
        assert engine_of(await one.admit(1)) == "two"

    run(test)


def test_one_question_for_all_who_wait() -> None:
    async def test(one: World) -> None:
        one.delay_s = 0.05
        assert {engine_of(result) for result in await asyncio.gather(*[one.admit() for _ in range(20)])} == {"one"}
        assert one.asked == 1

    run(test)


def test_asked_again_when_it_is_old() -> None:
    """An engine that comes back is another one."""

    async def test(one: World) -> None:
        await one.admit()
        one.answer = {"0": entry("three")}
        one.clock += FRESH_S - 0.01
        assert engine_of(await one.admit()) == "one"
        one.clock += 0.02
        assert engine_of(await one.admit()) == "three"

    run(test)


def test_asked_again_after_a_failure_of_the_endpoint() -> None:
    async def test(one: World) -> None:
        await one.admit()
        one.answer = {"0": entry("three")}
        Endpoints([], AllowList([]), lambda: 0.0).failed(one.endpoint, at_once=False, trial=0)
        assert engine_of(await one.admit()) == "three"

    run(test)


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        ({"status": 500}, "/query says 500"),
        ({"status": 302}, "/query says 302"),
        ({"answer": "no JSON"}, "something else"),
        ({"answer": {"0": {}}}, "something else"),
        ({"answer": {"0": {"engine_id": 7}}}, "something else"),
        ({"answer": {}}, "knows no rank 0"),
        ({"answer": {"zero": entry("x")}}, "knows no rank 0"),
        ({"answer": {"²": entry("x")}}, "knows no rank 0"),  # a digit, and no number to Python
        ({"answer": {"0": entry("")}}, "knows no rank 0"),
        ({"delay_s": 5.0}, "does not answer within 0.3 s"),
    ],
)
def test_what_it_may_say_instead(change: dict[str, Any], detail: str) -> None:
    async def test(one: World) -> None:
        for name, value in change.items():
            setattr(one, name, value)
        result = await one.admit()
        assert isinstance(result, Rejection)
        assert result.fault == "side_channel_dead"
        assert detail in result.detail
        one.answer, one.status, one.delay_s = {"0": entry("one")}, 200, 0.0
        one.clock += FRESH_S
        assert engine_of(await one.admit()) == "one"  # nothing of it is remembered

    run(test)


def test_nobody_is_there() -> None:
    async def test(one: World) -> None:
        await one.server.close()
        result = await one.admit()
        assert isinstance(result, Rejection)
        assert "--mooncake-bootstrap-port" in result.detail

    run(test)
