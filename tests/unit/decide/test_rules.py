"""The rules of others: what they know of the cache, and what follows."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from e2e.decide.rules import TARGET_HEADER, Router, dynamo, llm_d
from e2e.latency.measure import BLOCK_SIZE, MAX_BATCHED_TOKENS

PREFILL, DECODE = "127.0.0.1:8100", "http://127.0.0.1:8200"
Make = Callable[[str, str], Router]


def ids(count: int, first: int = 1000) -> list[int]:
    return list(range(first, first + count))


def is_remote(router: Router, prompt: list[int], answer: list[int] | None = None) -> bool:
    """One request from its beginning to its end."""
    leg = router.begin(prompt)
    remote = bool(leg.headers)
    assert leg.headers == (((TARGET_HEADER, PREFILL),) if remote else ())
    assert leg.base_url == ("" if remote else DECODE)
    router.first_token(prompt, leg)
    router.end(prompt, answer or [])
    return remote


@pytest.mark.parametrize(("tokens", "remote"), [(63, False), (64, True)])
def test_llm_d_counts_what_is_not_cached(tokens: int, remote: bool) -> None:
    assert is_remote(llm_d(64)(PREFILL, DECODE), ids(tokens)) is remote


def test_llm_d_knows_the_prompts_but_not_the_answers() -> None:
    router = llm_d(64)(PREFILL, DECODE)
    prompt, answer = ids(4 * BLOCK_SIZE), ids(2 * BLOCK_SIZE, 5000)
    assert is_remote(router, prompt, answer)
    assert not is_remote(router, [*prompt, *ids(20, 9000)])
    assert is_remote(router, [*prompt, *answer, *ids(20, 9000)]), "the answer counts as new"


def test_dynamo_knows_the_answers_too() -> None:
    router = dynamo(64)(PREFILL, DECODE)
    prompt, answer = ids(4 * BLOCK_SIZE), ids(2 * BLOCK_SIZE + 1, 5000)
    assert is_remote(router, prompt, answer)
    assert not is_remote(router, [*prompt, *answer, *ids(20, 9000)])


def test_dynamo_keeps_local_only_what_is_small_and_mostly_cached() -> None:
    router = dynamo(64)(PREFILL, DECODE)
    assert is_remote(router, ids(10)), "nothing of it is cached"
    prompt = ids(2 * BLOCK_SIZE)
    assert is_remote(router, prompt)
    assert not is_remote(router, [*prompt, *ids(63, 9000)])
    assert is_remote(router, [*prompt, *ids(64, 8000)])


def test_what_is_not_held_yet_is_not_cached() -> None:
    router = dynamo()(PREFILL, DECODE)
    prompt = ids(10 * BLOCK_SIZE)
    router.begin(prompt)
    assert is_remote(router, prompt)
    assert not is_remote(router, prompt)


def test_dynamo_by_load_goes_round_a_busy_prefill_engine() -> None:
    router = dynamo(64, busy=0.5)(PREFILL, DECODE)
    long = ids(MAX_BATCHED_TOKENS // 2 + 1)
    leg = router.begin(long)
    assert not is_remote(router, ids(500, 9000))
    router.first_token(long, leg)
    assert is_remote(router, ids(500, 20_000))


@pytest.mark.parametrize("make", [dynamo(64, busy=0.5), llm_d(64)])
def test_a_prefix_is_one_from_the_beginning(make: Make) -> None:
    router = make(PREFILL, DECODE)
    assert is_remote(router, ids(4 * BLOCK_SIZE))
    assert is_remote(router, [7, *ids(4 * BLOCK_SIZE)])
