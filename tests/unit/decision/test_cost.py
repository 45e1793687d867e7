"""The cost rule: what it learns, what it then predicts, and which way it decides."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.decision.cost import REACH, SAMPLES_TO_KNOW, TRIED_EVERY, TRIED_EVERY_MAX, Costs, Fit, Inputs, Verdict


def here(new: int, cached: int = 0) -> float:
    """Seconds that the decode engine of these tests takes for a prompt."""
    u, c = new / 1000, cached / 1000
    return 0.01 + 0.5 * u + 0.02 * u * (u / 2 + c)


def prefill(new: int) -> tuple[float, float, float]:
    """What `Fit` makes of a prompt of which nothing is cached."""
    return 1.0, new / 1000, (new / 1000) ** 2 / 2


def fitted(weight: float = 1.0, *, noise: float = 0.0, there: float = 1.0, pull: float = 0.1) -> Costs:
    """Both ways known: the prefill engine takes `there` times as long, a pull `pull` s for a thousand tokens."""
    costs = Costs.make(weight)
    draw = random.Random(1)
    for _ in range(40):
        tokens, cached = draw.randrange(50, 4000), draw.choice((0, 0, 500))
        off = 1 + noise * draw.uniform(-1, 1)
        costs.computed_here(tokens, cached, here(tokens, cached) * off)
        costs.computed_there(tokens, there * here(tokens) * off)
        costs.pulled(tokens, 0.02 + pull * tokens / 1000 * off)
    return costs


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_predicts_what_it_has_seen(noise: float) -> None:
    costs = fitted(noise=noise)
    for tokens in (100, 1000, 3000, 8000):
        verdict = costs.weigh(Inputs(tokens))
        assert not verdict.static
        assert verdict.local_seconds == pytest.approx(here(tokens), rel=0.1 + noise)
        assert verdict.remote_seconds == pytest.approx(here(tokens) + 0.02 + tokens / 10000, rel=0.1 + noise)


def test_follows_a_change() -> None:
    costs = fitted()
    for _ in range(150):
        costs.computed_here(2000, 0, 3 * here(2000))
        costs.computed_here(500, 0, 3 * here(500))
    assert costs.weigh(Inputs(2000)).local_seconds == pytest.approx(3 * here(2000), rel=0.1)


def test_one_stalled_step_does_not_bend_it() -> None:
    costs = fitted(noise=0.1)
    before = costs.weigh(Inputs(1000)).local_seconds
    costs.computed_here(1000, 0, 600.0)
    assert costs.weigh(Inputs(1000)).local_seconds < 1.5 * before


@pytest.mark.parametrize("lengths", [(2000,), (12_000,), (500, 6000), (300, 301, 302)])
@pytest.mark.parametrize("seed", range(4))
def test_hours_of_the_same_prompts(lengths: tuple[int, ...], seed: int) -> None:
    """What they do not tell (which part of the time is whose) must not become anything."""
    costs = Costs.make(1.0)
    draw = random.Random(seed)
    for turn in range(4000):
        tokens = lengths[turn % len(lengths)]
        costs.computed_here(tokens, 0, here(tokens) * draw.uniform(0.8, 1.2))
        costs.computed_there(tokens, here(tokens) * draw.uniform(0.8, 1.2))
        costs.pulled(tokens, (0.02 + tokens / 10000) * draw.uniform(0.8, 1.2))
        if turn < 100:
            continue
        verdict = costs.weigh(Inputs(tokens))
        assert verdict.local_seconds == pytest.approx(here(tokens), rel=0.25)
        assert verdict.remote_seconds == pytest.approx(here(tokens) + 0.02 + tokens / 10000, rel=0.25)
    shorter, longer = min(lengths) // 2, max(lengths) * 2
    assert 0.2 * here(shorter) < costs.local.at(prefill(shorter)) < 2 * here(shorter)
    assert 0.5 * here(longer) < costs.local.at(prefill(longer)) < 3 * here(longer)


@settings(max_examples=100, deadline=None, database=None)
@given(st.lists(st.tuples(st.integers(1, 100_000), st.floats(0, 1000)), max_size=60), st.integers(1, 200_000))
def test_never_negative_never_nan(samples: list[tuple[int, float]], tokens: int) -> None:
    costs = Costs.make(1.0)
    for seen, seconds in samples:
        costs.computed_here(seen, 0, seconds)
        costs.computed_there(seen, seconds)
        costs.pulled(seen, seconds)
    verdict = costs.weigh(Inputs(tokens, streams=2.0))
    for value in (verdict.local_seconds, verdict.remote_seconds, verdict.stall_seconds):
        assert 0 <= value < float("inf")
    # More to compute is never thought to cost less.
    more = costs.weigh(Inputs(tokens + 1000, streams=2.0))
    if not more.static:
        assert more.local_seconds >= verdict.local_seconds


# -- which way -------------------------------------------------------------------------------------------------


def way(verdict: Verdict) -> tuple[str, str]:
    return "remote" if verdict.remote else "local", verdict.reason


def test_idle_decode_computes_by_itself() -> None:
    """The same engine there, and the way: remote costs more and spares nobody anything."""
    assert way(fitted().weigh(Inputs(2000))) == ("local", "decode_idle")


def test_what_ran_a_while_ago_is_no_stream() -> None:
    assert way(fitted(weight=1000.0).weigh(Inputs(2000, streams=0.4))) == ("local", "decode_idle")


def test_running_streams_are_spared() -> None:
    assert way(fitted().weigh(Inputs(2000, streams=4))) == ("remote", "decode_busy")


def test_rare_stalls_are_cheap() -> None:
    """A short prompt before a busy prefill engine: it would wait longer than the streams lose, and no percentile of
    theirs sees that while it is rare."""
    costs = fitted(weight=30.0)

    def is_remote(tokens: int, used: float, streams: int = 4) -> bool:
        return costs.weigh(Inputs(tokens, streams=streams, prefill_ahead=2000, long_gaps_used=used)).remote

    assert is_remote(200, 1)
    assert not is_remote(200, 0.1)
    assert is_remote(200, 0.9)
    assert is_remote(4000, 0.1), "a long stall is dear however rare"
    assert not costs.weigh(Inputs(200, streams=0, long_gaps_used=1)).remote, "nobody is stalled"


def test_streams_that_count_for_nothing() -> None:
    assert way(fitted(weight=0.0).weigh(Inputs(2000, streams=4))) == ("local", "cost")


def test_a_faster_prefill_engine_wins_by_cost() -> None:
    assert way(fitted(there=0.1, pull=0.01).weigh(Inputs(2000))) == ("remote", "cost")


def test_busy_prefill() -> None:
    costs = fitted(there=0.5, pull=0.05)
    assert costs.weigh(Inputs(2000, streams=1)).remote
    assert way(costs.weigh(Inputs(2000, streams=1, prefill_ahead=20_000))) == ("local", "prefill_busy")


def test_what_waits_here_counts() -> None:
    costs = fitted(there=1.2)
    assert not costs.weigh(Inputs(2000)).remote
    assert costs.weigh(Inputs(2000, waiting=2)).remote
    assert costs.weigh(Inputs(2000, local_ahead=8000)).remote


def test_what_is_cached_counts_for_both() -> None:
    """Cached here, it need not be computed here nor pulled; the prefill engine computes it all the same."""
    costs = fitted(there=0.5)
    cold, warm = costs.weigh(Inputs(3000, streams=1)), costs.weigh(Inputs(3000, 2500, streams=1))
    assert cold.remote
    assert not warm.remote
    assert warm.local_seconds < cold.local_seconds
    assert warm.remote_seconds < cold.remote_seconds


def test_sides_are_not_changed_for_a_hair() -> None:
    costs = fitted(there=0.8, pull=0.1)
    inputs = Inputs(2000, streams=0.6)
    ratio = costs.weigh(inputs)
    even = (ratio.local_seconds + ratio.stall_seconds) / ratio.remote_seconds
    nearly = Inputs(2000, streams=(ratio.remote_seconds / ratio.local_seconds - 1))  # both cost the same
    assert even > 0
    for was_remote in (True, False):
        costs.was_remote = was_remote
        assert costs.weigh(nearly).remote is was_remote


# -- before it knows -------------------------------------------------------------------------------------------


def test_static_until_both_ways_are_known() -> None:
    costs = Costs.make(1.0)
    for _ in range(SAMPLES_TO_KNOW):
        verdict = costs.weigh(Inputs(1000, streams=3))
        assert (way(verdict), verdict.static) == (("remote", "long"), "unfitted")
        costs.computed_there(1000, here(1000))
        costs.pulled(1000, 0.1)
    assert costs.weigh(Inputs(1000, streams=3)).static, "nothing is known of this side"


def test_learns_this_side_while_nobody_is_stalled_by_it() -> None:
    costs = Costs.make(1.0)
    ways = [way(costs.weigh(Inputs(1000))) for _ in range(4)]
    assert ways == [("remote", "long"), ("local", "decode_idle")] * 2


def test_learns_this_side_beside_streams_where_that_is_rare() -> None:
    costs = Costs.make(30.0)

    def ways(tokens: int, used: float) -> list[bool]:
        return [costs.weigh(Inputs(tokens, streams=3, long_gaps_used=used)).remote for _ in range(4)]

    assert ways(200, 0.9) == [True, False, True, False]
    assert ways(200, 1) == [True] * 4, "streams would notice"
    assert ways(300, 0.9) == [True] * 4, "they would lose too much"


def test_does_not_try_what_is_far_longer_than_anything_seen() -> None:
    costs = Costs.make(1.0)
    costs.computed_here(1000, 0, here(1000))
    ways = {way(costs.weigh(Inputs(int(1000 * REACH) + 1))) for _ in range(6)}
    assert ways == {("remote", "long")}


def test_reach_of_a_fit() -> None:
    fit = Fit(0.0, 0.0)
    for _ in range(SAMPLES_TO_KNOW):
        assert not fit.knows(100)
        fit.add((1.0, 2.0), 1.0, 2000, 0.0)
    assert fit.knows(8000)
    assert not fit.knows(8001)


# -- after a slow spell ----------------------------------------------------------------------------------------


def spell(
    per_second: float, *, until_s: float, slow_s: tuple[float, float] = (100.0, 160.0)
) -> list[tuple[float, Verdict]]:
    """Prompts of one length, one after the other, at a decode engine that is idle: what was decided when. The
    prefill engine is four times as quick, and 40 times slower than that from `slow_s[0]` to `slow_s[1]`."""
    costs, draw = fitted(noise=0.2, there=0.25, pull=0.02), random.Random(1)
    found = []
    for n in range(int(until_s * per_second)):
        at = n / per_second
        verdict = costs.weigh(Inputs(3000))
        found.append((at, verdict))
        noise = draw.uniform(0.8, 1.2)
        if verdict.remote:
            slower = 40 if slow_s[0] <= at < slow_s[1] else 1
            costs.computed_there(3000, 0.25 * here(3000) * slower * noise, at)
            costs.pulled(3000, 0.08 * noise, at)
        else:
            costs.computed_here(3000, 0, here(3000) * noise, at)
    return found


@pytest.mark.parametrize("per_second", [1, 10, 50])
def test_a_slow_spell_is_forgotten_within_about_as_long_as_it_took(per_second: float) -> None:
    """Nothing goes remote, so nothing is learnt of it: but for a prompt now and then."""
    found = spell(per_second, until_s=400)
    slow = [verdict.remote for at, verdict in found if 100 <= at < 160]
    assert sum(slow) < len(slow) / 2
    assert all(verdict.remote for at, verdict in found if at > 160 + 75)


def test_a_way_that_stays_dear_is_tried_ever_more_seldom() -> None:
    found = spell(10, until_s=1000, slow_s=(0.0, 1000.0))
    tried = [n for n, (_, verdict) in enumerate(found) if verdict.static == "unseen"]
    assert [after - before for before, after in pairwise(tried)][:3] == [64, 128, 256]
    late = [verdict.remote for at, verdict in found if at > 100]
    assert 0 < sum(late) <= len(late) / TRIED_EVERY_MAX + 1
    assert {way(verdict) for _, verdict in found if verdict.static == "unseen"} == {("remote", "long")}


def test_a_dear_way_is_not_tried_with_the_dearest_prompt() -> None:
    costs = fitted(there=40)
    lengths = [300, 300, 300, 12_000] * 400
    tried = [tokens for tokens in lengths if costs.weigh(Inputs(tokens)).remote]
    assert tried
    assert set(tried) == {300}


def test_a_stalled_try_does_not_make_a_way_dear_for_good() -> None:
    """What is measured of it counts for much, but not upwards."""
    costs = fitted(noise=0.2)
    while not (verdict := costs.weigh(Inputs(2000))).remote:
        pass
    assert verdict.static == "unseen"
    costs.computed_there(2000, 60.0)
    costs.pulled(2000, 60.0)
    assert costs.weigh(Inputs(2000)).remote_seconds < 3 * verdict.remote_seconds


def test_a_queue_that_is_counted_needs_no_trying() -> None:
    costs = fitted(there=0.5, pull=0.05)
    for _ in range(1000):
        assert way(costs.weigh(Inputs(2000, streams=1, prefill_ahead=20_000))) == ("local", "prefill_busy")


def test_a_way_that_is_taken_for_the_sake_of_streams_needs_no_trying() -> None:
    costs = fitted(there=3)
    for _ in range(100):
        assert not any(costs.weigh(Inputs(2000)).remote for _ in range(TRIED_EVERY - 1))
        assert way(costs.weigh(Inputs(2000, streams=40))) == ("remote", "decode_busy")


def test_samples_fade_with_time_too() -> None:
    """Few prompts: fifty would be three minutes."""
    costs = fitted(there=1.0)
    for n in range(40):
        costs.computed_there(2000, 5 * here(2000), float(n))
    assert costs.prefill.at(prefill(2000)) > 3 * here(2000)
    for n in range(20):
        costs.computed_there(2000, here(2000), 40.0 + 3 * n)
    assert costs.prefill.at(prefill(2000)) < 1.5 * here(2000)


@pytest.mark.parametrize("every_s", [20.0, 1000.0])
def test_seldom_samples_are_remembered_all_the_same(every_s: float) -> None:
    """Eight of them, whatever their age: one noisy one must not be all that is known."""
    costs, draw = Costs.make(1.0), random.Random(3)
    for n in range(400):
        tokens = draw.choice((500, 1000, 4000))
        costs.computed_there(tokens, here(tokens) * draw.uniform(0.8, 1.2), n * every_s)
        if n > 20:
            assert costs.prefill.at(prefill(2000)) == pytest.approx(here(2000), rel=0.25)
