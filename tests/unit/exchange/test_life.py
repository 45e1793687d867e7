"""The machine, play by play: what the failure table leaves open (order, reservations, breakers, single use)."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from sidecar.connectors.connector import EngineFacts, Handoff, Rejection
from sidecar.decision.guards import Decision, Kind
from sidecar.exchange.commands import (
    CLOSE,
    PEEK,
    RELAY,
    TO_FIRST_BYTE,
    WAIT,
    Answer,
    BreakOff,
    Check,
    Decode,
    Prefill,
)
from sidecar.exchange.failures import TABLE, Stage
from sidecar.prefill.breaker import State
from tests.unit.exchange.playbook import (
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
    recomputing,
    sent,
    start,
    wait,
)
from tests.unit.handoffs import answer, params

LOCAL = Decode(None)


@pytest.fixture
def world() -> World:
    return World()


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


def test_endpoints_with_open_breakers_are_passed_over(world: World) -> None:
    world.broken(world.a)
    assert world.remote() >> start << Prefill(world.b) >> prefilled(500, b"") << LOCAL


def test_least_loaded_endpoint_is_chosen_where_no_order_is_given(world: World) -> None:
    busy = world.remote(world.a) >> start << Prefill(world.a)
    idle = world.remote(ordered=False) >> start << Prefill(world.b)
    busy.open().exchange.close()
    assert idle >> left << CLOSE


# -- the policy and its budget ---------------------------------------------------------------------------------


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


# -- the handoff -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("age_s", "expected"), [(0.0, None), (24.999, None), (25.0, Prefill), (25.001, Prefill), (1e6, Prefill)]
)
def test_age_is_counted_from_the_answer_to_the_sending(world: World, age_s: float, expected: object) -> None:
    """Case 11: what waits longer than its lease may hold another prompt by now."""
    play = handed_over(world) >> wait(age_s) << None >> connected
    if expected is None:
        assert play << None >> sent << None >> decoded() << RELAY
    else:
        assert play << Prefill(world.b)
        assert world.sent == []


def test_expired_handoff_is_replaced_by_that_of_the_next_endpoint(world: World) -> None:
    play = handed_over(world) >> wait(30) << None >> connected << Prefill(world.b) >> prefilled() << Check
    assert play >> checked() << Decode >> connected << None >> sent << None >> decoded() << RELAY
    assert [handoff.host for handoff in world.sent] == ["10.0.0.6"]
    assert play.exchange.summary() == "remote; prefill=10.0.0.6:8000"


def test_handoff_is_spent_once_it_is_sent(world: World) -> None:
    play = pulling(world)
    assert play.exchange.handoff is None
    assert play >> fault("reset") << LOCAL


def test_handoff_is_given_back_only_when_it_is_checked(world: World) -> None:
    """The engine must not be told another address than the relay's, not even to have the blocks freed."""
    play = world.remote() >> start << Prefill(world.a) >> prefilled() << Check >> left << WAIT
    handoff = play.handoff.via("127.77.0.1", 5601)
    assert play >> checked() << CLOSE
    assert play.exchange.take_release() == handoff
    assert play.exchange.handoff_outcomes == ["released"]


def test_handoff_that_is_rejected_is_not_given_back(world: World) -> None:
    play = world.remote() >> start << Prefill(world.a) >> prefilled() << Check >> left << WAIT
    assert play >> checked(Rejection("incompatible", "")) << CLOSE
    assert play.exchange.handoff_outcomes == ["stranded"]


@pytest.mark.parametrize(
    ("ending", "outcomes"),
    [
        (lambda p: p >> checked() << Decode >> connected << None >> sent << None, ["used"]),
        (lambda p: p >> checked() << Decode >> wait(30) << None >> connected << Prefill, ["expired"]),
        (lambda p: p >> checked(Rejection("incompatible", "")) << Prefill, ["stranded"]),
        (lambda p: p >> checked() << Decode >> fault("refused") << Answer, ["stranded"]),
        (lambda p: p >> checked() << Decode, ["stranded"]),
        (lambda p: p >> checked() << Decode >> left << CLOSE, ["released"]),
    ],
)
def test_every_handoff_is_accounted_for(world: World, ending: Callable[[Play], Play], outcomes: list[str]) -> None:
    play = ending(world.remote() >> start << Prefill(world.a) >> prefilled() << Check)
    assert play
    assert play.exchange.handoff_outcomes == outcomes


