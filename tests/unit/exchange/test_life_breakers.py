"""Breakers, play by play: what opens and closes them, and that one request at a time is on trial."""

from collections.abc import Callable

import pytest

from sidecar.connectors.connector import Rejection
from sidecar.exchange.commands import CLOSE, PEEK, RELAY, Check, Decode, Prefill
from sidecar.prefill.breaker import State
from sidecar.prefill.endpoints import NO_KV_TO_BE_INEFFECTIVE
from tests.unit.exchange.playbook import (
    LOCAL,
    Play,
    World,
    checked,
    connected,
    decoded,
    fault,
    first_event,
    handed_over,
    left,
    prefilled,
    pulling,
    sent,
    start,
    wait,
)
from tests.unit.handoffs import answer, params


def test_prefill_without_handoff_opens_the_breaker_after_three(world: World) -> None:
    """Case 7: healthy, 200, no handoff, again and again."""
    for _ in range(3):
        assert world.a.breaker.state is State.CLOSED
        play = world.remote(world.a) >> start << Prefill(world.a) >> prefilled(body=answer(...)) << LOCAL
        play.open().exchange.close()
    assert world.a.breaker.state is State.OPEN
    assert world.remote(world.a) >> start << LOCAL


def test_effective_goes_when_nothing_comes_and_returns_with_the_first_pull(world: World) -> None:
    for _ in range(5):
        assert world.endpoints.effective
        for endpoint in (world.a, world.b, world.c):
            endpoint.breaker.succeeded()
        play = world.remote() >> start << Prefill(world.a) >> prefilled(body=answer(...)) << LOCAL
        play.open().exchange.close()
    assert not world.endpoints.effective
    world.a.breaker.succeeded()
    assert pulling(world) >> decoded() << RELAY
    assert world.endpoints.effective


@pytest.mark.parametrize(
    "failure",
    [
        lambda p: p >> fault("reset"),
        lambda p: p >> fault("peer_silent"),
        lambda p: p >> decoded(500),
        lambda p: p >> decoded(stream=True) << PEEK >> first_event(error=True),
    ],
)
def test_failed_pulls_show_in_effective(world: World, failure: Callable[[Play], Play]) -> None:
    """Case 12: no KV moved, whatever the prefill side says."""
    for _ in range(5):
        assert world.endpoints.effective
        world.a.breaker.succeeded()
        play = failure(pulling(world, world.a)) << LOCAL
        play.open().exchange.close()
    assert not world.endpoints.effective


@pytest.mark.parametrize("name", ["refused", "unreachable"])
def test_connection_that_cannot_be_made_opens_the_breaker_at_once(world: World, name: str) -> None:
    """Case 31: a black-holed address costs the first request the connect timeout and the next ones nothing."""
    assert world.remote() >> start << Prefill(world.a) >> fault(name) << Prefill(world.b) >> left << CLOSE
    assert world.a.breaker.state is State.OPEN
    assert world.remote() >> start << Prefill(world.b) >> left << CLOSE


def test_silent_peer_opens_the_breaker_at_once(world: World) -> None:
    assert pulling(world) >> fault("peer_silent") << LOCAL
    assert world.a.breaker.state is State.OPEN


def test_pull_is_what_closes_a_breaker(world: World) -> None:
    world.broken(world.a)
    world.clock += 60
    play = pulling(world, world.a)
    assert world.a.breaker.state is State.HALF_OPEN, "an answer alone proves nothing"
    assert play >> decoded(stream=True) << PEEK >> first_event() << RELAY
    assert world.a.breaker.state is State.CLOSED


