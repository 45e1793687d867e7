"""The warm-up of a pair: one tiny request, a few attempts, and no say in what is used."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Self

import aiohttp
import pytest

from sidecar.connectors import CONNECTORS
from sidecar.connectors.connector import EngineFacts, Handoff, Rejection
from sidecar.prefill import warmup
from sidecar.prefill.address import AllowList, parse
from sidecar.prefill.endpoints import Endpoint, Endpoints
from sidecar.prefill.warmup import MAX_ATTEMPTS, PAUSE_S, PROMPT_TOKENS, TRIAL_EVERY_S, WarmUp
from tests.unit import clock
from tests.unit.handoffs import BLOCK_SIZE, ENGINE_ID, answer, params

GOOD = answer(params(remote_block_ids=[[7]]), prompt_tokens=PROMPT_TOKENS)


class Response:
    """What an engine answers, as an aiohttp response."""

    peer_host = ""

    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        self.body = body
        self.content = self

    async def iter_any(self) -> AsyncIterator[bytes]:
        yield self.body

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None


class Flood(Response):
    """An answer that never ends."""

    given = 0

    def __init__(self) -> None:
        super().__init__(200, b" " * 65536)

    async def iter_any(self) -> AsyncIterator[bytes]:
        while True:
            self.given += len(self.body)
            assert self.given < 64 << 20, "it is all read"
            yield self.body


class World:
    """Two engines, a gate and a session that reaches them."""

    def __init__(self, ranks: int = 1) -> None:
        self.endpoints = Endpoints([parse("10.0.0.5:8000")], AllowList([]), lambda: 0.0)
        [self.endpoint] = self.endpoints
        self.endpoint.facts = EngineFacts(BLOCK_SIZE, 1000, ENGINE_ID)
        self.prefill: Response | Exception = Response(200, GOOD)
        self.decode: Response | Exception = Response(200, b"{}")
        self.rejection: Rejection | None = None
        self.posted: list[tuple[str, dict[str, Any]]] = []
        self.outcomes: list[str] = []
        self.wanted = True
        self.found = ""
        """Engine id of the engine that `admit` finds where nothing answered before."""
        self.warm_up = WarmUp(
            self,  # type: ignore[arg-type]
            CONNECTORS["nixlv2"],
            self,
            engine_urls=[f"http://127.0.0.1:{8200 + rank}" for rank in range(ranks)],
            engine_session=self,  # type: ignore[arg-type]
            engine_block_size=lambda: BLOCK_SIZE,
            timeout_s=5.0,
            counted=self.outcomes.append,
        )

    def post(self, url: str, *, data: bytes, **options: Any) -> Response:
        assert options["allow_redirects"] is False
        self.posted.append((url, json.loads(data)))
        result = self.decode if "127.0.0.1" in url else self.prefill
        if isinstance(result, Exception):
            raise result
        return result

    def admit(self, _endpoint: Endpoint, handoff: Handoff, admitted: Callable[[Handoff | Rejection], None]) -> None:
        if self.found:
            self.endpoint.blocked, self.endpoint.facts = "", EngineFacts(BLOCK_SIZE, 1000, self.found)
        admitted(self.rejection or handoff.via("127.77.0.1", 5601))


def run(main: Callable[[World], Awaitable[None]], monkeypatch: pytest.MonkeyPatch, ranks: int = 1) -> None:
    async def within() -> None:
        world = World(ranks)
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(warmup.time, "monotonic", loop.time)
        task = asyncio.create_task(world.warm_up.run(world.endpoints, lambda: world.wanted))
        await main(world)
        assert not task.done(), "the warm-up has ended for good"
        task.cancel()

    clock.run(within())


def test_one_request_through_the_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(world: World) -> None:
        assert world.warm_up.is_cold(world.endpoint)
        await asyncio.sleep(100)
        assert world.outcomes == ["warm"]
        assert not world.warm_up.is_cold(world.endpoint)
        (prefill_url, prefill), (decode_url, decode) = world.posted
        assert prefill_url == "http://10.0.0.5:8000/v1/completions"
        assert decode_url == "http://127.0.0.1:8200/v1/completions"
        assert prefill["kv_transfer_params"]["do_remote_decode"] is True
        assert decode["kv_transfer_params"] == {
            **params(remote_block_ids=[[7]]),
            "remote_host": "127.77.0.1",
            "remote_port": 5601,
        }
        for body in (prefill, decode):
            assert len(body["prompt"]) == PROMPT_TOKENS
            assert body["max_tokens"] == 1

    run(main, monkeypatch)


@pytest.mark.parametrize(
    ("outcome", "spoil"),
    [
        ("prefill_failed", {"prefill": Response(503, b"")}),
        ("prefill_failed", {"prefill": aiohttp.ClientConnectionError("refused")}),
        ("prefill_failed", {"prefill": TimeoutError()}),
        ("no_handoff", {"prefill": Response(200, b"nonsense")}),
        ("no_handoff", {"prefill": Response(200, b"\xff")}),
        ("no_handoff", {"prefill": Response(200, answer(...))}),
        ("no_handoff", {"prefill": Response(200, answer(params(remote_host="127.0.0.1")))}),
        ("no_handoff", {"prefill": Response(200, answer(params(remote_block_ids=[[]]), prompt_tokens=8))}),
        ("not_admitted", {"rejection": Rejection("incompatible", "x")}),
        ("prefill_failed", {"prefill": Flood()}),
        ("decode_failed", {"decode": Response(500, b"")}),
        ("decode_failed", {"decode": Flood()}),
        ("decode_failed", {"decode": TimeoutError()}),
        ("decode_failed", {"decode": OSError()}),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else "",
)
def test_failures_are_tried_again_a_few_times(
    outcome: str, spoil: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(world: World) -> None:
        for name, value in spoil.items():
            setattr(world, name, value)
        await asyncio.sleep(PAUSE_S - 1)
        assert world.outcomes == [outcome]
        assert not world.warm_up.is_cold(world.endpoint), "readiness waits for one attempt, not for success"
        await asyncio.sleep(PAUSE_S * (MAX_ATTEMPTS + 3))
        assert world.outcomes == [outcome] * MAX_ATTEMPTS
        assert world.endpoint.breaker._failures == 0, "requests will tell"

    run(main, monkeypatch)


def test_failure_that_nobody_thought_of(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(world: World) -> None:
        world.prefill = RuntimeError("bug")
        await asyncio.sleep(PAUSE_S - 1)
        world.prefill = Response(200, GOOD)
        await asyncio.sleep(PAUSE_S * 2)
        assert world.outcomes[-1] == "warm"

    run(main, monkeypatch)


def test_engine_that_takes_the_place_of_another_is_warmed_up_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 10."""

    async def main(world: World) -> None:
        await asyncio.sleep(1)
        world.endpoint.facts = EngineFacts(BLOCK_SIZE, 1000, "another")
        assert world.warm_up.is_cold(world.endpoint)
        await asyncio.sleep(1)
        assert world.outcomes == ["warm", "warm"]

    run(main, monkeypatch)


