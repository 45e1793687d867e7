"""The policy and its budget, play by play: what is recomputed here, and how much of it at once."""

import pytest

from sidecar.decision.guards import Kind
from sidecar.exchange.commands import RELAY, Answer, Prefill
from sidecar.exchange.failures import TABLE, Stage
from tests.unit.exchange.playbook import (
    LOCAL,
    Play,
    World,
    connected,
    decoded,
    fault,
    left,
    pulling,
    recomputing,
    sent,
    start,
)


def test_budget_is_held_until_the_first_byte(world: World) -> None:
    play = recomputing(world).open()
    assert (world.budget.in_flight, world.budget.tokens) == (1, 40)
    play >> connected << None >> sent << None
    assert world.budget.in_flight == 1
    play >> decoded() << RELAY
    assert (world.budget.in_flight, world.budget.tokens) == (0, 0), "a stream like any other by now"
    assert play


@pytest.mark.parametrize(
    "fate",
    [fault("refused"), fault("unreachable"), fault("reset"), fault("garbage"), left, decoded(400), decoded(500)],
)
def test_budget_comes_back_whatever_happens_to_the_recompute(world: World, fate: object) -> None:
    play = recomputing(world) >> fate << object
    assert play


def test_budget_by_number() -> None:
    world = World(max_concurrent=2)
    first = recomputing(world, world.a).open()
    second = recomputing(world, world.b).open()
    third = (world.remote(world.c) >> start << Prefill(world.c) >> fault("timeout") << Answer).open()
    assert third.exchange.faults[-1].row.fault == "timeout"
    assert third.exchange.what is Kind.REFUSED
    assert third.exchange.reason == "decode_over_budget"
    first.exchange.close()
    fourth = recomputing(world, world.c).open()
    for play in (second, third, fourth):
        play.exchange.close()
    world.assert_nothing_held()


def test_budget_by_tokens() -> None:
    world = World(max_tokens=100)
    first = (world.remote(tokens=90) >> start << Prefill(world.a) >> fault("timeout") << LOCAL).open()
    second = world.remote(world.b, tokens=11) >> start << Prefill(world.b) >> fault("timeout")
    assert isinstance((second << Answer).open(), Play)
    third = world.remote(world.c, tokens=10) >> start << Prefill(world.c) >> fault("timeout") << LOCAL
    for play in (first, second, third.open()):
        play.exchange.close()
    world.assert_nothing_held()


def test_one_recompute_larger_than_the_budget_is_let_through() -> None:
    world = World(max_tokens=100)
    assert world.remote(tokens=5000) >> start << Prefill(world.a) >> fault("timeout") << LOCAL


def test_budget_is_no_matter_of_local_requests() -> None:
    world = World(max_concurrent=0)
    assert world.local() >> start << LOCAL >> connected << None >> sent << None >> decoded() << RELAY


def test_long_prompt_without_any_usable_endpoint_counts_as_a_recompute() -> None:
    """Else a dying prefill side would land every long prompt on the decode engine at once (case 30)."""
    world = World(max_concurrent=1)
    first = (world.budgeted() >> start << LOCAL).open()
    assert world.budget.in_flight == 1
    assert first.exchange.summary() == "local; reason=no_usable_prefill"
    second = world.budgeted() >> start << Answer(TABLE[Stage.DECODE, "over_budget"], "a: breaker open")
    second.open().exchange.close()
    assert first


def test_long_prompt_without_any_usable_endpoint_under_policy_fail() -> None:
    world = World(recompute=False)
    play = world.budgeted() >> start << Answer(TABLE[Stage.PREFILL, "none_usable"], "a: breaker open")
    assert play
    assert play.exchange.summary() == "refused; reason=prefill_none_usable"


def test_breakers_that_opened_since_the_decision(world: World) -> None:
    for endpoint in (world.a, world.b):
        world.broken(endpoint)
    play = world.remote() >> start << LOCAL
    assert play.exchange.summary() == "recompute; reason=prefill_none_usable"
    assert play


def test_recompute_carries_no_handoff(world: World) -> None:
    play = pulling(world) >> decoded(500) << LOCAL >> connected << None >> sent << None
    assert play >> decoded() << RELAY
    assert [handoff is None for handoff in world.sent] == [False, True]


def test_recompute_that_fails_is_not_recomputed_again(world: World) -> None:
    play = pulling(world) >> fault("reset") << LOCAL >> connected << None >> sent << None
    assert play >> fault("reset") << Answer(TABLE[Stage.DECODE, "reset"])
    play = pulling(world) >> fault("reset") << LOCAL >> connected << None >> sent << None
    assert play >> decoded(500) << RELAY
