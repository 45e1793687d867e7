"""Peers are watched while somebody waits for their KV, by one probe for all."""

import asyncio
from collections.abc import Callable

from sidecar.background import Background
from sidecar.connectors.connector import Handoff
from sidecar.prefill.address import Address
from sidecar.prefill.endpoints import Endpoint
from sidecar.prefill.stall import Fetching
from sidecar.prefill.watch import STALLED_AFTER, Watch
from tests.unit import clock

TIMEOUT_S = 10.0
HANDOFF = Handoff(b"{}", 10)


class World:
    """A watch, and peers that are as they are told to be."""

    def __init__(self) -> None:
        self.problem = "no answer"
        self.silent_engine = ""
        self.error: Exception | None = None
        self.asked: list[str] = []
        self.handoffs: list[Handoff | None] = []
        self.told: list[str] = []
        self.background = Background()
        self.fetching: Fetching | None = None
        self.looks = 0
        self.watch = Watch(self.background, self.alive, self.fetches, TIMEOUT_S, asyncio.get_running_loop().time)

    async def alive(self, endpoint: Endpoint, handoff: Handoff | None, timeout_s: float) -> str:
        assert timeout_s <= TIMEOUT_S
        self.asked.append(endpoint.label)
        self.handoffs.append(handoff)
        if self.error is not None:
            raise self.error
        if handoff is not None and handoff.engine_id == self.silent_engine != "":
            return "frozen"
        return self.problem

    async def fetches(self, timeout_s: float) -> Fetching | None:
        assert timeout_s <= TIMEOUT_S
        self.looks += 1
        if self.error is not None:
            raise self.error
        return self.fetching

    def wait_for(self, endpoint: Endpoint, handoff: Handoff | None = HANDOFF) -> Callable[[], None]:
        return self.watch.watch(endpoint, handoff, self.told.append)


def peer(name: str = "a") -> Endpoint:
    return Endpoint(Address(name, 1), configured=True)


def run(main: Callable[[World], object]) -> None:
    async def within() -> None:
        world = World()
        await main(world)  # type: ignore[misc]
        await asyncio.sleep(TIMEOUT_S)  # whatever still runs comes to its end
        assert len(world.watch) == 0
        assert not world.watch._probing
        assert not world.watch._waiting
        await world.background.close()

    clock.run(within())


def test_silent_peer_is_told_once() -> None:
    async def main(world: World) -> None:
        world.wait_for(peer())
        await asyncio.sleep(TIMEOUT_S / 2)
        assert world.told == [], "too early"
        await asyncio.sleep(TIMEOUT_S * 2)
        assert world.told == ["a:1: no answer"]

    run(main)


def test_peer_that_answers_is_left_alone() -> None:
    async def main(world: World) -> None:
        world.problem = ""
        stop = world.wait_for(peer())
        await asyncio.sleep(TIMEOUT_S * 3)
        assert world.told == []
        assert len(world.asked) > 2
        stop()

    run(main)


def test_peer_that_falls_silent_later() -> None:
    async def main(world: World) -> None:
        world.problem = ""
        world.wait_for(peer())
        await asyncio.sleep(TIMEOUT_S * 2)
        world.problem = "frozen"
        await asyncio.sleep(TIMEOUT_S / 2)
        assert world.told == [], "its last sign of life is not that old"
        await asyncio.sleep(TIMEOUT_S * 2)
        assert world.told == ["a:1: frozen"]

    run(main)


def test_quick_requests_cost_no_probe() -> None:
    async def main(world: World) -> None:
        for _ in range(100):
            world.wait_for(peer())()
        await asyncio.sleep(TIMEOUT_S)
        assert world.asked == []

    run(main)


def test_one_probe_serves_all_who_wait() -> None:
    async def main(world: World) -> None:
        a = peer()
        for _ in range(20):
            world.wait_for(a)
        await asyncio.sleep(TIMEOUT_S * 2)
        assert world.told == ["a:1: no answer"] * 20
        assert len(world.asked) < 20

    run(main)


def test_peers_are_told_apart() -> None:
    async def main(world: World) -> None:
        stop = world.wait_for(peer("a"))
        world.wait_for(peer("b"))
        stop()
        await asyncio.sleep(TIMEOUT_S * 2)
        assert world.told == ["b:1: no answer"]
        assert set(world.asked) == {"b:1"}

    run(main)


def test_ranks_behind_one_port_are_told_apart() -> None:
    """One of them frozen says nothing about requests that wait for another, and is not hidden by it either."""

    async def main(world: World) -> None:
        world.problem, world.silent_engine = "", "engine_dp1"
        endpoint = peer()
        told: dict[str, list[str]] = {"engine_dp0": [], "engine_dp1": []}
        stops = []
        for name in ("engine_dp0", "engine_dp1", "engine_dp0"):
            stops.append(world.watch.watch(endpoint, Handoff(b"{}", 10, engine_id=name), told[name].append))
            await asyncio.sleep(0.1)
        await asyncio.sleep(TIMEOUT_S * 1.5)
        assert told == {"engine_dp0": [], "engine_dp1": ["a:1: frozen"]}
        for stop in stops:
            stop()

    run(main)


def test_who_joins_late_waits_its_full_time() -> None:
    async def main(world: World) -> None:
        a = peer()
        world.wait_for(a)
        await asyncio.sleep(TIMEOUT_S * 0.7)
        late = world.watch.watch(a, HANDOFF, lambda _problem: world.told.append("late"))
        await asyncio.sleep(TIMEOUT_S * 0.7)
        assert world.told == ["a:1: no answer"]
        await asyncio.sleep(TIMEOUT_S)
        assert world.told[1:] == ["late"]
        late()

    run(main)


