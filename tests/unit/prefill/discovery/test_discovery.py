"""What is made of a source's reports: the last good set stays, its age is known, a change of state is one line."""

import asyncio
import logging

import pytest

from sidecar.prefill.address import parse
from sidecar.prefill.discovery.discovery import RESTART_AFTER_S, Member, Report, Standing
from sidecar.prefill.endpoints import MAX_DISCOVERED
from tests.unit import clock
from tests.unit.prefill.discovery.world import World


class Script:
    """A source that says what it is told to say."""

    name = "script"

    def __init__(self) -> None:
        self.report: Report | None = None
        self.error: Exception | None = None
        self.runs = 0

    async def run(self, report: Report) -> None:
        self.runs += 1
        self.report = report
        if self.error is not None:
            raise self.error
        await asyncio.Event().wait()

    def found(self, *ready: str, **others: str) -> None:
        assert self.report is not None
        members = {parse(text): Member() for text in ready}
        members |= {parse(f"{host}:1"): Member(Standing(standing)) for host, standing in others.items()}
        self.report.found(members)

    def failed(self, reason: str = "silent", message: str = "it is silent", part: str = "") -> None:
        assert self.report is not None
        self.report.failed(reason, message, part)

    def heard(self, part: str = "") -> None:
        assert self.report is not None
        self.report.heard(part)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.name == "sidecar"]
    caplog.clear()
    return found


@pytest.fixture(autouse=True)
def _all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sidecar")


def test_a_failing_source_takes_nothing_away(caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        source = Script()
        async with World(source) as world:
            await asyncio.sleep(7)
            assert world.discovery.age_s == pytest.approx(7)
            source.failed()
            assert "it is silent; no endpoint is known from it" in lines(caplog)[0]
            source.found("a:1", "b:1")
            source.heard()
            assert lines(caplog) == [
                "discovery script: 2 endpoints (+a:1 +b:1)",
                "discovery script: works again after 0 s",
            ]
            await asyncio.sleep(100)
            for _ in range(3):
                source.failed()
            assert lines(caplog) == [
                "discovery script: it is silent; the 2 endpoints that it told of 100 s ago stay in use"
            ]
            source.failed("refused", "it refuses")
            assert len(lines(caplog)) == 1, "another reason"
            assert world.labels == ["a:1", "b:1"]
            assert world.discovery.age_s == pytest.approx(100)
            assert world.errors == {"silent": 4, "refused": 1}
            assert world.discovery.problem == "it refuses"
            await asyncio.sleep(20)
            source.heard()
            assert world.discovery.age_s == 0
            assert lines(caplog) == ["discovery script: works again after 20 s"]
            source.heard()
            assert not lines(caplog)

    clock.run(play())


def test_parts_fail_apart() -> None:
    async def play() -> None:
        source = Script()
        async with World(source) as world:
            await asyncio.sleep(0)
            source.failed(message="no pool", part="pool")
            source.failed(message="no pods", part="pods")
            source.heard("pool")
            assert world.discovery.problem == "no pods"

    clock.run(play())


def test_standings() -> None:
    async def play() -> None:
        source = Script()
        async with World(source) as world:
            await asyncio.sleep(0)
            source.found("a:1", b="not_ready", c="terminating", d="terminating")
            assert world.labels == ["a:1"]
            assert dict(world.discovery.counts()) == {"ready": 1, "not_ready": 1, "terminating": 2}
            source.found(a="terminating")
            assert world.labels == []

    clock.run(play())


def test_changes_within_a_second_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        source = Script()
        async with World(source):
            await asyncio.sleep(0)
            source.found("a:1")
            assert len(lines(caplog)) == 1
            for n in range(20):
                source.found("a:1", *[f"b{m}:1" for m in range(n)])
            source.found("a:1")
            source.found("c:1")
            assert not lines(caplog)
            await asyncio.sleep(1.1)
            assert lines(caplog) == ["discovery script: 1 endpoints (+c:1 -a:1)"]
            await asyncio.sleep(2)
            source.found(*[f"b{m}:1" for m in range(20)])
            assert lines(caplog)[0].endswith(" and 13 more)")
            source.found("x:1", *[f"b{m}:1" for m in range(20)])
            source.found(*[f"b{m}:1" for m in range(20)])
            await asyncio.sleep(5)
            assert not lines(caplog), "nothing came of it"

    clock.run(play())


def test_a_first_set_that_is_empty(caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        source = Script()
        async with World(source) as world:
            await asyncio.sleep(0)
            source.found(a="not_ready")
            source.found()
            assert lines(caplog) == ["discovery script: no endpoint that is ready"]
            assert world.discovery.is_known

    clock.run(play())


def test_too_many(caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        source = Script()
        async with World(source):
            await asyncio.sleep(0)
            for _ in range(2):
                source.found(*[f"h{n}:1" for n in range(MAX_DISCOVERED + 1)])
            assert sum("narrow it down" in line for line in lines(caplog)) == 1

    clock.run(play())


def test_an_error_of_ours_is_not_the_end(caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        source = Script()
        source.error = RuntimeError("a bug")
        async with World(source) as world:
            await asyncio.sleep(RESTART_AFTER_S / 2)
            assert world.errors == {"internal": 1}
            source.error = None
            await asyncio.sleep(RESTART_AFTER_S)
            assert source.runs == 2
            source.found("a:1")
            assert world.labels == ["a:1"]

    clock.run(play())
    assert "RuntimeError: a bug" in caplog.text
