"""Where conversations belong among many endpoints: what the choice among few promises holds there too."""

from __future__ import annotations

import random

from sidecar.prefill.address import Address, AllowList
from sidecar.prefill.endpoints import Endpoint, Endpoints
from sidecar.prefill.homes import Homes

MANY = 200
TALKS = list(map(random.Random(5).getrandbits, [32] * 4000))


def world(count: int = MANY) -> Endpoints:
    return Endpoints([Address(f"p{number}", 1) for number in range(count)], AllowList([]), lambda: 0.0)


def pick(endpoints: Endpoints, talk: int) -> Endpoint:
    found = endpoints.choose(endpoints.members, [], ordered=False, may_repeat=False, conversation=talk, tokens=1000)
    assert found is not None
    return found


def test_one_that_is_gone_moves_only_its_own() -> None:
    members = world().members
    before = [Homes(members, salt=7).of(talk) for talk in TALKS]
    gone = before[0]
    without = Homes([one for one in members if one is not gone], salt=7)
    assert all(without.of(talk) is then for talk, then in zip(TALKS, before, strict=True) if then is not gone)
    assert len({without.of(talk) for talk, then in zip(TALKS, before, strict=True) if then is gone}) > 1


def test_those_that_may_be_used_keep_their_places() -> None:
    homes = Homes(world().members, salt=7)
    first = homes.of(TALKS[0])
    some = homes.only(lambda one: one is not first)
    assert some.of(TALKS[0]) is not first
    assert all(some.of(talk) is homes.of(talk) for talk in TALKS if homes.of(talk) is not first)


def test_none_gets_far_more_than_its_share() -> None:
    homes = Homes(world().members, salt=7)
    talks = random.Random(6)
    given = [homes.of(talks.getrandbits(32)) for _ in range(200 * MANY)]
    assert max(map(given.count, set(given))) < 1.5 * 200


def test_another_sidecar_sends_it_elsewhere() -> None:
    members = world().members
    assert len({Homes(members, salt=salt * 0x9E3779B97F4A7C15).of(7).label for salt in range(50)}) > 25


def test_choice_among_many_keeps_a_conversation() -> None:
    endpoints = world()
    before = {talk: pick(endpoints, talk) for talk in TALKS[:500]}
    assert all(pick(endpoints, talk) is home for talk, home in before.items())
    assert len({*before.values()}) > MANY / 2
    gone = before[TALKS[0]]
    endpoints.failed(gone, at_once=True, trial=0)
    assert all((pick(endpoints, talk) is home) is (home is not gone) for talk, home in before.items())


def test_news_of_discovery_count_at_once() -> None:
    endpoints = Endpoints([], AllowList([]), lambda: 0.0)
    addresses = [Address(f"p{number}", 1) for number in range(MANY)]
    endpoints.discovered(dict.fromkeys(addresses, True))
    before = {talk: pick(endpoints, talk) for talk in TALKS[:500]}
    gone = before[TALKS[0]]
    endpoints.discovered({address: address != gone.address for address in addresses})
    after = {talk: pick(endpoints, talk) for talk in TALKS[:500]}
    assert gone not in after.values()
    assert all(after[talk] is home for talk, home in before.items() if home is not gone)
