"""Readiness: the engine's health with patience, draining at once, and prefill never (case 37)."""

import asyncio
import logging

import pytest

from sidecar.admin.health import FACTS_EVERY_S, FAILURES_TO_UNREADY, Health
from sidecar.connectors.connector import EngineFacts
from sidecar.decision.guards import Mode
from sidecar.edge.service import Live
from tests.unit import clock
from transport.descriptors import OutOfDescriptors


class Rank:
    """`EngineProbe` of one rank."""

    def __init__(self) -> None:
        self.problem = ""
        self.error: Exception | None = None
        self.told = EngineFacts(16, 1000)
        self.asked_for_facts = 0

    async def healthy(self, _timeout_s: float) -> str:
        if self.error is not None:
            raise self.error
        return self.problem

    async def facts(self, _timeout_s: float) -> EngineFacts:
        self.asked_for_facts += 1
        return self.told


class World:
    def __init__(self, ranks: int = 1) -> None:
        self.live = Live(Mode.AUTO)
        self.ranks = [Rank() for _ in range(ranks)]
        self.wait_for = ""
        self.health = Health(self.live, self.ranks, lambda _seconds: self.wait_for)  # type: ignore[arg-type]

    def look(self, times: int = 1) -> str:
        async def main() -> None:
            for _ in range(times):
                await self.health._look()

        clock.run(main())
        return self.health.problem


def test_not_ready_before_the_engine_is() -> None:
    world = World()
    assert world.health.problem
    assert not world.health.engine_is_up
    world.ranks[0].problem = "Connection refused"
    assert world.look() == "decode engine: Connection refused"
    world.ranks[0].problem = ""
    assert world.look() == ""
    assert world.health.engine_is_up


def test_an_engine_that_cannot_be_asked_is_what_it_was() -> None:
    world = World()
    world.look()
    world.ranks[0].error = OutOfDescriptors("raise the limit")
    assert world.look(FAILURES_TO_UNREADY + 1) == ""
    assert world.health.engine_is_up


def test_one_slow_probe_is_forgiven() -> None:
    world = World()
    world.look()
    world.ranks[0].problem = "/health does not answer within 5 s"
    assert world.look(FAILURES_TO_UNREADY - 1) == ""
    assert world.look() == "decode engine: /health does not answer within 5 s"
    world.ranks[0].problem = ""
    assert world.look() == ""
    world.ranks[0].problem = "slow"
    assert world.look(FAILURES_TO_UNREADY - 1) == "", "the count starts anew"


def test_every_rank_counts() -> None:
    world = World(ranks=3)
    world.ranks[2].problem = "gone"
    assert world.look(5) != ""
    world.ranks[2].problem = ""
    assert world.look() == ""


def test_draining_at_once() -> None:
    world = World()
    world.look()
    world.live.draining = True
    assert world.health.problem == "draining"


def test_waiting_for_something_else() -> None:
    world = World()
    world.wait_for = "warming up 10.0.0.5:8000"
    assert world.look() == "warming up 10.0.0.5:8000"
    assert world.health.engine_is_up
    world.wait_for = ""
    assert world.look() == ""
    world.wait_for = "warming up 10.0.0.6:8000"
    assert world.look() == "", "what was ready stays ready: the switch was turned on just now"


def test_facts_are_asked_for_after_every_absence() -> None:
    world = World()
    world.look(5)
    assert world.live.engine_facts == EngineFacts(16, 1000)
    assert world.ranks[0].asked_for_facts == 1
    world.ranks[0].problem = "gone"
    world.look(FAILURES_TO_UNREADY)
    world.ranks[0].problem = ""
    world.ranks[0].told = EngineFacts(32, 500)
    world.look(5)
    assert world.live.engine_facts == EngineFacts(32, 500)
    assert world.ranks[0].asked_for_facts == 2


def test_facts_that_were_not_told_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("sidecar.admin.health.time.monotonic", lambda: now)
    world = World()
    world.ranks[0].told = EngineFacts()
    assert world.look(3) == ""
    assert world.ranks[0].asked_for_facts == 1
    now += FACTS_EVERY_S
    world.look(3)
    assert world.ranks[0].asked_for_facts == 2


def test_not_ready_before_the_facts_are_known() -> None:
    """The first request would be prefilled remotely, and its handoff could not be checked."""
    seen = []
    world = World()

    async def facts(_timeout_s: float) -> EngineFacts:
        seen.append(world.health.problem)
        return EngineFacts(16, 1000)

    world.ranks[0].facts = facts  # type: ignore[method-assign]
    assert world.look() == ""
    assert seen == ["the decode engine has not answered yet"]


def test_one_line_per_change(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    world = World()
    world.look(3)
    world.ranks[0].problem = "gone"
    world.look(6)
    world.ranks[0].problem = ""
    world.look(3)
    assert [record.getMessage() for record in caplog.records] == [
        "ready",
        "not ready: decode engine: gone",
        "ready",
    ]


def test_looks_every_second() -> None:
    async def main() -> None:
        world = World()
        task = asyncio.create_task(world.health.run())
        await asyncio.sleep(10.5)
        world.ranks[0].problem = "gone"
        await asyncio.sleep(FAILURES_TO_UNREADY)
        assert world.health.problem == "decode engine: gone"
        task.cancel()

    clock.run(main())