def test_pull_that_fails_reopens_a_breaker_on_trial(world: World) -> None:
    """Case 12: load errors of one pair, while local requests work."""
    world.broken(world.a)
    world.clock += 60
    assert pulling(world, world.a) >> decoded(stream=True) << PEEK >> first_event(error=True) << LOCAL
    assert world.a.breaker.state is State.OPEN


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429])
def test_what_is_no_fault_of_the_endpoint_leaves_it_on_trial(world: World, status: int) -> None:
    world.broken(world.a)
    world.clock += 60
    play = world.remote(world.a) >> start << Prefill(world.a) >> prefilled(status, b"") << object
    assert play
    assert world.a.breaker.state is State.HALF_OPEN
    assert world.remote(world.a) >> start << Prefill(world.a) >> left << CLOSE


def test_only_one_request_is_on_trial(world: World) -> None:
    world.broken(world.a)
    world.clock += 60
    trial = world.remote(world.a) >> start << Prefill(world.a)
    other = world.remote(world.a) >> start << LOCAL
    other.open().exchange.close()
    assert not world.a.breaker.admits(world.clock), "the end of the other one has ended the trial"
    assert trial >> left << CLOSE


def test_end_of_an_older_request_does_not_let_in_a_second_trial(world: World) -> None:
    older = world.remote(world.a) >> start << Prefill(world.a)
    world.broken(world.a)
    world.clock += 60
    trial = (world.remote(world.a) >> start << Prefill(world.a)).open()
    older = older >> left << CLOSE
    older.open().exchange.close()
    assert not world.a.breaker.admits(world.clock)
    assert trial >> left << CLOSE


def test_trial_whose_handoff_expires_leaves_the_endpoint_usable(world: World) -> None:
    world.broken(world.a)
    world.clock += 60
    play = handed_over(world) >> wait(30) << None >> connected << Prefill(world.b) >> prefilled() << Check
    assert play >> checked() << Decode >> connected << None >> sent << None >> decoded() << RELAY
    assert world.a.breaker.admits(world.clock)


VERDICTS: dict[str, Callable[[World, Play], Play]] = {
    "failed": lambda w, p: p >> prefilled(500, b"") << Prefill(w.b),
    "no handoff": lambda _, p: p >> prefilled(body=answer(...)) << LOCAL,
    "pulled": lambda _, p: (
        p >> prefilled() << Check >> checked() << Decode >> connected << None >> sent << None >> decoded() << RELAY
    ),
    "short": lambda _, p: p >> prefilled(body=answer(params(remote_block_ids=[[]]), prompt_tokens=5)) << LOCAL,
    "left": lambda _, p: p >> left << CLOSE,
    "another endpoint": lambda w, p: p >> prefilled(429, b"") << Prefill(w.b),
}


@pytest.mark.parametrize("verdict", VERDICTS)
@pytest.mark.parametrize("closed_before", [True, False])
def test_trial_that_is_over_does_not_end_the_next_one(world: World, verdict: str, closed_before: bool) -> None:
    world.broken(world.a)
    world.clock += 60
    first = world.remote() >> start << Prefill(world.a)
    first = VERDICTS[verdict](world, first).open()
    if closed_before:
        first.exchange.close()
    elif verdict == "left":
        return  # the trial goes on until the request is closed
    if world.a.breaker.state is not State.OPEN:
        world.a.breaker.succeeded()
        world.broken(world.a)
    world.clock += 60
    second = (world.remote(world.a) >> start << Prefill(world.a)).open()
    first.exchange.close()
    assert not world.a.breaker.admits(world.clock), "a third request is let in beside the trial"
    assert second >> left << CLOSE


def test_handoffs_that_could_not_be_checked_tell_nothing(world: World) -> None:
    """Out of descriptors, say: neither the endpoint nor the prefill engines' configuration is to blame."""
    for _ in range(NO_KV_TO_BE_INEFFECTIVE + 1):
        play = world.remote(world.a) >> start << Prefill(world.a) >> prefilled() << Check
        play = play >> checked(Rejection("unverifiable", "raise the limit")) << LOCAL
        play.open().exchange.close()
    assert world.endpoints.effective
    assert world.a.breaker.is_clean
