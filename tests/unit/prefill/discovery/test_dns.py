"""Endpoints from DNS, against a server on loopback: TTLs, absence and silence told apart, large answers."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import dns.rcode
import pytest
import uvloop

from sidecar.prefill.address import parse
from sidecar.prefill.discovery import dns as source_module
from sidecar.prefill.discovery.dns import LEAST_TTL_S, DnsSource
from tests.nameserver import NameServer, ThreadedNameServer
from tests.unit.prefill.discovery.world import World

NAME = "prefill.llm.svc.cluster.local"
Play = Callable[[NameServer, World], Awaitable[None]]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes seconds in life; the servers of these tests give answers with a TTL of 0 if not told otherwise."""
    monkeypatch.setattr(source_module, "LEAST_TTL_S", 0.1)
    monkeypatch.setattr(source_module, "LIFETIME_S", 0.3)
    monkeypatch.setattr("sidecar.prefill.discovery.backoff.FIRST_S", 0.05)
    monkeypatch.setattr("sidecar.prefill.discovery.backoff.LONGEST_S", 0.2)


def run(play: Play, name: str = f"{NAME}.", **options: Any) -> None:
    """On the loop that the sidecar has, in real time."""

    async def main(server: NameServer) -> None:
        server.ttl_s = server.negative_ttl_s = 0
        server.records[NAME] = ["10.0.0.1"]
        async with World(DnsSource(name, 8000, [parse(server.address)], **options)) as world:
            await play(server, world)
        await asyncio.sleep(0)
        names = [task.get_name() for task in asyncio.all_tasks()]
        assert not [name for name in names if name.startswith("dns:")]

    with ThreadedNameServer() as server, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(server))


def test_both_families() -> None:
    async def play(server: NameServer, world: World) -> None:
        await world.until(["10.0.0.1:8000"])
        server.records[NAME] = ["10.0.0.2", "fd00:0:0::3"]
        await world.until(["10.0.0.2:8000", "[fd00::3]:8000"])
        assert not world.errors

    run(play)


def test_time_to_live_is_kept() -> None:
    """Neither asked before it is over, nor much after; the shortest of a chain of names counts."""

    async def play(server: NameServer, world: World) -> None:
        server.ttl_s = 60
        server.aliases[NAME] = ("prefill.other.test", 2)
        server.records["prefill.other.test"] = ["10.0.0.7"]
        server.negative_ttl_s = 60
        await world.until(["10.0.0.7:8000"])
        await asyncio.sleep(2.6)
        times = [at for at, _, kind, _ in server.asked if kind == "A"]
        assert len(times) == 2
        assert 1.9 < times[1] - times[0] < 2.5
        assert server.count("AAAA") == 2, "that there is none is good for as long as the alias is"

    run(play)


def test_a_ttl_of_zero_is_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "LEAST_TTL_S", LEAST_TTL_S)

    async def play(server: NameServer, world: World) -> None:
        await world.until(["10.0.0.1:8000"])
        await asyncio.sleep(1.2)
        assert server.count() == 2

    run(play)


def test_silence_takes_nothing_away() -> None:
    async def play(server: NameServer, world: World) -> None:
        await world.until(["10.0.0.1:8000"])
        server.silent = {"A", "AAAA"}
        await world.until_failing("timeout")
        assert "no DNS server answers" in world.discovery.problem
        await asyncio.sleep(0.5)
        assert world.labels == ["10.0.0.1:8000"]
        assert world.discovery.age_s > 0.5
        server.silent = set()
        server.records[NAME] = ["10.0.0.9"]
        await world.until(["10.0.0.9:8000"])
        await world.until_well()

    run(play)


def test_one_family_may_be_silent() -> None:
    async def play(server: NameServer, world: World) -> None:
        server.silent = {"AAAA"}
        await world.until(["10.0.0.1:8000"], 0.25)
        await world.until_failing("timeout")
        server.records[NAME] = ["10.0.0.2", "fd00::1"]
        await world.until(["10.0.0.2:8000"])
        server.silent = set()
        await world.until(["10.0.0.2:8000", "[fd00::1]:8000"])

    run(play)