def test_outcomes_of_earlier_attempts_are_kept(world: World) -> None:
    play = world.remote() >> start << Prefill(world.a) >> prefilled() << Check >> checked() << Decode
    play = play >> wait(30) << None >> connected << Prefill(world.b) >> prefilled(body=answer(...)) << LOCAL
    assert play.exchange.handoff_outcomes == ["expired", "invalid"]
    assert play


def test_fallback_keeps_its_cause(world: World) -> None:
    play = recomputing(world) >> connected << None >> sent << None >> decoded() << RELAY >> left << CLOSE
    assert play.exchange.fell_back is TABLE[Stage.PREFILL, "timeout"]
    assert play
    assert pulling(world, world.b) >> decoded() << RELAY


def test_rejected_handoff_does_not_survive_into_the_next_attempt(world: World) -> None:
    """The second endpoint's handoff holds no blocks: nothing may be attached, least of all the first one's."""
    play = world.remote() >> start << Prefill(world.a) >> prefilled() << Check
    play = play >> checked(Rejection("side_channel_dead", "")) << Prefill(world.b)
    body = answer(params(remote_host="10.0.0.6", remote_block_ids=[[]]), prompt_tokens=5)
    play = play >> prefilled(body=body) << LOCAL >> connected << None >> sent << None
    assert play.exchange.stage is Stage.DECODE
    assert play >> decoded() << RELAY
    assert world.sent == [None]


def test_release_hands_the_handoff_out_once(world: World) -> None:
    play = handed_over(world)
    handoff = play.handoff
    assert play >> left << CLOSE
    assert play.exchange.take_release() == handoff
    assert play.exchange.take_release() is None
    play.exchange.close()
    assert play.exchange.take_release() is None


@pytest.mark.parametrize(
    ("status", "is_released"), [(200, False), (204, False), (400, True), (422, True), (499, True), (503, False)]
)
def test_what_decode_refuses_is_given_back(world: World, status: int, is_released: bool) -> None:
    """Its blocks would be held for the whole lease."""
    play = pulling(world)
    play.exchange.decode_status(status)
    handoff = play.exchange.take_release()
    assert (handoff is not None) is is_released
    assert play.exchange.handoff_outcomes == ["released" if is_released else "used"]
    play.exchange.decode_status(status)
    assert play.exchange.take_release() is None, "once"


def test_a_leg_without_handoff_releases_nothing(world: World) -> None:
    """The engine that broke off may still be reading the blocks of the first leg's."""
    play = pulling(world) >> fault("reset") << LOCAL >> connected << None >> sent << None
    assert play
    play.exchange.decode_status(400)
    assert play.exchange.take_release() is None


# -- breakers --------------------------------------------------------------------------------------------------


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


# -- the client leaves -----------------------------------------------------------------------------------------


def _stages() -> dict[str, tuple[object, object]]:
    return {
        "before anything": (lambda w: w.remote(), CLOSE),
        "prefill": (lambda w: w.remote() >> start << Prefill(w.a), CLOSE),
        "second prefill": (
            lambda w: w.remote() >> start << Prefill(w.a) >> fault("reset") << Prefill(w.b),
            CLOSE,
        ),
        "check": (lambda w: w.remote() >> start << Prefill(w.a) >> prefilled() << Check, WAIT),
        "handoff": (handed_over, CLOSE),
        "pull": (pulling, TO_FIRST_BYTE),
        "pull, peeking": (lambda w: pulling(w) >> decoded(stream=True) << PEEK, TO_FIRST_BYTE),
        "recompute": (recomputing, CLOSE),
        "recompute, sent": (lambda w: recomputing(w) >> connected << None >> sent << None, CLOSE),
        "streaming": (lambda w: pulling(w) >> decoded() << RELAY, CLOSE),
        "local": (lambda w: w.local() >> start << LOCAL >> connected << None >> sent << None, CLOSE),
    }


