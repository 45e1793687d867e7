"""Percentiles, goodput, ratios, and the words that the report says of them."""

from __future__ import annotations

import pytest

from e2e.latency import numbers
from e2e.latency.numbers import Targets
from e2e.latency.scenarios import STREAM
from e2e.rounds import Spread
from tests.unit.latency.samples import TARGETS, interference, request, results, sample


def test_percentiles_are_interpolated() -> None:
    values = [40.0, 10.0, 20.0, 30.0]
    assert [numbers.percentile(values, percent) for percent in (0, 50, 100)] == [10, 25, 40]
    assert numbers.percentile(values, 90) == pytest.approx(37)
    assert numbers.percentile([7.0], 99) == 7


def test_there_is_no_percentile_of_nothing() -> None:
    with pytest.raises(ValueError, match="no values"):
        numbers.percentile([], 50)


def test_gaps_are_those_that_reach_into_the_window() -> None:
    stream = request(
        300, 300, 300, 9000, 500, kind=STREAM, ttft_ms=100
    )  # tokens at -400, -100, 200, ..., 9500, 10000
    assert numbers.gaps_ms(stream, window_s=9.6) == [300, 300, 9000, 500]
    assert numbers.gaps_ms(stream, window_s=9.5) == [300, 300, 9000]


def test_gaps_of_a_scenario_with_streams_are_the_streams() -> None:
    disturbed = sample("local", request(50, 50, kind=STREAM, ttft_ms=600), request(900))
    assert numbers.metric(disturbed, "itl_max", TARGETS) == 50
    assert numbers.metric(sample("local", request(50, 900)), "itl_max", TARGETS) == 900


def test_times_are_of_the_requests_that_began_in_the_window() -> None:
    one = sample("local", request(10, ttft_ms=100), request(30, ttft_ms=300), request(1, kind=STREAM, ttft_ms=9))
    assert numbers.metric(one, "ttft_p50", TARGETS) == 200
    assert numbers.metric(one, "e2e_max", TARGETS) == 330


def test_requests_that_failed_have_no_times_and_are_counted() -> None:
    broken = request(error="connection lost", ttft_ms=5) | {"ttft_ms": None, "e2e_ms": None, "token_ms": []}
    one = sample("local", broken)
    assert numbers.metric(one, "ttft_p50", TARGETS) is None
    assert numbers.metric(one, "itl_p99", TARGETS) is None
    assert numbers.metric(one, "failed", TARGETS) == 1
    assert numbers.metric(one, "goodput", TARGETS) == 0
    assert numbers.metric(sample("local"), "goodput", TARGETS) is None


@pytest.mark.parametrize(("ttft_ms", "gap_ms", "good"), [(1000, 200, True), (1001, 200, False), (1000, 201, False)])
def test_a_good_request_keeps_both_targets(ttft_ms: float, gap_ms: float, good: bool) -> None:
    assert numbers.is_good(request(gap_ms, gap_ms, ttft_ms=ttft_ms), 10.0, TARGETS) is good


def test_a_running_stream_is_good_by_its_gaps_alone() -> None:
    assert numbers.is_good(request(100, kind=STREAM, ttft_ms=5000), 10.0, TARGETS)
    assert not numbers.is_good(request(100, 300, kind=STREAM, ttft_ms=450), 10.0, TARGETS)


def test_tokens_are_told_apart() -> None:
    one = sample("remote", pulled=30)
    names = ("tokens_computed", "tokens_cached", "tokens_pulled", "tokens_prefilled")
    assert [numbers.metric(one, name, TARGETS) for name in names] == [70, 5, 30, 40]


def test_ratios_are_taken_within_a_round() -> None:
    rounds = [
        {"remote": interference("remote", 10), "local": interference("local", 100)},
        {"remote": interference("remote", 60), "local": interference("local", 200)},
        {"remote": interference("remote", 50)},  # no counterpart: no ratio
    ]
    assert numbers.ratio(rounds, "remote", "local", "itl_p99", TARGETS) == Spread(0.2, 0.1, pytest.approx(0.3))
    assert numbers.series(rounds, "remote", "itl_p99", TARGETS) == Spread(50, 10, 60)
    assert numbers.ratio(rounds, "remote", "direct", "itl_p99", TARGETS) is None


def verdicts(remote_ms: float, *, overhead_ms: float = 0.3, trouble: str = "") -> list[numbers.Verdict]:
    rounds = {
        "quiet": interference("quiet", 100),
        "held": interference("held", 105, "", overhead_ms),
        "local": interference("local", 1000),
        "remote": interference("remote", remote_ms, trouble, overhead_ms),
    }
    short = {name: rounds[name] for name in ("quiet", "local", "remote")}
    return numbers.verdicts(results(rounds) | results(short, scenario="one-token"), TARGETS)


def test_what_is_kept_holds() -> None:
    assert [verdict.word for verdict in verdicts(130)] == ["holds"] * 7


def test_what_is_not_kept_does_not() -> None:
    found = verdicts(151, overhead_ms=2.0)
    assert [verdict.holds for verdict in found] == [False, False, False, False, False, False, True]
    to_local = found[0]
    assert to_local.measured == Spread(pytest.approx(0.151), pytest.approx(0.151), pytest.approx(0.151))
    assert to_local.word == "**DOES NOT HOLD**"


def test_a_ratio_of_a_run_with_trouble_holds_nothing() -> None:
    to_local, _, to_quiet, *_ = verdicts(100, trouble="no token was pulled")
    assert not to_local.holds
    assert to_quiet.word == "**DOES NOT HOLD**: no token was pulled"


def test_what_was_not_measured_is_said_so() -> None:
    assert [verdict.word for verdict in numbers.verdicts({}, TARGETS)] == ["not measured"] * 7
    only_local = results({"local": interference("local", 1000)})
    assert [verdict.holds for verdict in numbers.verdicts(only_local, TARGETS)] == [None] * 7


def test_the_share_is_that_of_remote_requests_and_of_whole_engines() -> None:
    killed = interference("fallback", 100, overhead_ms=700)
    local = sample("auto", request(decision="local; reason=short", sidecar_overhead_ms=9.0))
    found = results({"remote": interference("remote", 100), "fallback": killed, "auto": local})
    assert numbers.overheads_ms(found) == [0.3]


def test_targets_are_the_callers() -> None:
    assert numbers.is_good(request(300), 10.0, Targets(ttft_ms=100, itl_ms=300))
