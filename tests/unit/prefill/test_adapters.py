"""Who is asked for its models, how often, and what becomes of the answers."""

import asyncio

from sidecar.background import Background
from sidecar.prefill.adapters import (
    AT_ONCE,
    COUNTS_FOR,
    EVERY_S,
    JITTER,
    LOADS_EVERY_S,
    OWN_EVERY_S,
    RARELY_S,
    AdapterKeeper,
)
from sidecar.prefill.address import Address, AllowList
from sidecar.prefill.endpoints import Endpoint, Endpoints
from sidecar.prefill.served import Served, Told
from sidecar.prefill.slots import Slots
from tests.unit import clock


class Engine:
    """`EngineProbe` of one engine."""

    def __init__(self, *adapters: str, loads: bool = False, slots: Slots | None = None) -> None:
        self.tells: Served | None = Served(frozenset({"base"}), frozenset(adapters))
        self.loads = loads
        self.tells_slots = slots
        self.asked: list[str] = []

    async def served(self, timeout_s: float) -> Served | None:
        self.asked.append("models")
        return self.tells

    async def loads_adapters(self, timeout_s: float) -> bool:
        self.asked.append("loads")
        return self.loads

    async def slots(self, timeout_s: float) -> Slots | None:
        self.asked.append("slots")
        return self.tells_slots

    def count(self, what: str) -> int:
        return self.asked.count(what)