@pytest.mark.parametrize("stage", _stages())
@pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "fail"])
def test_client_leaves(stage: str, recompute: bool) -> None:
    world = World(recompute=recompute or "recompute" in stage)
    play, expected = _stages()[stage]
    play = play(world)
    failures = [endpoint.breaker._failures for endpoint in world.endpoints]
    assert play >> left << expected
    assert [endpoint.breaker._failures for endpoint in world.endpoints] == failures, "nobody is to blame for it"
    assert play.exchange.faults[-1].row.fault == "client_left"


@pytest.mark.parametrize("stage", _stages())
def test_request_that_ends_without_a_word_gives_everything_back(stage: str) -> None:
    """An exception, a drain: `close` alone."""
    assert _stages()[stage][0](World())


def test_prefill_that_is_closed_is_counted_as_left(world: World) -> None:
    assert world.remote() >> start << Prefill(world.a)
    assert world.outcomes == ["client_left"]


# -- faults in mid-stream --------------------------------------------------------------------------------------


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


def test_blocks_are_checked_with_the_local_engines_size_if_nothing_better_is_known(world: World) -> None:
    world.a.facts = EngineFacts()
    assert world.remote() >> start << Prefill(world.a) >> prefilled(block_size=16) << Check
    world.a.facts = EngineFacts()
    assert world.remote() >> start << Prefill(world.a) >> prefilled(block_size=8) << LOCAL


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


def test_decisions_reason_stays_while_nothing_fails(world: World) -> None:
    play = world.play(Decision(Kind.REMOTE, "on", "", 40, (world.a,), ordered=False))
    assert play >> start << Prefill(world.a) >> prefilled() << Check
    assert play.exchange.reason == "on"


@pytest.mark.parametrize(
    ("sent_tokens", "seen_tokens", "exact", "passes"),
    [
        (40, 40, True, True),
        (41, 40, True, False),
        (39, 40, True, False),
        (10, 40, False, True),
        (40, 5, True, False),
    ],
)
def test_prompt_of_another_length_is_another_prompt(
    world: World, sent_tokens: int, seen_tokens: int, exact: bool, passes: bool
) -> None:
    """Where the length is known, KV of another prompt is found out: wrong text with 200, or a dead engine."""
    decision = Decision(
        Kind.REMOTE, "long", estimated_tokens=sent_tokens, candidates=(world.a,), ordered=True, is_exact=exact
    )
    blocks = [[11, 12, 13]] if seen_tokens > 16 else [[]]
    body = answer(params(remote_block_ids=blocks), prompt_tokens=seen_tokens)
    play = world.play(decision) >> start << Prefill(world.a) >> prefilled(body=body)
    assert play << (Check if passes else LOCAL)
    if not passes:
        assert play.exchange.reason == "handoff_invalid"
        assert world.a.breaker._failures == 1


def test_blocks_are_counted_again_when_the_side_channel_has_told_more(world: World) -> None:
    """Until then the local engine's block size had to do."""
    world.a.facts = EngineFacts()
    play = world.remote() >> start << Prefill(world.a) >> prefilled(block_size=16) << Check
    world.a.facts = EngineFacts(block_size=32, engine_id="told by the side channel")
    assert play >> checked() << LOCAL
    assert play.exchange.reason == "handoff_invalid"
    assert play.exchange.handoff_outcomes == ["invalid"]
    assert world.sent == []


def test_misfit_of_a_client_that_left_is_not_given_back(world: World) -> None:
    world.a.facts = EngineFacts()
    play = world.remote() >> start << Prefill(world.a) >> prefilled(block_size=16) << Check >> left << WAIT
    world.a.facts = EngineFacts(block_size=32)
    assert play >> checked() << CLOSE