def test_watching_begins_anew_after_an_end() -> None:
    async def main(world: World) -> None:
        a = peer()
        for _ in range(2):
            world.wait_for(a)
            await asyncio.sleep(TIMEOUT_S * 2.5)
        assert len(world.told) == 2

    run(main)


def test_probe_that_cannot_be_made_counts_as_silence() -> None:
    async def main(world: World) -> None:
        world.error = RuntimeError("no session")
        world.wait_for(peer())
        await asyncio.sleep(TIMEOUT_S * 2.5)
        assert world.told == ["a:1: the probe failed: RuntimeError"]

    run(main)


def test_stopping_twice_or_late_is_harmless() -> None:
    async def main(world: World) -> None:
        stop = world.wait_for(peer())
        await asyncio.sleep(TIMEOUT_S * 2.5)
        stop()
        stop()
        assert len(world.told) == 1

    run(main)


def test_waiter_that_stops_another_one() -> None:
    """What follows for one request may end another one in the same breath."""

    async def main(world: World) -> None:
        a = peer()
        stops: list[Callable[[], None]] = []
        world.watch.watch(a, HANDOFF, lambda _problem: stops[0]())
        stops.append(world.wait_for(a))
        world.watch.watch(a, HANDOFF, lambda _problem: world.told.append("third"))
        await asyncio.sleep(TIMEOUT_S * 2.5)
        assert world.told == ["third"]

    run(main)


def test_waiter_that_fails_does_not_leave_the_others_alone() -> None:
    """Case 35."""

    async def main(world: World) -> None:
        def fail(_problem: str) -> None:
            raise RuntimeError("bug")

        a = peer()
        world.watch.watch(a, HANDOFF, fail)
        world.wait_for(a)
        await asyncio.sleep(TIMEOUT_S * 3)
        assert world.told == ["a:1: no answer"]

    run(main)


def test_a_prefill_under_way_has_no_handoff_yet() -> None:
    """One probe for all: it asks for the handoff of whoever has one."""

    async def main(world: World) -> None:
        a = peer()
        stop = world.wait_for(a, None)
        await asyncio.sleep(1.5)
        assert set(world.handoffs) == {None}
        world.handoffs.clear()
        world.wait_for(a)
        await asyncio.sleep(TIMEOUT_S * 2)
        assert set(world.handoffs) == {HANDOFF}
        assert world.told == ["a:1: no answer"] * 2
        stop()

    run(main)


# -- the peer answers, and its KV does not come --------------------------------------------------------------


def test_kv_that_never_comes() -> None:
    async def main(world: World) -> None:
        world.problem, world.fetching = "", Fetching(1, 100)
        world.wait_for(peer())
        await asyncio.sleep(TIMEOUT_S * STALLED_AFTER - 1)
        assert world.told == [], "too early"
        await asyncio.sleep(4)
        assert world.told == ["a:1: it answers, but no KV has come for 30 s; are the NIXL data ports open?"]

    run(main)


def test_kv_of_others_that_comes() -> None:
    """The transfer works; a whole answer that is generated for minutes has its first byte at the end."""

    async def main(world: World) -> None:
        world.problem = ""
        stop = world.wait_for(peer())
        for arrived in range(20):
            world.fetching = Fetching(1, arrived)
            await asyncio.sleep(TIMEOUT_S)
        assert world.told == []
        stop()

    run(main)


def test_nothing_on_its_way() -> None:
    """Its KV has come long ago, it is being generated."""

    async def main(world: World) -> None:
        world.problem, world.fetching = "", Fetching(0, 100)
        stop = world.wait_for(peer())
        await asyncio.sleep(TIMEOUT_S * 20)
        assert world.told == []
        stop()

    run(main)


def test_an_engine_that_does_not_tell_or_cannot_be_asked() -> None:
    async def main(world: World) -> None:
        world.problem = ""
        stop = world.wait_for(peer())
        await asyncio.sleep(TIMEOUT_S * 10)
        assert world.looks > 10
        assert world.told == []
        stop()

    run(main)


def test_an_engine_that_is_too_busy_to_tell_now_and_then() -> None:
    async def main(world: World) -> None:
        world.problem = ""
        world.wait_for(peer())
        for second in range(35):
            world.fetching = Fetching(1, 100) if second % 3 == 0 else None
            await asyncio.sleep(1)
        assert len(world.told) == 1

    run(main)


def test_only_those_that_waited_so_long_and_for_kv() -> None:
    async def main(world: World) -> None:
        world.problem, world.fetching = "", Fetching(2, 100)
        a = peer()
        world.wait_for(a)
        prefilling = world.watch.watch(a, None, lambda _problem: world.told.append("prefilling"))
        await asyncio.sleep(TIMEOUT_S)
        late = world.watch.watch(a, HANDOFF, lambda _problem: world.told.append("late"))
        await asyncio.sleep(TIMEOUT_S * 2 + 3)
        assert len(world.told) == 1
        await asyncio.sleep(TIMEOUT_S + 3)
        assert world.told[1:] == ["late"]
        prefilling()
        late()

    run(main)


def test_the_engine_is_asked_once_for_all_and_only_where_somebody_waits_for_long() -> None:
    async def main(world: World) -> None:
        world.problem = ""
        stops = [world.wait_for(peer(name)) for name in "abcdefgh"]
        await asyncio.sleep(TIMEOUT_S - 1)
        assert world.looks == 0
        await asyncio.sleep(TIMEOUT_S)
        assert 0 < world.looks <= TIMEOUT_S + 2
        for stop in stops:
            stop()

    run(main)
