"""The gate between handoffs and side channels: what is known of these decides which endpoints are used."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from sidecar.background import Background
from sidecar.connectors.connector import EngineFacts, Handoff, Rejection
from sidecar.prefill.address import Address
from sidecar.prefill.endpoints import Endpoint
from sidecar.prefill.gate import MAX_SIDE_CHANNELS, Gate
from tests.unit import clock
from tests.unit.handoffs import ENGINE_ID
from transport.compatibility import Incompatible
from transport.handshake import Description, Geometry
from transport.prober import NOT_ASKED, Away, Known, State
from transport.prober import Endpoint as SideChannel
from transport.side_channels import Address as RelayAddress

USUAL = 5600
DEAD = Away("refused", "it refuses connections", "check the port")
OTHER = Incompatible("hash", "it runs another version of vLLM", "use the same version")  # type: ignore[arg-type]
GEOMETRY = Geometry(2000, 8, 2, (1,), (1,), 1, "LBHNC", "FLASH", (0, 0), 1, 1)
ALIVE = Known(Description("hash", ENGINE_ID, GEOMETRY, "14"))


class Channels:
    """`SideChannels` without a network: the states are as the test sets them."""

    def __init__(self) -> None:
        self.states: dict[SideChannel, State] = {}
        self.added: list[SideChannel] = []
        self.asked = 0
        self.is_full = False
        self.after_asking: State | Exception | None = None
        self.gate: Gate | None = None

    def add(self, side: SideChannel) -> bool:
        if self.is_full and side not in self.states:
            return False
        self.states.setdefault(side, NOT_ASKED)
        self.added.append(side)
        return True

    def remove(self, side: SideChannel) -> None:
        self.states.pop(side, None)

    def state(self, side: SideChannel) -> State:
        return self.states.get(side, Away("unknown", "this endpoint is not watched", "add it"))

    def become(self, side: SideChannel, state: State) -> None:
        assert side in self.states, f"{side} is not watched"
        self.states[side] = state
        assert self.gate is not None
        self.gate.state_changed(side, state)

    def known_address(self, side: SideChannel, **_names: Any) -> RelayAddress | Incompatible | Away | None:
        state = self.state(side)
        if side not in self.states:
            return state  # type: ignore[return-value]
        if isinstance(state, Known):
            return RelayAddress(f"127.77.0.{side.port % 250}", 5601)
        return state if isinstance(state, Incompatible) else None

    async def relay_address(self, side: SideChannel, **names: Any) -> RelayAddress | Incompatible | Away:
        self.asked += 1
        await asyncio.sleep(0.001)
        if isinstance(self.after_asking, Exception):
            raise self.after_asking
        if self.after_asking is not None:
            self.become(side, self.after_asking)
        return self.known_address(side, **names) or self.state(side)  # type: ignore[return-value]

    async def alive(self, side: SideChannel, engine_id: str, _timeout_s: float) -> bool:
        state = self.state(side)
        return isinstance(state, Known) and state.description.engine_id == engine_id


class World:
    def __init__(self) -> None:
        self.background = Background()
        self.channels = Channels()
        self.gate = Gate(self.background, USUAL)
        self.gate.attach(self.channels)  # type: ignore[arg-type]
        self.channels.gate = self.gate
        self.told: list[Handoff | Rejection] = []

    def endpoint(self, host: str = "10.0.0.5", port: int = 8000) -> Endpoint:
        endpoint = Endpoint(Address(host, port), configured=True)
        self.gate.learn(endpoint)
        return endpoint

    async def admit(self, endpoint: Endpoint, port: int = USUAL, engine_id: str = ENGINE_ID) -> Handoff | Rejection:
        self.gate.admit(endpoint, handoff(endpoint.address.host, port, engine_id), self.told.append)
        await asyncio.sleep(0.1)
        [result] = self.told
        self.told.clear()
        return result


def handoff(host: str = "10.0.0.5", port: int = USUAL, engine_id: str = ENGINE_ID) -> Handoff:
    params = b'{"remote_host":"%b","remote_port":%d}' % (host.encode(), port)
    return Handoff(params, 40, engine_id=engine_id, host=host, port=port)


def side(host: str = "10.0.0.5", port: int = USUAL) -> SideChannel:
    return SideChannel(host, port)


def run(main: Callable[[World], Awaitable[None]]) -> None:
    async def within() -> None:
        await main(World())

    clock.run(within())


# -- endpoints -------------------------------------------------------------------------------------------------


def test_silence_of_a_guessed_port_says_nothing() -> None:
    async def main(world: World) -> None:
        endpoint = world.endpoint()
        assert world.gate.is_undecided(endpoint)
        world.channels.become(side(), DEAD)
        assert not world.gate.is_undecided(endpoint)
        assert endpoint.blocked == ""
        assert endpoint.admits(0.0)

    run(main)


def test_answer_of_a_guessed_port_counts(caplog: pytest.LogCaptureFixture) -> None:
    async def main(world: World) -> None:
        endpoint = world.endpoint()
        world.channels.become(side(), ALIVE)
        assert endpoint.facts == EngineFacts(16, 1000, ENGINE_ID)
        world.channels.become(side(), OTHER)
        assert endpoint.blocked == "incompatible"
        assert not endpoint.admits(0.0)
        world.channels.become(side(), ALIVE)
        assert endpoint.blocked == ""

    run(main)
    [line] = [record.getMessage() for record in caplog.records]
    for part in ("10.0.0.5:8000", "incompatible", "another version of vLLM", "use the same version"):
        assert part in line


def test_certain_port_that_is_dead_blocks_the_endpoint() -> None:
    async def main(world: World) -> None:
        endpoint = world.endpoint()
        world.channels.become(side(), ALIVE)
        assert isinstance(await world.admit(endpoint), Handoff)
        world.channels.become(side(), DEAD)
        assert endpoint.blocked == "side_channel_dead"
        world.channels.become(side(), ALIVE)
        assert endpoint.blocked == ""

    run(main)


def test_one_good_rank_of_several_is_enough() -> None:
    async def main(world: World) -> None:
        endpoint = world.endpoint()
        for port in (5600, 5601):
            world.channels.after_asking = ALIVE
            await world.admit(endpoint, port)
        world.channels.become(side(port=5600), DEAD)
        assert endpoint.blocked == ""
        world.channels.become(side(port=5601), OTHER)
        assert endpoint.blocked
        world.channels.become(side(port=5600), ALIVE)
        assert endpoint.blocked == ""

    run(main)


def test_a_dead_rank_says_nothing_of_ranks_that_nobody_has_met() -> None:
    async def main(world: World) -> None:
        endpoint = world.endpoint()
        world.channels.after_asking = DEAD
        assert isinstance(await world.admit(endpoint, 5600, "engine_dp0"), Rejection)
        assert endpoint.blocked == ""
        assert isinstance(await world.admit(endpoint, 5601, "engine_dp1"), Rejection)
        assert endpoint.blocked == "side_channel_dead", "all that are known are dead"
        # Another engine, without ranks, at the same address.
        alone = world.endpoint("10.0.0.6")
        assert isinstance(await world.admit(alone, 5600, "engine"), Rejection)
        assert alone.blocked == "side_channel_dead"

    run(main)


def test_certain_port_replaces_the_guess() -> None:
    async def main(world: World) -> None:
        endpoint = world.endpoint()
        world.channels.after_asking = ALIVE
        await world.admit(endpoint, 7000)
        assert set(world.channels.states) == {side(port=7000)}

    run(main)


def test_side_channels_of_an_endpoint_are_bounded() -> None:
    async def main(world: World) -> None:
        endpoint = world.endpoint()
        world.channels.after_asking = ALIVE
        for port in range(6000, 6000 + 3 * MAX_SIDE_CHANNELS):
            await world.admit(endpoint, port)
        assert len(world.channels.states) <= MAX_SIDE_CHANNELS
        assert len(endpoint.side_channels) <= MAX_SIDE_CHANNELS
        assert side(port=6000 + 3 * MAX_SIDE_CHANNELS - 1) in world.channels.states

    run(main)


def test_forgotten_endpoints_are_not_watched() -> None:
    async def main(world: World) -> None:
        endpoint = world.endpoint()
        world.channels.after_asking = ALIVE
        await world.admit(endpoint, 5601)
        world.gate.forget(endpoint)
        assert world.channels.states == {}
        world.gate.state_changed(side(), DEAD)

    run(main)


# -- handoffs ----------------------------------------------------------------------------------------------------


def test_known_side_channel_costs_no_question() -> None:
    async def main(world: World) -> None:
        endpoint = world.endpoint()
        world.channels.become(side(), ALIVE)
        world.gate.admit(endpoint, handoff(), world.told.append)
        [admitted] = world.told
        assert admitted == handoff().via("127.77.0.100", 5601)
        assert world.channels.asked == 0

    run(main)


def test_unknown_side_channel_is_asked_first() -> None:
    async def main(world: World) -> None:
        endpoint = world.endpoint()
        world.channels.after_asking = ALIVE
        assert isinstance(await world.admit(endpoint), Handoff)
        assert world.channels.asked == 1
        assert isinstance(await world.admit(endpoint), Handoff)
        assert world.channels.asked == 1

    run(main)


@pytest.mark.parametrize(
    ("state", "fault", "parts"),
    [
        (DEAD, "side_channel_dead", ("it refuses connections", "check the port")),
        (OTHER, "incompatible", ("another version", "use the same version")),
    ],
)
def test_rejections_say_what_to_change(state: State, fault: str, parts: tuple[str, ...]) -> None:
    async def main(world: World) -> None:
        world.channels.after_asking = state
        result = await world.admit(world.endpoint())
        assert isinstance(result, Rejection)
        assert result.fault == fault
        assert all(part in result.detail for part in parts)

    run(main)


def test_question_that_fails_is_answered_all_the_same() -> None:
    """Case 35: the request waits for nothing else."""

    async def main(world: World) -> None:
        world.channels.after_asking = RuntimeError("bug")
        assert isinstance(await world.admit(world.endpoint()), Rejection)

    run(main)


def test_alive() -> None:
    async def main(world: World) -> None:
        world.endpoint()
        assert "10.0.0.5:5600" in await world.gate.alive(handoff(), 1.0)
        world.channels.become(side(), ALIVE)
        assert await world.gate.alive(handoff(), 1.0) == ""

    run(main)


# -- two engines on one host ---------------------------------------------------------------------------------------


def test_engines_of_one_host_share_the_guess_until_they_are_told_apart() -> None:
    async def main(world: World) -> None:
        first, second = world.endpoint(port=8000), world.endpoint(port=8001)
        world.channels.become(side(), OTHER)
        assert (first.blocked, second.blocked) == ("incompatible", "incompatible")
        world.channels.become(side(), ALIVE)
        assert (first.blocked, second.blocked) == ("", "")
        assert isinstance(await world.admit(first, 5600), Handoff)
        world.channels.after_asking = ALIVE
        assert isinstance(await world.admit(second, 5601), Handoff)
        assert isinstance(await world.admit(first, 5600), Handoff), (
            "the second one took the first one's channel along"
        )
        world.channels.become(side(port=5600), DEAD)
        assert (first.blocked, second.blocked) == ("side_channel_dead", "")

    run(main)


def test_forgetting_one_engine_of_a_host_leaves_the_other() -> None:
    async def main(world: World) -> None:
        first, second = world.endpoint(port=8000), world.endpoint(port=8001)
        world.channels.become(side(), ALIVE)
        assert isinstance(await world.admit(first, 5600), Handoff)
        world.gate.forget(second)
        assert isinstance(await world.admit(first, 5600), Handoff)
        world.gate.forget(first)
        assert world.channels.states == {}

    run(main)


def test_a_side_channel_that_found_no_room_is_watched_when_there_is_some() -> None:
    async def main(world: World) -> None:
        world.channels.is_full = True
        endpoint = world.endpoint()
        assert isinstance(await world.admit(endpoint), Rejection)
        world.channels.is_full = False
        world.channels.after_asking = ALIVE
        assert isinstance(await world.admit(endpoint), Handoff)
        assert endpoint.blocked == ""

    run(main)
