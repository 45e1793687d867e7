"""Hub and workers agree: whatever requests do in whatever order, once all is told every worker knows what the hub
knows. Messages keep their order on each way and are late at will.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from sidecar.prefill.address import Address, AllowList
from sidecar.prefill.breaker import ANOTHERS, State
from sidecar.prefill.served import Served
from sidecar.prefill.slots import Slots
from sidecar.workers import messages
from sidecar.workers.ledger import LINGER_S, HubEndpoints, Ledger
from sidecar.workers.messages import Place
from sidecar.workers.replica import Replica

if TYPE_CHECKING:
    from sidecar.prefill.endpoints import Endpoint

PLACES = [Place("10.0.0.1", 8000), Place("10.0.0.2", 8000)]
CONFIGURED = [Address(place.host, place.port) for place in PLACES]
COMING = Place("10.0.0.9", 8000)

_to_hub = msgspec.msgpack.Decoder(messages.ToHub)
_to_worker = msgspec.msgpack.Decoder(messages.ToWorker)


class Side:
    """A worker: its replica, and what is on its way to and from it."""

    def __init__(self, number: int, world: World) -> None:
        self.number = number
        self.world = world
        self.up: deque[bytes] = deque()
        self.down: deque[bytes] = deque()
        self.used: set[Endpoint] = set()
        self.replica = Replica(
            CONFIGURED,
            AllowList(["10.0.0.0/8"]),
            lambda: world.clock,
            samples=False,
            salt=world.endpoints.salt,
            number=number,
            send=lambda message: self.up.append(msgspec.msgpack.encode(message)),
            used=self.used.add,
            forgotten=lambda _endpoint: None,
        )

    def hear(self) -> None:
        match _to_worker.decode(self.down.popleft()):
            case messages.News() as news:
                self.replica.told(news)
            case messages.NoKv() as news:
                self.replica.told_no_kv(news)
            case messages.Elsewhere() as news:
                self.replica.told_elsewhere(news)
            case messages.Models() as news:
                self.replica.told_models_of(news)
            case messages.Discovered() as news:
                self.replica.discovered({Address(one.host, one.port): usable for one, usable in news.members})

    def tell_use(self) -> None:
        for endpoint in self.used:
            self.up.append(msgspec.msgpack.encode(self.replica.use_of(endpoint)))
        self.used.clear()

    def at(self, place: Place) -> Endpoint:
        endpoint = self.replica.known(place)
        assert endpoint is not None
        return endpoint


class World:
    def __init__(self, workers: int = 2) -> None:
        self.clock = 100.0
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.forgotten: list[str] = []
        self.endpoints = HubEndpoints(
            CONFIGURED,
            AllowList(["10.0.0.0/8"]),
            lambda: self.clock,
            samples=False,
            learned=lambda _endpoint: None,
            forgotten=lambda endpoint: self.forgotten.append(endpoint.label),
            announce=self._announce,
            later=lambda delay_s, call, one: self.later.append((self.clock + delay_s, lambda: call(one))),
        )
        self.ledger = Ledger(self.endpoints, self._send, lambda: self.clock, 1, lambda _endpoint: None)
        self.sides = {number: Side(number, self) for number in range(1, workers + 1)}
        for number in self.sides:
            self.ledger.opened(number)
        self.settle()

    def _send(self, worker: int, message: msgspec.Struct) -> None:
        self.sides[worker].down.append(msgspec.msgpack.encode(message))

    def _announce(self, message: messages.Discovered, joined: list[Endpoint]) -> None:
        for number in self.sides:
            self._send(number, message)
        for endpoint in joined:
            self.ledger.tell(endpoint)

    def hear(self, side: Side) -> None:
        match _to_hub.decode(side.up.popleft()):
            case messages.Outcome() as message:
                self.ledger.outcome(side.number, message)
            case messages.Use() as message:
                self.ledger.used(side.number, message)
            case messages.Learned() as message:
                self.ledger.learned(message)

    def settle(self) -> None:
        """Everything is told and heard."""
        for side in self.sides.values():
            side.tell_use()
        while any(side.up or side.down for side in self.sides.values()):
            for side in self.sides.values():
                while side.up:
                    self.hear(side)
                while side.down:
                    side.hear()

    def hub(self, place: Place) -> Endpoint:
        endpoint = self.endpoints.at(place)
        assert endpoint is not None
        return endpoint

    def check_agreement(self) -> None:
        for place in PLACES:
            hub = self.hub(place)
            own = [side.replica.use_of(side.at(place)) for side in self.sides.values()]
            assert hub.in_flight == sum(one.in_flight for one in own)
            assert hub.tokens_in_flight == sum(one.tokens for one in own)
            assert hub.users == sum(one.users for one in own)
            for side in self.sides.values():
                endpoint = side.at(place)
                assert endpoint.breaker.standing == hub.breaker.standing
                assert endpoint.ranks.standing == hub.ranks.standing
                assert (endpoint.in_flight, endpoint.tokens_in_flight) == (hub.in_flight, hub.tokens_in_flight)
                assert endpoint.admits(self.clock + 1000) == hub.admits(self.clock + 1000)
                assert side.replica._no_kv == self.endpoints.no_kv


class Request:
    """One request's steps at an endpoint, as exchange/life.py takes them."""

    def __init__(self, side: Side, place: Place) -> None:
        self.replica, self.endpoint = side.replica, side.at(place)
        self.trial = self.replica.begin(self.endpoint, 100)

    def end(self, how: str, dice: random.Random) -> None:
        self.replica.end(self.endpoint, 100)
        match how:
            case "failed":
                rank = dice.choice((-1, -1, 0, 1))
                at_once = dice.random() < 0.3
                self.replica.failed(self.endpoint, at_once=at_once, trial=self.trial, rank=rank)
            case "brought_kv":
                self.replica.brought_kv(self.endpoint, dice.choice((-1, 0, 1)))
            case "succeeded":
                self.replica.succeeded(self.endpoint)
            case "no_kv":
                self.replica.brought_no_kv()
                if self.trial:
                    self.replica.abandoned(self.endpoint, self.trial)
            case _:
                if self.trial:
                    self.replica.abandoned(self.endpoint, self.trial)
        self.replica.let_go(self.endpoint)


