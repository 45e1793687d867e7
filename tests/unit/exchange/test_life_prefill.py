"""The prefill stage, play by play: which endpoint is asked, how often, under which name."""

import json

import pytest

from sidecar.connectors.connector import EngineFacts, Rejection
from sidecar.exchange.commands import CLOSE, RELAY, Check, Decode, Prefill
from sidecar.exchange.failures import Stage
from sidecar.prefill.breaker import State
from tests.unit.exchange.playbook import (
    LOCAL,
    World,
    checked,
    connected,
    decoded,
    fault,
    left,
    prefilled,
    sent,
    start,
)
from tests.unit.handoffs import answer

# -- attempts --------------------------------------------------------------------------------------------------


def test_each_attempt_goes_to_another_endpoint() -> None:
    world = World(attempts=3)
    play = world.remote(world.a, world.b, world.c) >> start << Prefill(world.a) >> prefilled(503, b"")
    play = play << Prefill(world.b) >> fault("refused") << Prefill(world.c) >> prefilled() << Check
    assert play >> checked() << Decode >> connected << None >> sent << None >> decoded() << RELAY
    assert play.exchange.summary() == "remote; prefill=10.0.0.7:8000"
    assert world.outcomes == ["server_error", "refused", "ok"]


@pytest.mark.parametrize("attempts", [1, 2, 3])
def test_no_more_attempts_than_allowed(attempts: int) -> None:
    world = World(attempts=attempts)
    endpoints = (world.a, world.b, world.c)
    play = world.remote(*endpoints) >> start
    for endpoint in endpoints[:attempts]:
        play = play << Prefill(endpoint) >> prefilled(500, b"")
    assert play << LOCAL
    assert world.outcomes == ["server_error"] * attempts


def test_tried_endpoints_do_not_come_again() -> None:
    world = World(attempts=9)
    play = world.remote() >> start << Prefill(world.a) >> prefilled(429, b"") << Prefill(world.b)
    assert play >> prefilled(429, b"") << LOCAL
    assert play.exchange.summary() == "recompute; reason=prefill_busy"


@pytest.mark.parametrize("name", ["refused", "unreachable"])
def test_only_endpoint_is_not_asked_twice_in_vain(world: World, name: str) -> None:
    assert world.remote(world.a) >> start << Prefill(world.a) >> fault(name) << LOCAL


@pytest.mark.parametrize("status", [429, 500, 503, 302])
def test_only_endpoint_that_has_answered_is_not_asked_again(world: World, status: int) -> None:
    assert world.remote(world.a) >> start << Prefill(world.a) >> prefilled(status, b"") << LOCAL


def test_only_endpoint_is_asked_again_after_a_reset(world: World) -> None:
    """The connection may have been the trouble, not the engine; but no more often than allowed (case 32)."""
    play = world.remote(world.a) >> start << Prefill(world.a) >> fault("reset") << Prefill(world.a)
    assert play >> fault("reset") << LOCAL


def test_endpoints_with_open_breakers_are_passed_over(world: World) -> None:
    world.broken(world.a)
    assert world.remote() >> start << Prefill(world.b) >> prefilled(500, b"") << LOCAL


def test_least_loaded_endpoint_is_chosen_where_no_order_is_given(world: World) -> None:
    busy = world.remote(world.a) >> start << Prefill(world.a)
    idle = world.remote(ordered=False) >> start << Prefill(world.b)
    busy.open().exchange.close()
    assert idle >> left << CLOSE


# -- answers that are none -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [b"", b"null", b"[]", b'"', b"{", b"{}", b'{"kv_transfer_params":', b"\xff", b"[" * 100_000, b'{"usage":[]}'],
    ids=lambda body: repr(body[:30]),
)
def test_prefill_answer_that_is_no_answer(world: World, body: bytes) -> None:
    play = world.remote() >> start << Prefill(world.a) >> prefilled(body=body) << LOCAL
    assert play
    assert play.exchange.faults[0].row.stage is Stage.HANDOFF
    assert world.a.breaker._failures == 1


# -- transfers that both legs name -----------------------------------------------------------------------------


def test_each_attempt_has_a_name_of_its_own() -> None:
    world = World(connector="offloading")
    play = world.remote(world.a, world.b) >> start << Prefill(world.a)
    first = play.exchange.transfer_id
    assert play >> fault("refused") << Prefill(world.b)
    second = play.exchange.transfer_id
    assert len({first, second, ""}) == 3
    play = play >> prefilled(body=answer(..., prompt_tokens=40)) << Check
    named = json.loads(play.handoff.params)["remote_prefiller"]
    assert (named["kv_request_id"], named["remote_host"]) == (second, "10.0.0.6")


@pytest.mark.parametrize("connector", ["offloading", "mooncake"])
def test_a_rank_that_brings_nothing_is_left_out(connector: str) -> None:
    """Each rank in turn; what fails says nothing of the others behind the same port."""
    world = World(connector=connector, attempts=1)
    world.a.facts = EngineFacts(block_size=16, ranks=3)

    def rank(rejection: Rejection | None = None) -> int:
        play = world.remote(world.a) >> start << Prefill(world.a)
        chosen = play.exchange.prefill_rank
        play = play >> prefilled(body=answer(..., prompt_tokens=40)) << Check >> checked(rejection)
        assert play << (LOCAL if rejection else Decode)
        return chosen

    assert [rank() for _ in range(4)] == [0, 1, 2, 0]
    assert rank(Rejection("side_channel_dead", "10.0.0.5:7778")) == 1
    assert [rank() for _ in range(4)] == [2, 0, 2, 0]
    assert world.a.breaker.state is State.CLOSED