def test_every_handoff_is_checked_anew(world: World) -> None:
    play = handed_over(world) >> wait(30) << None >> connected << Prefill(world.b) >> prefilled() << Check
    assert play >> left << WAIT


def test_handoff_without_blocks_counts_as_used(world: World) -> None:
    body = answer(params(remote_block_ids=[[]]), prompt_tokens=5)
    play = world.remote() >> start << Prefill(world.a) >> prefilled(body=body) << LOCAL
    assert play.exchange.handoff_outcomes == ["used"]
    assert play


def test_local_block_size_is_good_enough_for_both_checks(world: World) -> None:
    world.a.facts = EngineFacts()
    play = world.remote() >> start << Prefill(world.a) >> prefilled(block_size=16) << Check >> checked() << Decode
    assert play >> connected << None >> sent << None >> decoded() << RELAY


@pytest.mark.parametrize("status", [429, 500, 503, 302])
def test_only_endpoint_that_has_answered_is_not_asked_again(world: World, status: int) -> None:
    assert world.remote(world.a) >> start << Prefill(world.a) >> prefilled(status, b"") << LOCAL


def test_only_endpoint_is_asked_again_after_a_reset(world: World) -> None:
    """The connection may have been the trouble, not the engine; but no more often than allowed (case 32)."""
    play = world.remote(world.a) >> start << Prefill(world.a) >> fault("reset") << Prefill(world.a)
    assert play >> fault("reset") << LOCAL


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


# -- the prompt's token ids ------------------------------------------------------------------------------------


def with_ids(ids: Any) -> bytes:
    return answer(params(), prompt_tokens=40, prompt_token_ids=ids)


def asking_for_ids(world: World) -> Play:
    play = world.remote()
    play.exchange.wants_token_ids = True
    return play


def test_decode_takes_the_prompt_as_prefill_tokenised_it(world: World) -> None:
    ids = list(range(40))
    play = asking_for_ids(world) >> start << Prefill(world.a) >> prefilled(body=with_ids(ids)) << Check
    handoff = play.handoff
    assert json.loads(handoff.with_token_ids())["prompt_token_ids"] == ids
    assert json.loads(handoff.params) == params(), "what is given back needs none"
    play = play >> checked() << Decode
    assert json.loads(play.handoff.with_token_ids())["remote_host"] == "127.77.0.1"


def test_a_request_that_is_over_keeps_no_prompt(world: World) -> None:
    """`/decisions` remembers the last few hundred."""
    play = asking_for_ids(world) >> start << Prefill(world.a) >> prefilled(body=with_ids(list(range(40)))) << Check
    assert play >> checked() << Decode >> connected << None >> sent << None >> left << TO_FIRST_BYTE
    held = [getattr(play.exchange, name, None) for name in play.exchange.__slots__]
    assert not [one for one in held if isinstance(one, Handoff)]


@pytest.mark.parametrize("ids", [..., None])
def test_an_engine_that_gives_none(world: World, ids: Any) -> None:
    play = asking_for_ids(world) >> start << Prefill(world.a) >> prefilled(body=with_ids(ids)) << Check
    assert play.handoff.with_token_ids() == play.handoff.params


@pytest.mark.parametrize(
    "ids", [[], list(range(39)), list(range(41)), [-1] * 40, ["x"] * 40, [1.5] * 40, [2**31] * 40, "text", {}, 7]
)
def test_ids_that_cannot_be_the_prompts(world: World, ids: Any) -> None:
    """Other KV than the ids would say: wrong text with 200."""
    play = asking_for_ids(world) >> start << Prefill(world.a) >> prefilled(body=with_ids(ids)) << LOCAL
    assert play.exchange.fell_back is TABLE[Stage.HANDOFF, "invalid"]


def test_ids_that_nobody_asked_for(world: World) -> None:
    """A client's own `return_token_ids` goes to both engines; its ids are none of ours."""
    play = world.remote() >> start << Prefill(world.a) >> prefilled(body=with_ids(list(range(40)))) << Check
    assert play.handoff.with_token_ids() == play.handoff.params


# -- transfers that both legs name ---------------------------------------------------------------------------------


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