class World:
    """A decode engine and one prefill engine, a keeper and the clock."""

    def __init__(self, decode: Engine, prefill: Engine, endpoints: int = 1) -> None:
        self.clock = 1000.0
        self.decode, self.prefill = decode, prefill
        self.own = Told()
        self.wanted = True
        self.background = Background()
        addresses = [Address("a", n + 1) for n in range(endpoints)]
        self.endpoints = Endpoints(addresses, AllowList([]), lambda: self.clock)
        self.keeper = AdapterKeeper(
            self.background,
            self.endpoints,
            lambda _endpoint: self.prefill,  # type: ignore[arg-type,return-value]
            [(self.decode, self.own)],  # type: ignore[list-item]
            lambda: self.wanted,
            lambda: self.clock,
        )

    @property
    def endpoint(self) -> Endpoint:
        return self.endpoints.configured[0]

    async def look(self, after_s: float = 0.0) -> None:
        """Twice, as endpoints are asked once the decode engine has told."""
        self.clock += after_s
        for _ in range(2):
            self.keeper.look()
            for _ in range(20):
                await asyncio.sleep(0)
        assert not len(self.background)

    async def look_for(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            await self.look(1.0)


def run(world: World, *looks: float) -> None:
    async def main() -> None:
        for after_s in looks:
            await world.look(after_s)

    asyncio.run(main())


def test_what_both_sides_tell_is_kept_for_a_while() -> None:
    world = World(Engine("french", loads=True), Engine("french", slots=Slots(1, frozenset({"french"}))))
    run(world, 0.0, 0.0)
    own, there = world.own.fresh(world.clock), world.endpoint.models.fresh(world.clock)
    assert own == Served(frozenset({"base"}), frozenset({"french"}), loads=True)
    assert there == Served(frozenset({"base"}), frozenset({"french"}), loads=False)
    assert world.endpoints.adapters == {"french"}
    world.decode.tells = world.prefill.tells = None
    assert world.endpoint.models.fresh(world.clock + COUNTS_FOR * EVERY_S - 1) is not None
    run(world, COUNTS_FOR * OWN_EVERY_S - 1)
    assert world.own.fresh(world.clock) is not None
    run(world, 1)
    assert world.own.fresh(world.clock) is None


def test_silent_ones_keep_nobody_from_his_turn() -> None:
    class Silent(Engine):
        async def served(self, timeout_s: float) -> Served | None:
            await asyncio.sleep(timeout_s)
            return None

    async def main() -> None:
        world = World(Engine(), Silent(), endpoints=1100)
        world.keeper._now = asyncio.get_running_loop().time
        world.background.start("models", world.keeper.run())
        await asyncio.sleep(200)
        assert all(endpoint.models.ask_at > float("-inf") for endpoint in world.endpoints)
        await world.background.close()

    clock.run(main())


def test_nobody_is_asked_more_often_than_that() -> None:
    world = World(Engine("french"), Engine("french", slots=Slots(1, frozenset({"german"}))))
    minutes = 10
    asyncio.run(world.look_for(60 * minutes))
    seconds = 60 * minutes
    assert seconds / (OWN_EVERY_S * (1 + JITTER)) - 2 <= world.decode.count("models") <= seconds / OWN_EVERY_S + 1
    for what in ("models", "slots"):
        assert seconds / (EVERY_S * (1 + JITTER)) - 4 <= world.prefill.count(what) <= seconds / EVERY_S + 2
    assert world.prefill.count("loads") <= seconds / LOADS_EVERY_S + 1
    assert not world.endpoint.has_place("french", world.clock)


def test_without_adapters_seldom() -> None:
    world = World(Engine(), Engine())
    asyncio.run(world.look_for(600))
    assert 5 <= world.prefill.count("models") <= 600 / RARELY_S + 1
    assert not world.prefill.count("slots")


def test_nothing_is_asked_while_nothing_goes_remote() -> None:
    world = World(Engine("french"), Engine("french"))
    world.wanted = False

    async def main() -> None:
        task = asyncio.create_task(world.keeper.run())
        await asyncio.sleep(0.01)
        assert not world.decode.asked
        task.cancel()

    asyncio.run(main())


def test_endpoints_are_not_asked_while_the_decode_engine_does_not_tell() -> None:
    world = World(Engine(), Engine())
    world.decode.tells = None
    run(world, 0.0, 60.0, 60.0)
    assert world.decode.count("models") == 3
    assert not world.prefill.asked


def test_silence_is_no_news() -> None:
    world = World(Engine("french"), Engine("french", slots=Slots(1, frozenset({"german"}))))
    run(world, 0.0, 25.0)
    world.prefill.tells = world.prefill.tells_slots = None
    before = world.endpoint.models.served
    run(world, EVERY_S * (1 + JITTER))
    assert world.endpoint.models.fresh(world.clock) is before
    world.clock += COUNTS_FOR * EVERY_S
    assert world.endpoint.models.fresh(world.clock) is None
    assert world.endpoint.has_place("french", world.clock)


def test_an_adapter_that_comes_to_the_decode_engine_is_looked_for_at_once() -> None:
    world = World(Engine(), Engine())
    run(world, 0.0)
    world.decode.tells = world.prefill.tells = Served(frozenset({"base"}), frozenset({"french"}))
    run(world, OWN_EVERY_S * (1 + JITTER))
    there = world.endpoint.models.fresh(world.clock)
    assert there is not None
    assert there.adapters == {"french"}


def test_what_was_told_to_change_is_asked_at_once() -> None:
    """And an answer that was on its way when it was told counts for nothing."""
    world = World(Engine("french"), Engine())
    run(world, 0.0)
    world.own.doubt()
    run(world, 1.0)
    assert world.own.fresh(world.clock) is not None

    async def main() -> None:
        world.own.doubt()
        world.keeper.look()
        await asyncio.sleep(0)
        world.own.doubt()
        for _ in range(20):
            await asyncio.sleep(0)
        assert world.own.fresh(world.clock) is None
        world.keeper.look()
        for _ in range(20):
            await asyncio.sleep(0)
        assert world.own.fresh(world.clock) is not None

    asyncio.run(main())


def test_an_endpoint_that_left_meanwhile_is_told_nothing() -> None:
    world = World(Engine(), Engine())
    run(world, 0.0)
    world.endpoint.models.doubt()
    world.endpoint.forgotten = True
    run(world, RARELY_S * (1 + JITTER))
    assert world.endpoint.models.fresh(world.clock) is None


def test_of_many_endpoints_some_are_asked_at_a_time_and_all_in_the_end() -> None:
    async def main() -> None:
        world.keeper.look()
        for _ in range(20):
            await asyncio.sleep(0)
        world.keeper.look()
        assert len(world.background) <= AT_ONCE
        await world.look_for(10)
        assert all(one.models.fresh(world.clock) is not None for one in world.endpoints)
        assert world.prefill.count("models") == len(world.endpoints.configured)

    world = World(Engine(), Engine(), endpoints=3 * AT_ONCE)
    asyncio.run(main())
