"""The fleet on paper: engines keep their clocks, rules get what they are to see, and nothing is lost."""

from collections import Counter

import pytest

from e2e.sim.__main__ import chance, gap_quantile, joins, quantile, report
from e2e.sim.engines import DecodeEngine, PrefillEngine, Speeds
from e2e.sim.fleet import OURS, RULES, Fleet
from e2e.sim.trace import Asked, mixed

SPEEDS = Speeds(prefill=(0.0, 1.0, 0.0), pull=(0.5, 0.0), step=(0.01, 0.0))
"""A second for a thousand tokens, half a second to pull, ten milliseconds a step."""


def test_prompts_wait_for_each_other_and_streams_for_prompts() -> None:
    engine = DecodeEngine(SPEEDS, streams=3)
    assert engine.compute(0.0, 1000, 0) == 1.0
    assert engine.compute(0.5, 1000, 0) == 2.0
    assert engine.stopped == 2.0
    assert engine.gaps == [(1.01, 3)] * 2
    prefill = PrefillEngine(SPEEDS)
    assert [prefill.compute(0.0, 500) for _ in range(3)] == [0.5, 1.0, 1.5]


def test_one_request_by_each_way() -> None:
    asked = [Asked(0.0, 0, 2000, 0, 10)]
    local = Fleet("always local", 1, 1, speeds=SPEEDS).run(asked)
    remote = Fleet("always remote", 1, 1, speeds=SPEEDS).run(asked)
    assert local.ttft == [pytest.approx(2.0)]
    assert remote.ttft == [pytest.approx(2.51)]
    assert (local.remote, remote.remote) == (0, 1)


def test_a_stream_ends_later_by_what_it_stood_still() -> None:
    fleet = Fleet("always local", 1, 1, speeds=SPEEDS)
    fleet.run([Asked(0.0, 0, 100, 0, 200), Asked(1.0, 0, 3000, 0, 1)])
    assert fleet.pods[0].engine.streams == 0
    assert fleet.now == pytest.approx(0.1 + 200 * 0.01 + 3.0, abs=0.05)


@pytest.mark.parametrize("rule", RULES)
def test_every_request_is_accounted_for(rule: str) -> None:
    trace = mixed(6, 2.0, 20.0, seed=3)
    fleet = Fleet(rule, 6, 2)
    seen = fleet.run(trace)
    assert len(seen.ttft) == len(trace)
    for pod in fleet.pods:
        assert pod.engine.streams == pod.rules.local_ahead == pod.budget.in_flight == 0
        assert all(one.in_flight == one.tokens_in_flight == 0 for one in pod.endpoints)


def test_the_dead_are_left_alone_and_the_budget_holds() -> None:
    trace = mixed(20, 2.0, 40.0, seed=4)
    fleet = Fleet(OURS, 20, 8, fail_at=20.0)
    seen = fleet.run(trace)
    assert len(seen.ttft) + seen.refused == len(trace)
    assert 0 < seen.recomputed < len(trace) / 10
    assert seen.most_recomputes <= 4


def test_no_herd_on_a_new_endpoint() -> None:
    fleet = Fleet("always remote", 60, 12, join_at=(10.0, 15.0, 20.0))
    seen = fleet.run(mixed(60, 2.0, 30.0, seed=5))
    assert seen.new_fair > 200, "enough of them that chance is small"
    assert 0.8 < seen.share_of_new < 1.25


def test_the_fair_share_is_that_of_each_moment() -> None:
    """One endpoint, joined by two more: counted are the prompts of each one's first ten seconds."""
    fleet = Fleet("always remote", 1, 3, speeds=SPEEDS, join_at=(10.0, 15.0))
    seen = fleet.run([Asked(float(at), 0, 10, 0, 1) for at in (1, 9, 11, 12, 16, 17, 18, 21, 26)])
    assert seen.new_fair == pytest.approx(2 * 1 / 2 + 3 * 2 / 3 + 1 / 3)
    assert 0 < seen.new_prompts <= 6
    assert seen.share_of_new == seen.new_prompts / seen.new_fair


def test_nobody_is_asked_before_it_joins() -> None:
    fleet = Fleet("always remote", 1, 2, speeds=SPEEDS, join_at=(10.0,))
    fleet.run([Asked(float(at), 0, 10, 0, 1) for at in range(10)])
    assert [engine.prompts for engine in fleet.prefill] == [10, 0]


def test_what_chance_makes_of_a_count() -> None:
    assert chance(10, 10.0) == pytest.approx((0.38, 1.62), abs=0.01)
    low, high = chance(1000, 1000.0)
    assert (low, high) == pytest.approx((0.94, 1.06), abs=0.01)
    assert chance(0, 0.0) == (0.0, 0.0)


def test_endpoints_join_when_all_of_their_first_seconds_are_seen() -> None:
    assert joins(120.0)[0] == 10.0
    assert joins(120.0)[-1] == 110.0
    assert len(joins(120.0)) == 21
    assert joins(8.0) == (4.0,)


def test_same_seed_same_trace() -> None:
    assert mixed(3, 2.0, 10.0, seed=1) == mixed(3, 2.0, 10.0, seed=1) != mixed(3, 2.0, 10.0, seed=2)
    assert all(0 <= asked.cached < asked.tokens for asked in mixed(3, 2.0, 60.0, seed=1))


def test_quantiles() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([], 0.5) == 0.0
    assert gap_quantile(Counter({0.01: 98, 0.5: 2}), 0.98) == 0.01
    assert gap_quantile(Counter({0.01: 98, 0.5: 2}), 0.99) == 0.5


def test_report() -> None:
    text = report(((1, 1), (4, 2)), seconds=10.0)
    assert all(f"| {rule} |" in text for rule in RULES)
    assert "4 decode, 2 prefill" in text