@pytest.mark.parametrize("seed", range(40))
def test_agreement(seed: int) -> None:
    dice = random.Random(seed)
    world = World(workers=3)
    running: list[Request] = []
    for _ in range(400):
        side = world.sides[dice.randint(1, 3)]
        match dice.randrange(8):
            case 0 | 1:
                endpoint = side.at(dice.choice(PLACES))
                if endpoint.admits(world.clock):
                    running.append(Request(side, Place(endpoint.address.host, endpoint.address.port)))
            case 2 | 3 if running:
                one = running.pop(dice.randrange(len(running)))
                one.end(dice.choice(("failed", "failed", "brought_kv", "succeeded", "no_kv", "left")), dice)
            case 4 if side.up:
                world.hear(side)
            case 5 if side.down:
                side.hear()
            case 6:
                side.tell_use()
            case _:
                world.clock += dice.choice((0.001, 0.1, 2.0))
    for one in running:
        one.end("left", dice)
    world.settle()
    world.check_agreement()
    assert all(world.hub(place).in_flight == 0 for place in PLACES)
    assert all(world.hub(place).users == 0 for place in PLACES)


def one_failure(world: World, worker: int, **fields: Any) -> None:
    side = world.sides[worker]
    request = Request(side, PLACES[0])
    side.replica.end(request.endpoint, 100)
    side.replica.failed(request.endpoint, at_once=fields.get("at_once", False), trial=request.trial)
    side.replica.let_go(request.endpoint)


def test_failures_count_together() -> None:
    world = World()
    for worker in (1, 2, 1):
        one_failure(world, worker)
        world.settle()
    assert world.sides[2].at(PLACES[0]).breaker.state is State.OPEN


def test_an_older_answer_does_not_undo_what_is_on_its_way() -> None:
    world = World()
    one_failure(world, 2)
    world.hear(world.sides[2])  # the news of it are on their way to worker 1 ...
    one_failure(world, 1, at_once=True)  # ... which has opened in the meantime
    while world.sides[1].down:
        world.sides[1].hear()
        assert world.sides[1].at(PLACES[0]).breaker.state is State.OPEN
    world.settle()
    world.check_agreement()
    assert world.hub(PLACES[0]).breaker.state is State.OPEN


def test_one_trial() -> None:
    """While one worker tries, the others wait; when that worker dies, another may."""
    world = World()
    one_failure(world, 1, at_once=True)
    world.settle()
    world.clock += 2
    trial = Request(world.sides[1], PLACES[0])
    assert trial.trial
    world.settle()
    assert not world.sides[2].at(PLACES[0]).admits(world.clock)
    assert world.sides[2].at(PLACES[0]).breaker._trial == ANOTHERS
    world.ledger.closed(1)
    world.sides[1].down.clear()
    world.settle()
    assert world.sides[2].at(PLACES[0]).admits(world.clock)
    assert world.hub(PLACES[0]).users == world.hub(PLACES[0]).in_flight == 0