@pytest.mark.parametrize("new_pairs", [True, False])
def test_dead_side_channel_is_looked_for(new_pairs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once and then now and then, for as long as it takes; when it is found this was the pair's warm-up."""

    async def main(world: World) -> None:
        world.warm_up._new_pairs = new_pairs
        world.endpoint.blocked = "side_channel_dead"
        world.rejection = Rejection("side_channel_dead", "x")
        await asyncio.sleep(TRIAL_EVERY_S * 9.5)
        assert world.outcomes == ["not_admitted"] * 10
        world.rejection, world.found = None, "another"
        await asyncio.sleep(TRIAL_EVERY_S * 4)
        assert world.outcomes == ["not_admitted"] * 10 + ["warm"]
        world.endpoint.blocked = "side_channel_dead"
        await asyncio.sleep(1)
        assert world.outcomes[11:] == ["warm"], "it is dead again: at once"

    run(main, monkeypatch)


@pytest.mark.parametrize("why", ["unknown", "blocked", "unwanted"])
def test_who_is_not_warmed_up(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(world: World) -> None:
        if why == "unknown":
            world.endpoint.facts = EngineFacts()
        world.endpoint.blocked = "incompatible" if why == "blocked" else ""
        world.wanted = why != "unwanted"
        await asyncio.sleep(100)
        assert world.posted == []
        assert world.warm_up.is_cold(world.endpoint) is (why == "unwanted")

    run(main, monkeypatch)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "MAX_REMEMBERED", 10)

    async def main(world: World) -> None:
        for number in range(50):
            world.endpoint.facts = EngineFacts(BLOCK_SIZE, 1000, f"engine {number}")
            await asyncio.sleep(1)
        assert len(world.warm_up._attempts) == 10

    run(main, monkeypatch)


def test_every_local_rank_connects_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a handoff of its own each: one is used once."""

    async def main(world: World) -> None:
        await asyncio.sleep(100)
        assert world.outcomes == ["warm"]
        decode = [url for url, _ in world.posted if "127.0.0.1" in url]
        assert decode == [f"http://127.0.0.1:{port}/v1/completions" for port in (8200, 8201, 8202)]
        assert len(world.posted) == 6

    run(main, monkeypatch, ranks=3)
