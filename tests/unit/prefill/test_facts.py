"""Facts of endpoints are asked for once, again after a pause, and never against better knowledge."""

import asyncio

from sidecar.background import Background
from sidecar.connectors.connector import EngineFacts
from sidecar.prefill.address import Address
from sidecar.prefill.endpoints import Endpoint
from sidecar.prefill.facts import AT_ONCE, LOOK_EVERY_S, PAUSE_S, REFRESH_S, FactsKeeper
from tests.unit import clock


class World:
    """`EngineProbe` for every endpoint, and the clock."""

    def __init__(self) -> None:
        self.clock = 1000.0
        self.asked = 0
        self.told = EngineFacts()
        self.is_wanted = True
        self.background = Background()
        self.keeper = FactsKeeper(
            self.background,
            lambda _endpoint: self,  # type: ignore[arg-type,return-value]
            lambda: self.is_wanted,
            lambda: self.clock,
        )

    async def facts(self, timeout_s: float) -> EngineFacts:
        self.asked += 1
        return self.told

    async def want(self, endpoint: Endpoint) -> None:
        self.keeper.want(endpoint)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not len(self.background)


def endpoint() -> Endpoint:
    return Endpoint(Address("a", 1), configured=True)


def test_asked_once_in_a_while() -> None:
    async def main() -> None:
        world, a = World(), endpoint()
        await world.want(a)
        await world.want(a)
        assert world.asked == 1
        world.clock += PAUSE_S
        await world.want(a)
        assert world.asked == 2
        assert a.facts == EngineFacts()

    asyncio.run(main())


def test_nobody_is_asked_while_nothing_may_be_prefilled_elsewhere() -> None:
    """And everybody soon after that is switched on."""

    async def main() -> None:
        world, a = World(), endpoint()
        world.is_wanted = False
        world.background.start("facts", world.keeper.run([a]))
        await asyncio.sleep(60)
        assert not world.asked
        world.is_wanted = True
        await asyncio.sleep(2 * LOOK_EVERY_S)
        assert world.asked == 1
        await world.background.close()

    clock.run(main())


def test_of_many_some_are_asked_at_the_same_time() -> None:
    """A thousand metrics that arrive together would fill memory; the others have their turn at the next look."""

    async def main() -> None:
        world = World()
        world.told = EngineFacts(16, 100)
        many = [Endpoint(Address("a", 1 + number), configured=True) for number in range(AT_ONCE + 3)]
        for one in many:
            world.keeper.want(one)
        assert len(world.background) == AT_ONCE
        for _ in range(5):
            await asyncio.sleep(0)
        for one in many:
            world.keeper.want(one)
        await asyncio.sleep(0)
        assert world.asked == len(many)

    asyncio.run(main())


def test_silent_ones_keep_nobody_from_his_turn() -> None:
    class Silent:
        def __init__(self) -> None:
            self.asked: set[Endpoint] = set()

        def __call__(self, endpoint: Endpoint) -> "Silent":
            self.asked.add(endpoint)
            return self

        async def facts(self, timeout_s: float) -> EngineFacts:
            await asyncio.sleep(timeout_s)
            return EngineFacts()

    async def main() -> None:
        background, silent = Background(), Silent()
        keeper = FactsKeeper(background, silent, lambda: True, asyncio.get_running_loop().time)  # type: ignore[arg-type]
        many = [Endpoint(Address("a", 1 + number), configured=True) for number in range(5 * AT_ONCE)]
        background.start("facts", keeper.run(many))
        await asyncio.sleep(60)
        assert silent.asked == set(many)
        await background.close()

    clock.run(main())


def test_known_facts_are_refreshed_rarely() -> None:
    async def main() -> None:
        world, a = World(), endpoint()
        world.told = EngineFacts(16, 100)
        await world.want(a)
        assert a.facts == EngineFacts(16, 100)
        world.clock += REFRESH_S - 1
        await world.want(a)
        assert world.asked == 1
        world.clock += 1
        world.told = EngineFacts(32, 50)
        await world.want(a)
        assert a.facts == EngineFacts(32, 50)
        world.clock += REFRESH_S
        world.told = EngineFacts()
        await world.want(a)
        assert a.facts == EngineFacts(32, 50), "silence is no news"

    asyncio.run(main())


def test_what_the_side_channel_told_counts_for_more() -> None:
    async def main() -> None:
        world, a = World(), endpoint()
        a.facts = EngineFacts(16, 100, "engine")
        world.told = EngineFacts(32, 50)
        await world.want(a)
        assert world.asked == 0
        assert a.facts.block_size == 16

    asyncio.run(main())


def test_every_endpoint_gets_its_turn() -> None:
    async def main() -> None:
        world, known = World(), [endpoint()]
        world.told = EngineFacts(16, 100)
        task = asyncio.create_task(world.keeper.run(known))
        await asyncio.sleep(0.01)
        known.append(endpoint())
        await asyncio.sleep(LOOK_EVERY_S + 0.1)
        task.cancel()
        assert [one.facts for one in known] == [EngineFacts(16, 100)] * 2

    clock.run(main())


def test_nothing_is_kept_of_an_endpoint_that_left() -> None:
    """Not even by an answer that comes afterwards."""

    async def main() -> None:
        world, a = World(), endpoint()
        world.told = EngineFacts(16, 100)
        world.keeper.want(a)
        a.forgotten = True
        world.keeper.forget(a)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not world.keeper._next
        assert a.facts == EngineFacts()

    asyncio.run(main())
