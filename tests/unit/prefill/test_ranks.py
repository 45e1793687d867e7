"""Ranks behind one endpoint: what fails is left alone, the others are not."""

from __future__ import annotations

import pytest

from sidecar.prefill.address import AllowList, parse
from sidecar.prefill.breaker import FAILURES_TO_OPEN, State
from sidecar.prefill.endpoints import Endpoints
from sidecar.prefill.ranks import MAX_RANKS, PAUSE_S, Ranks, rank_of_engine, rank_of_header


@pytest.mark.parametrize(
    ("engine_id", "rank"),
    [
        ("544eedc5-79f9-4a67-8175-98a2749bd141_dp0", 0),
        ("x_dp255", 255),
        ("544eedc5-79f9-4a67-8175-98a2749bd141", -1),
        ("x_dp", -1),
        ("x_dp1234", -1),
        ("x_dp1_", -1),
        ("x_dp1\n", -1),
        ("_dp1_dp2", 2),
        ("", -1),
    ],
)
def test_rank_of_an_engine_id(engine_id: str, rank: int) -> None:
    assert rank_of_engine(engine_id) == rank


@pytest.mark.parametrize(
    ("values", "rank"),
    [
        ([], -1),
        ([b"0"], 0),
        ([b"17"], 17),
        ([b"x"], -1),
        ([b"-1"], -1),
        ([b"1234"], -1),
        ([b""], -1),
        ([b"1", b"2"], 1),
    ],
)
def test_rank_of_a_header(values: list[bytes], rank: int) -> None:
    assert rank_of_header(values) == rank


def test_a_rank_that_fails_at_once_is_left_alone_for_a_while() -> None:
    ranks = Ranks()
    ranks.failed(1, 100.0, at_once=True)
    assert not ranks.admits(1, 100.0)
    assert not ranks.admits(1, 100.0 + PAUSE_S - 0.1)
    assert ranks.admits(0, 100.0)
    assert ranks.admits(1, 100.0 + PAUSE_S)


def test_other_failures_count_in_a_row() -> None:
    ranks = Ranks()
    for _ in range(FAILURES_TO_OPEN - 1):
        ranks.failed(1, 100.0, at_once=False)
    ranks.succeeded(1)
    for _ in range(FAILURES_TO_OPEN - 1):
        ranks.failed(1, 100.0, at_once=False)
    assert ranks.admits(1, 100.0)
    ranks.failed(1, 100.0, at_once=False)
    assert not ranks.admits(1, 100.0)
    # The first failure after the pause begins the next one.
    ranks.failed(1, 100.0 + PAUSE_S, at_once=False)
    assert not ranks.admits(1, 100.0 + PAUSE_S)


def test_what_engines_call_themselves_takes_no_memory() -> None:
    ranks = Ranks()
    for rank in range(2 * MAX_RANKS):
        ranks.failed(rank, 100.0, at_once=True)
    assert ranks.admits(MAX_RANKS, 100.0)
    assert not ranks.admits(MAX_RANKS - 1, 100.0)


def test_a_failure_of_a_rank_is_not_the_endpoints() -> None:
    endpoints = Endpoints([parse("10.0.0.5:8000"), parse("10.0.0.6:8000")], AllowList([]), lambda: 100.0)
    first, second = endpoints.members
    for _ in range(FAILURES_TO_OPEN):
        endpoints.failed(first, at_once=True, trial=0, rank=1)
    assert first.breaker.state is State.CLOSED
    assert list(endpoints.of_rank(endpoints.members, 1)) == [second]
    assert list(endpoints.of_rank(endpoints.members, 0)) == [first, second]
    assert endpoints.of_rank(endpoints.members, -1) is endpoints.members
    endpoints.brought_kv(first, 1)
    assert list(endpoints.of_rank(endpoints.members, 1)) == [first, second]
