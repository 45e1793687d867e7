"""What /endpoints and the metrics say of endpoints that were discovered."""

import json
from typing import Any

from sidecar.admin.observer import Observer
from sidecar.exchange.budget import Budget
from sidecar.prefill.address import parse
from sidecar.prefill.breaker import State
from sidecar.prefill.discovery.discovery import Discovery, Member, Report, Standing
from sidecar.prefill.served import Served
from tests.unit.prefill.world import Known


class Source:
    name = "kubernetes"

    async def run(self, report: Report) -> None:
        raise AssertionError("nobody runs it")


class World:
    def __init__(self) -> None:
        self.endpoints = Known("s:1")
        self.observer = Observer(self.endpoints, Budget(1, 0))
        self.discovery = Discovery(
            Source(), self.endpoints, lambda: self.endpoints.clock, self.observer.discovery_failed
        )

    def samples(self, name: str) -> dict[tuple[str, ...], float]:
        return {
            tuple(sample.labels.values()): sample.value
            for family in self.observer.collection.collect()
            for sample in family.samples
            if sample.name == f"pd_sidecar_{name}"
        }

    def shown(self) -> dict[str, Any]:
        shown = json.loads(json.dumps(self.observer.endpoints()))
        assert isinstance(shown, dict)
        return shown


def test_without_discovery() -> None:
    world = World()
    assert world.samples("discovery_endpoints") == world.samples("discovery_age_seconds") == {}
    assert world.shown() == {
        "discovery": None,
        "endpoints": [
            {
                "address": "s:1",
                "sources": ["prefill"],
                "breaker": "closed",
                "blocked": "",
                "block_size": 0,
                "in_flight": 0,
                "users": 0,
            }
        ],
    }


def test_every_kind() -> None:
    world = World()
    world.observer.discovery = world.discovery
    world.discovery.found(
        {
            parse("a:1"): Member(detail="pod prefill-0"),
            parse("n:1"): Member(Standing.NOT_READY, "pod prefill-1"),
            parse("t:1"): Member(),
        }
    )
    t = world.endpoints.members[-1]
    world.endpoints.begin(t, 10)
    world.endpoints.candidates([b"h:1"])
    world.endpoints.clock += 2  # the next line of the log may come
    world.discovery.found(
        {
            parse("a:1"): Member(detail="pod prefill-0"),
            parse("n:1"): Member(Standing.NOT_READY, "pod prefill-1"),
            parse("t:1"): Member(Standing.TERMINATING),
        }
    )
    a = next(one for one in world.endpoints if one.label == "a:1")
    world.endpoints.broken(a)
    a.blocked = "incompatible"
    world.endpoints.clock += 3
    world.discovery.failed("timeout", "the API is silent")
    shown = world.shown()
    assert shown["discovery"] == {
        "source": "kubernetes",
        "known": True,
        "age_seconds": 3.0,
        "problem": "the API is silent",
    }
    by_address = {one["address"]: one for one in shown["endpoints"]}
    assert set(by_address) == {"s:1", "a:1", "n:1", "t:1", "h:1"}
    assert by_address["a:1"] == {
        "address": "a:1",
        "sources": ["discovery"],
        "standing": "ready",
        "detail": "pod prefill-0",
        "breaker": "open",
        "blocked": "incompatible",
        "block_size": 0,
        "in_flight": 0,
        "users": 0,
    }
    assert by_address["n:1"] == {
        "address": "n:1",
        "sources": ["discovery"],
        "standing": "not_ready",
        "detail": "pod prefill-1",
    }
    assert by_address["h:1"]["sources"] == ["header"]
    assert (by_address["t:1"]["standing"], by_address["t:1"]["users"]) == ("terminating", 1)
    assert world.samples("discovery_endpoints") == {("ready",): 1, ("not_ready",): 1, ("terminating",): 1}
    assert world.samples("discovery_age_seconds") == {(): 3.0}
    assert world.samples("discovery_errors_total") == {("timeout",): 1}
    assert world.samples("breaker_state") == {("s:1",): 0, ("a:1",): State.OPEN, ("h:1",): 0}
    world.discovery.found({})
    world.endpoints.let_go(t)
    assert {one["address"] for one in world.shown()["endpoints"]} == {"s:1", "h:1"}


def test_adapters_of_an_endpoint_are_shown_once_it_has_told() -> None:
    world = World()
    (record,) = world.shown()["endpoints"]
    assert "adapters" not in record
    names = frozenset(f"a{n:04}" for n in range(500))
    world.endpoints.configured[0].models.tell(Served(frozenset({"base"}), names), 10.0)
    (record,) = world.shown()["endpoints"]
    assert record["adapters"] == sorted(names)[:64]
