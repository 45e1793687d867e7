"""The breaker of an endpoint: what opens it, how long, and who may try."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.prefill.breaker import FAILURES_TO_OPEN, FIRST_PAUSE_S, LONGEST_PAUSE_S, Breaker, State

JITTER = 1.2


class NoJitter(random.Random):
    def random(self) -> float:
        return 0.0


@pytest.fixture
def breaker() -> Breaker:
    return Breaker(NoJitter())


def opened(breaker: Breaker, now: float = 0.0) -> Breaker:
    breaker.failed(now, at_once=True)
    assert breaker.state is State.OPEN
    return breaker


def test_opens_after_failures_in_a_row(breaker: Breaker) -> None:
    for _ in range(FAILURES_TO_OPEN - 1):
        breaker.failed(0.0)
        assert breaker.state is State.CLOSED
        assert breaker.admits(0.0)
    breaker.failed(0.0)
    assert breaker.state is State.OPEN
    assert not breaker.admits(0.0)


def test_success_in_between_starts_the_count_anew(breaker: Breaker) -> None:
    for _ in range(10):
        for _ in range(FAILURES_TO_OPEN - 1):
            breaker.failed(0.0)
        assert breaker.state is State.CLOSED
        breaker.succeeded()


def test_opens_at_once(breaker: Breaker) -> None:
    opened(breaker)


def test_pause(breaker: Breaker) -> None:
    opened(breaker, 100.0)
    assert not breaker.admits(100.0 + FIRST_PAUSE_S - 0.001)
    assert breaker.admits(100.0 + FIRST_PAUSE_S)
    assert breaker.state is State.OPEN, "asking changes nothing"


def test_one_trial_at_a_time(breaker: Breaker) -> None:
    opened(breaker)
    assert breaker.begin() == 1
    assert breaker.state is State.HALF_OPEN
    assert not breaker.admits(1e9)


def test_trial_that_says_nothing_leaves_room_for_the_next(breaker: Breaker) -> None:
    opened(breaker)
    breaker.abandoned(breaker.begin())
    assert breaker.state is State.HALF_OPEN
    assert breaker.admits(0.0)


def test_a_trial_of_an_earlier_opening_does_not_speak_for_the_present_one(breaker: Breaker) -> None:
    opened(breaker)
    old = breaker.begin()
    breaker.succeeded()  # an older request's pull worked
    opened(breaker)
    new = breaker.begin()
    breaker.abandoned(old)
    assert not breaker.admits(1e9), "the new trial is under way"
    breaker.failed(1.0, trial=old)
    assert breaker.state is State.HALF_OPEN
    breaker.failed(1.0, trial=new)
    assert breaker.state is State.OPEN


def test_closed_breaker_has_no_trials(breaker: Breaker) -> None:
    assert breaker.begin() == 0
    assert breaker.begin() == 0
    assert breaker.admits(0.0)


def test_pause_doubles_with_every_failed_trial_up_to_a_bound(breaker: Breaker) -> None:
    now = 0.0
    opened(breaker, now)
    pause = FIRST_PAUSE_S
    for _ in range(10):
        assert not breaker.admits(now + pause - 0.001)
        now += pause
        assert breaker.admits(now)
        breaker.failed(now, trial=breaker.begin())
        pause = min(pause * 2, LONGEST_PAUSE_S)
    assert pause == LONGEST_PAUSE_S


def test_success_forgets_the_long_pause(breaker: Breaker) -> None:
    opened(breaker)
    breaker.failed(0.0, trial=breaker.begin())
    breaker.begin()
    breaker.succeeded()
    assert breaker.state is State.CLOSED
    opened(breaker, 50.0)
    assert breaker.admits(50.0 + FIRST_PAUSE_S)


@pytest.mark.parametrize("at_once", [True, False])
def test_late_failures_of_older_requests_tell_nothing_new(breaker: Breaker, at_once: bool) -> None:
    opened(breaker, 0.0)
    breaker.failed(0.9, at_once=at_once)
    assert breaker.admits(FIRST_PAUSE_S), "they must not push the trial further and further away"
    breaker.begin()
    breaker.failed(1.0, at_once=at_once)
    assert breaker.state is State.HALF_OPEN, "only the trial says how the trial went"
    assert not breaker.admits(1e9)


def test_late_success_of_an_older_request_closes(breaker: Breaker) -> None:
    opened(breaker)
    breaker.succeeded()
    assert breaker.state is State.CLOSED


def test_jitter_is_at_most_a_fifth() -> None:
    starts = set()
    for seed in range(50):
        breaker = opened(Breaker(random.Random(seed)))
        assert not breaker.admits(FIRST_PAUSE_S - 0.001)
        assert breaker.admits(FIRST_PAUSE_S * JITTER)
        starts.add(breaker._reopens_at)
    assert len(starts) == 50, "all sidecars try in the same instant"


@settings(max_examples=150, deadline=None, database=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["begin", "failed", "at once", "succeeded", "abandoned"]), st.integers(0, 40))
    )
)
def test_never_stuck(steps: list[tuple[str, int]]) -> None:
    """Whatever happened: with no trial under way, an endpoint is tried again within the longest pause."""
    breaker = Breaker(random.Random(0))
    now = 0.0
    trial = 0
    for step, wait_s in steps:
        now += wait_s
        if step == "begin" and breaker.admits(now):
            trial = breaker.begin() or trial
        elif step in ("failed", "at once"):
            breaker.failed(now, at_once=step == "at once", trial=trial)
            trial = 0
        elif step == "succeeded":
            breaker.succeeded()
            trial = 0
        elif step == "abandoned" and trial:
            breaker.abandoned(trial)
            trial = 0
    if trial:
        breaker.abandoned(trial)
    assert breaker.admits(now + LONGEST_PAUSE_S * JITTER)


def test_metric_values() -> None:
    assert [(state.name, int(state)) for state in State] == [("CLOSED", 0), ("HALF_OPEN", 1), ("OPEN", 2)]
