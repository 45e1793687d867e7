"""Handoffs, play by play: checked anew each time, used once and soon, given back if nobody will read them."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from sidecar.connectors.connector import EngineFacts, Handoff, Rejection
from sidecar.decision.guards import Decision, Kind
from sidecar.exchange.commands import CLOSE, RELAY, TO_FIRST_BYTE, WAIT, Answer, Check, Decode, Prefill
from sidecar.exchange.failures import TABLE, Stage
from tests.unit.exchange.playbook import (
    LOCAL,
    Play,
    World,
    checked,
    connected,
    decoded,
    fault,
    handed_over,
    left,
    prefilled,
    pulling,
    sent,
    start,
    wait,
)
from tests.unit.handoffs import answer, params

# -- age and use -----------------------------------------------------------------------------------------------


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


def test_rejected_handoff_does_not_survive_into_the_next_attempt(world: World) -> None:
    """The second endpoint's handoff holds no blocks: nothing may be attached, least of all the first one's."""
    play = world.remote() >> start << Prefill(world.a) >> prefilled() << Check
    play = play >> checked(Rejection("side_channel_dead", "")) << Prefill(world.b)
    body = answer(params(remote_host="10.0.0.6", remote_block_ids=[[]]), prompt_tokens=5)
    play = play >> prefilled(body=body) << LOCAL >> connected << None >> sent << None
    assert play.exchange.stage is Stage.DECODE
    assert play >> decoded() << RELAY
    assert world.sent == [None]


# -- what becomes of each --------------------------------------------------------------------------------------


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


def test_handoff_without_blocks_counts_as_used(world: World) -> None:
    body = answer(params(remote_block_ids=[[]]), prompt_tokens=5)
    play = world.remote() >> start << Prefill(world.a) >> prefilled(body=body) << LOCAL
    assert play.exchange.handoff_outcomes == ["used"]
    assert play


# -- its blocks ------------------------------------------------------------------------------------------------


def test_blocks_are_checked_with_the_local_engines_size_if_nothing_better_is_known(world: World) -> None:
    world.a.facts = EngineFacts()
    assert world.remote() >> start << Prefill(world.a) >> prefilled(block_size=16) << Check
    world.a.facts = EngineFacts()
    assert world.remote() >> start << Prefill(world.a) >> prefilled(block_size=8) << LOCAL


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


def test_local_block_size_is_good_enough_for_both_checks(world: World) -> None:
    world.a.facts = EngineFacts()
    play = world.remote() >> start << Prefill(world.a) >> prefilled(block_size=16) << Check >> checked() << Decode
    assert play >> connected << None >> sent << None >> decoded() << RELAY


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