@pytest.mark.parametrize("rcode", [dns.rcode.SERVFAIL, dns.rcode.REFUSED], ids=["servfail", "refused"])
def test_a_server_that_fails(rcode: dns.rcode.Rcode) -> None:
    async def play(server: NameServer, world: World) -> None:
        await world.until(["10.0.0.1:8000"])
        server.rcode = rcode
        await world.until_failing("refused")
        assert dns.rcode.to_text(rcode) in world.discovery.problem
        assert "127.0.0.1" in world.discovery.problem
        assert world.labels == ["10.0.0.1:8000"]
        server.rcode = None
        await world.until_well()

    run(play)


def test_an_answer_that_is_none() -> None:
    async def play(server: NameServer, world: World) -> None:
        await world.until(["10.0.0.1:8000"])
        server.garbage = b"\x00\x01garbage"
        await asyncio.sleep(0.7)
        server.garbage = b""
        assert world.labels == ["10.0.0.1:8000"]

    run(play)


def test_no_such_name_is_believed_after_a_while() -> None:
    """A DNS server that has just started knows of no name."""
    ahead_s = 0.0

    async def play(server: NameServer, world: World) -> None:
        nonlocal ahead_s
        await world.until(["10.0.0.1:8000"])
        del server.records[NAME]
        await world.until_failing("nxdomain")
        assert f"there is no name {NAME}." in world.discovery.problem
        await asyncio.sleep(0.5)
        assert world.labels == ["10.0.0.1:8000"]
        ahead_s = source_module.NXDOMAIN_BELIEVED_AFTER_S
        await world.until([])
        server.records[NAME] = ["10.0.0.2"]
        await world.until(["10.0.0.2:8000"])
        await world.until_well()

    run(play, now=lambda: time.monotonic() + ahead_s)


def test_no_address_is_an_answer() -> None:
    """The Service is there and no pod is ready."""

    async def play(server: NameServer, world: World) -> None:
        await world.until(["10.0.0.1:8000"])
        server.records[NAME] = []
        await world.until([])
        assert not world.errors

    run(play)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a machine that has something else to do."""
    monkeypatch.setattr(source_module, "LIFETIME_S", 5.0)


@pytest.mark.usefixtures("patient")
def test_more_than_a_datagram_holds() -> None:
    async def play(server: NameServer, world: World) -> None:
        server.records[NAME] = [f"10.1.{n // 250}.{n % 250}" for n in range(500)]
        await world.until([f"{one}:8000" for one in server.records[NAME]])
        assert [over for _, _, kind, over in server.asked if kind == "A"][:2] == ["udp", "tcp"]
        assert not world.errors

    run(play)


@pytest.mark.usefixtures("patient")
def test_a_slow_server_does_not_hold_up_the_loop() -> None:
    async def play(server: NameServer, world: World) -> None:
        server.delay_s = 1.5
        longest_s, before = 0.0, time.monotonic()
        while not world.labels:
            turn = time.monotonic()
            await asyncio.sleep(0)
            longest_s = max(longest_s, time.monotonic() - turn)
            await asyncio.sleep(0.001)
        assert time.monotonic() - before > 1.4
        assert longest_s < 1.0

    run(play)


def test_ends_whenever_it_is_told_to() -> None:
    """Nor does the loop wait for what was under way: see dns_sockets.py."""
    dice = random.Random(1)

    async def play(server: NameServer, _: World) -> None:
        server.records[NAME] = [f"10.1.{n // 250}.{n % 250}" for n in range(500)]  # UDP, then TCP
        for _ in range(60):
            async with asyncio.timeout(5), World(DnsSource(f"{NAME}.", 8000, [parse(server.address)])):
                await asyncio.sleep(dice.random() * 0.05)

    run(play)
