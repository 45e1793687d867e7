"""The machine, play by play: what the failure table leaves open of the good ways and of what is passed on."""

import pytest

from sidecar.decision.guards import Decision, Kind
from sidecar.exchange.commands import CLOSE, PEEK, RELAY, Answer, BreakOff, Check, Decode, Prefill
from sidecar.exchange.failures import TABLE, Stage
from sidecar.prefill.breaker import State
from tests.unit.exchange.playbook import (
    LOCAL,
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
    recomputing,
    sent,
    start,
)
from tests.unit.handoffs import answer, params

# -- the good ways ---------------------------------------------------------------------------------------------


def test_local(world: World) -> None:
    play = world.local()
    assert play >> start << LOCAL >> connected << None >> sent << None >> decoded() << RELAY
    assert play.exchange.summary() == "local; reason=short"
    assert world.sent == [None]
    assert world.outcomes == []


@pytest.mark.parametrize("stream", [False, True])
def test_remote(world: World, stream: bool) -> None:
    play = pulling(world) >> decoded(stream=stream)
    if stream:
        play = play << PEEK >> first_event()
    assert play << RELAY
    exchange = play.exchange
    assert exchange.summary() == "remote; prefill=10.0.0.5:8000"
    assert (exchange.what, exchange.reason, exchange.stage) == (Kind.REMOTE, "long", Stage.STREAMING)
    assert world.outcomes == ["ok"]
    assert not exchange.faults


def test_decode_leg_carries_the_checked_handoff(world: World) -> None:
    play = handed_over(world)
    assert b'"remote_host":"127.77.0.1"' in play.handoff.params
    assert play >> connected << None >> sent << None >> decoded() << RELAY
    assert [handoff.port for handoff in world.sent] == [5600]


def test_refused_by_the_guards(world: World) -> None:
    play = world.refused("not_allowed", "10.9.9.9:80")
    assert play >> start << Answer(TABLE[Stage.READING, "not_allowed"], "10.9.9.9:80")
    assert play.exchange.summary() == "refused; reason=not_allowed"


def test_handoff_without_blocks_is_decoded_without_it(world: World) -> None:
    """Case 14: a prompt shorter than a block is no failure, and asking for nothing kills the engine."""
    play = world.remote() >> start << Prefill(world.a)
    body = answer(params(remote_block_ids=[[]]), prompt_tokens=5)
    assert play >> prefilled(body=body) << LOCAL >> connected << None >> sent << None >> decoded() << RELAY
    assert not play.exchange.faults
    assert world.a.breaker.state is State.CLOSED
    assert world.sent == [None]


def test_decisions_reason_stays_while_nothing_fails(world: World) -> None:
    play = world.play(Decision(Kind.REMOTE, "on", "", 40, (world.a,), ordered=False))
    assert play >> start << Prefill(world.a) >> prefilled() << Check
    assert play.exchange.reason == "on"


# -- answers that are passed on --------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 413, 415, 422])
def test_clients_mistake_at_prefill_is_relayed_and_not_retried(world: World, status: int) -> None:
    """Cases 21 and 28."""
    play = world.remote() >> start << Prefill(world.a) >> prefilled(status, b'{"error":{}}') << RELAY
    assert play
    assert world.outcomes == ["rejected"]
    assert world.a.breaker.state is State.CLOSED


@pytest.mark.parametrize("status", [400, 404, 413, 422, 429])
def test_clients_mistake_at_decode_is_relayed(world: World, status: int) -> None:
    assert pulling(world) >> decoded(status) << RELAY


@pytest.mark.parametrize("status", [200, 204, 400, 404, 429, 500, 503])
def test_without_a_handoff_every_status_is_relayed(world: World, status: int) -> None:
    play = world.local() >> start << LOCAL >> connected << None >> sent << None
    assert play >> decoded(status, stream=status == 200) << RELAY


# -- faults ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["reset", "garbage"])
def test_started_answer_is_never_retried(world: World, name: str) -> None:
    """Case 24."""
    play = pulling(world) >> decoded(stream=True) << PEEK >> first_event() << RELAY
    assert play >> fault(name) << BreakOff(TABLE[Stage.STREAMING, name])
    assert play.exchange.what is Kind.REMOTE


def test_faults_say_where_and_why(world: World) -> None:
    play = world.remote() >> start << Prefill(world.a) >> fault("refused", "10.0.0.5:8000: Connection refused")
    assert play << Prefill(world.b) >> prefilled(503, b"") << LOCAL
    assert [(f.row.reason, f.endpoint, f.detail) for f in play.exchange.faults] == [
        ("prefill_refused", "10.0.0.5:8000", "10.0.0.5:8000: Connection refused"),
        ("prefill_server_error", "10.0.0.6:8000", "status 503"),
    ]


def test_fallback_keeps_its_cause(world: World) -> None:
    play = recomputing(world) >> connected << None >> sent << None >> decoded() << RELAY >> left << CLOSE
    assert play.exchange.fell_back is TABLE[Stage.PREFILL, "timeout"]
    assert play
    assert pulling(world, world.b) >> decoded() << RELAY


# -- other connectors ------------------------------------------------------------------------------------------


def test_a_push_cannot_be_given_back() -> None:
    """The engine would be asked for nothing: the lease ends it, and the count says so."""
    world = World(connector="nixl-push")
    body = answer(params(transfer_mode="push"))
    play = world.remote() >> start << Prefill(world.a) >> prefilled(body=body) << Check >> checked() << Decode
    assert play >> left << CLOSE
    assert play.exchange.take_release() is None
    play.exchange.close()
    assert play.exchange.handoff_outcomes == ["stranded"]


def test_with_a_store_nothing_is_attached_and_nothing_checked() -> None:
    world = World(connector="shared-storage")
    play = world.remote() >> start << Prefill(world.a) >> prefilled(body=answer(...)) << LOCAL
    assert play >> connected << None >> sent << None >> decoded() << RELAY
    assert play.exchange.summary() == "remote; prefill=10.0.0.5:8000"
    assert world.sent == [None]
