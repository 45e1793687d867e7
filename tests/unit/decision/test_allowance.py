"""Long gaps are a share of all gaps, lately."""

import pytest

from sidecar.decision.allowance import MEMORY_S, SHARE, Allowance


def busy(tokens_per_second: int = 1000, seconds: int = 10) -> Allowance:
    allowance = Allowance()
    for second in range(seconds + 1):
        allowance.generated(7000 + tokens_per_second * second, float(second))
    return allowance


def test_nothing_is_allowed_before_anything_is_known() -> None:
    allowance = Allowance()
    assert allowance.used(0) == 1
    allowance.generated(1_000_000, 5.0)
    assert allowance.used(0) == 1, "the count since the engine's start says nothing of lately"


def test_it_is_a_share_of_what_was_generated() -> None:
    assert busy().used(SHARE * 10_000 / 10) == pytest.approx(0.1, rel=0.2)
    assert busy().used(SHARE * 10_000) == 1


def test_what_was_taken_is_missing_until_it_is_forgotten() -> None:
    allowance = busy()
    allowance.take(20)
    assert allowance.used(0) == pytest.approx(20 / (SHARE * 10_000), rel=0.2)
    allowance.take(50)
    assert allowance.used(0) == 1
    for second in range(11, 11 + int(3 * MEMORY_S)):
        allowance.generated(7000 + 1000 * second, float(second))
    assert allowance.used(0) < 0.1


def test_an_idle_hour_saves_nothing_up() -> None:
    allowance = busy()
    allowance.generated(17_000, 3600.0)
    assert allowance.used(1) == 1


def test_a_restarted_engine_counts_anew() -> None:
    allowance = busy()
    used = allowance.used(1)
    allowance.generated(3, 10.0)
    assert allowance.used(1) == used
    allowance.generated(10_003, 10.0)
    assert allowance.used(1) == pytest.approx(used / 2, rel=0.1)


def test_what_others_take_counts_and_is_not_ours() -> None:
    allowance = Allowance()
    allowance.generated(0, 0.0)
    allowance.generated(100_000, 1.0)
    before = allowance.used(0)
    allowance.take_elsewhere(300)
    assert allowance.used(0) > before
    assert allowance.taken == 0
    allowance.take(2)
    assert allowance.taken == 2