def test_success_is_told_only_where_it_is_news() -> None:
    world = World()
    side = world.sides[1]
    side.replica.brought_kv(side.at(PLACES[0]))
    side.replica.succeeded(side.at(PLACES[0]))
    assert not side.up, "most requests work, and cost no message"
    one_failure(world, 2)
    world.settle()
    side.replica.brought_kv(side.at(PLACES[0]))
    world.settle()
    assert world.hub(PLACES[0]).breaker.is_clean


def test_header_endpoint_is_learned_by_the_hub() -> None:
    world = World()
    side = world.sides[1]
    side.replica.candidates([b"10.0.0.9:8000"])
    world.settle()
    world.hub(COMING).blocked = "incompatible"
    world.ledger.tell(world.hub(COMING))
    world.settle()
    for one in world.sides.values():  # also who has not seen the header
        assert one.at(COMING).blocked == "incompatible"
    side.replica.failed(side.at(COMING), at_once=True, trial=0)
    world.settle()
    assert not world.sides[2].at(COMING).admits(world.clock)
    assert not any(one.up for one in world.sides.values())


def test_who_comes_later_knows_all() -> None:
    """A worker that takes the place of another: endpoints, breakers, and what the others have open."""
    world = World()
    world.endpoints.discovered({Address(COMING.host, COMING.port): True})
    one_failure(world, 1, at_once=True)
    Request(world.sides[1], PLACES[1])
    world.settle()
    assert not any(side.up for side in world.sides.values()), "the hub knows who it tells of"
    world.ledger.closed(2)
    world.sides[2] = Side(2, world)
    world.ledger.opened(2)
    world.settle()
    world.ledger.serves(2)
    world.settle()
    world.check_agreement()
    late = world.sides[2]
    assert late.at(COMING).discovered
    assert late.at(COMING).joined_at == world.hub(COMING).joined_at == world.clock
    assert not late.at(PLACES[0]).admits(world.clock)
    assert late.at(PLACES[1]).tokens_in_flight == 100


def test_endpoint_that_leaves_stays_for_who_uses_it() -> None:
    world = World()
    address = Address(COMING.host, COMING.port)
    world.endpoints.discovered({address: True})
    world.settle()
    side = world.sides[1]
    request = Request(side, COMING)  # not told yet
    world.endpoints.discovered({})
    assert not world.forgotten, "somebody may have begun"
    world.settle()
    world.clock += LINGER_S
    for _, call in world.later:
        call()
    assert not world.forgotten
    assert request.endpoint.leaving
    request.end("brought_kv", random.Random(0))
    world.settle()
    assert world.forgotten == ["10.0.0.9:8000"]
    side.replica.hold(request.endpoint)  # too late: nobody learns it anew
    side.tell_use()
    world.settle()
    assert world.endpoints.at(COMING) is None


def test_workers_know_which_adapters_an_endpoint_has() -> None:
    """Also what has no end: slots that nobody has told of."""
    world = World()
    served, slots = Served(frozenset({"base"}), frozenset({"french"}), loads=False), Slots(1, frozenset({"german"}))
    for place, held, until in ((PLACES[0], slots, 200.0), (PLACES[1], None, float("-inf")), (COMING, slots, 1.0)):
        for number in world.sides:
            world._send(number, messages.Models(place, served, 200.0, held, until))
    world.settle()
    for side in world.sides.values():
        assert side.replica.adapters == {"french"}
        assert [side.at(place).models.fresh(world.clock) for place in PLACES] == [served, served]
        assert [side.at(place).has_place("french", world.clock) for place in PLACES] == [False, True]


def test_worker_whose_ranks_are_not_all_open() -> None:
    """It may have a request at the first rank before the second one listens; nobody stumbles over that."""
    told: list[tuple[int, msgspec.Struct]] = []
    world = World()
    ledger = Ledger(world.endpoints, lambda *one: told.append(one), lambda: 0.0, 2, lambda _endpoint: None)
    for worker in (1, 2):
        ledger.opened(worker)
    ledger.decode_used(2, messages.DecodeUse([messages.RankUse(), messages.RankUse(3)]))
    told.clear()
    ledger.decode_used(1, messages.DecodeUse([messages.RankUse(5)]))
    ledger.closed(2)
    (*_, last) = told
    assert last == (1, messages.DecodeElsewhere([messages.RankUse(), messages.RankUse()]))
    ledger.opened(3)
    told.clear()
    ledger.serves(3)
    assert told == [
        (1, messages.DecodeElsewhere([messages.RankUse(), messages.RankUse()])),
        (3, messages.DecodeElsewhere([messages.RankUse(5), messages.RankUse()])),
    ]
