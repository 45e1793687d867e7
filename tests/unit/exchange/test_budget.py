"""The recompute budget counts what it hands out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.exchange.budget import Budget


@pytest.mark.parametrize("limit", [0, 1, 4])
def test_number(limit: int) -> None:
    budget = Budget(limit, 0)
    assert [budget.take(10**9) for _ in range(limit + 1)] == [True] * limit + [False]
    if limit:
        budget.give_back(10**9)
        assert budget.take(1)


@pytest.mark.parametrize(
    ("held", "wanted", "granted"), [(0, 100, True), (0, 101, True), (60, 40, True), (60, 41, False), (100, 0, True)]
)
def test_tokens(held: int, wanted: int, granted: bool) -> None:
    budget = Budget(4, 100)
    if held:
        assert budget.take(held)
    assert budget.take(wanted) is granted
    assert budget.tokens == held + (wanted if granted else 0)


def test_no_limit_on_tokens() -> None:
    budget = Budget(2, 0)
    assert budget.take(10**12)
    assert budget.take(10**12)


@settings(max_examples=100, deadline=None, database=None)
@given(st.integers(0, 3), st.integers(0, 50), st.lists(st.one_of(st.integers(0, 60), st.none())))
def test_what_is_taken_comes_back(number: int, tokens: int, steps: list[int | None]) -> None:
    budget = Budget(number, tokens)
    held: list[int] = []
    for step in steps:
        if step is None and held:
            budget.give_back(held.pop())
        elif step is not None and budget.take(step):
            held.append(step)
        assert budget.in_flight == len(held) <= number
        assert budget.tokens == sum(held)
        assert not tokens or len(held) < 2 or budget.tokens <= tokens or sum(held[1:]) == 0
    for one in held:
        budget.give_back(one)
    assert (budget.in_flight, budget.tokens) == (0, 0)
