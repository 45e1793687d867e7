"""Endpoints that discovery brings and takes away: who gets requests, and what is kept of those that left."""

import random

import pytest

from sidecar.prefill.address import Address
from sidecar.prefill.breaker import State
from sidecar.prefill.endpoints import (
    DEPARTED_FOR_S,
    FIRST_SHARE,
    MAX_DISCOVERED,
    MAX_ENDPOINTS,
    WARM_IN_S,
    NotAllowed,
)
from tests.unit.prefill.world import Discovered


def test_who_joins_and_who_leaves() -> None:
    world = Discovered("s:1", allow=())
    assert world.labels() == ["s:1"]
    assert world.tell("b:1", "a:1") == (["a:1", "b:1"], [])
    assert world.labels() == ["s:1", "a:1", "b:1"]
    assert world.tell("b:1", "c:1") == (["c:1"], ["a:1"])
    assert world.labels() == ["s:1", "b:1", "c:1"]
    assert world.tell("b:1", "c:1") == ([], [])
    assert world.heard == [("learned", "a:1"), ("learned", "b:1"), ("learned", "c:1"), ("forgotten", "a:1")]


def test_static_endpoints_stay_whatever_the_source_says() -> None:
    world = Discovered("s:1")
    world.tell("s:1", "a:1")
    assert world.labels() == ["s:1", "a:1"]
    world.tell(unready=("s:1",))
    assert world.labels() == ["s:1"]
    assert world.labels("s:1") == ["s:1"]
    world.tell()
    assert world.labels() == ["s:1"]
    assert not world.configured[0].leaving


def test_discovered_endpoints_are_allowed_targets_and_nothing_else_is() -> None:
    """Host and port."""
    world = Discovered(allow=())
    with pytest.raises(NotAllowed):
        world.candidates([b"a:1"])
    world.tell("a:1")
    assert world.labels("a:1") == ["a:1"]
    for foreign in (b"a:2", b"b:1"):
        with pytest.raises(NotAllowed):
            world.candidates([foreign])


def test_a_header_that_is_a_moment_behind() -> None:
    """What it names has just left: the others, as long as the gateway may not know; foreign again after that."""
    world = Discovered(allow=())
    world.tell("a:1", "b:1")
    world.tell("b:1")
    assert world.labels("a:1") == ["b:1"]
    assert world.candidates([b"a:1"]) is world.members, "in no order"
    assert world.labels("a:1, b:1") == ["b:1"]
    world.clock += DEPARTED_FOR_S
    with pytest.raises(NotAllowed):
        world.candidates([b"a:1"])


def test_a_header_that_names_what_is_not_ready_yet() -> None:
    """For as long as the source says so. --prefill-allow does not change that."""
    world = Discovered("s:1", allow=("any",))
    world.tell(unready=("a:1",))
    world.clock += 10 * DEPARTED_FOR_S
    assert world.labels("a:1") == ["s:1"]
    world.tell("a:1")
    assert world.labels("a:1") == ["a:1"]
    world.tell()
    assert world.labels("a:1") == ["s:1"], "it has left"
    world.clock += DEPARTED_FOR_S
    assert world.labels("a:1") == ["a:1"], "the flag allows it"


def test_nothing_new_is_sent_to_one_that_left() -> None:
    """Not even a second attempt of a request that was decided on before."""
    world = Discovered()
    world.tell("a:1", "b:1")
    candidates = list(world.members)
    world.tell("b:1")
    assert world.choose(candidates, [], ordered=True, may_repeat=True) is candidates[1]
    world.tell()
    assert world.choose(candidates, [], ordered=True, may_repeat=True) is None
    assert not world.any_usable(candidates)


def test_requests_that_it_has_come_to_their_end() -> None:
    """Handoff and pull still need its side channel, so that is given back with the last of them."""
    world = Discovered()
    world.tell("a:1")
    a = world.members[0]
    world.begin(a, 10)
    world.begin(a, 10)
    world.tell()
    world.end(a, 10)
    world.end(a, 10)
    assert [one.label for one in world] == []
    assert list(world.leaving) == [a]
    world.let_go(a)
    assert not a.forgotten
    world.let_go(a)
    assert a.forgotten
    assert not list(world.leaving)
    assert world.heard == [("learned", "a:1"), ("forgotten", "a:1")]


def test_back_before_its_last_request_ended() -> None:
    """It is the one that it was; after that it is a new one, with a clean slate."""
    world = Discovered()
    world.tell("a:1")
    a = world.members[0]
    world.begin(a, 10)
    world.broken(a)
    world.tell()
    world.tell("a:1")
    assert world.members[0] is a
    assert not a.leaving
    world.end(a, 10)
    world.let_go(a)
    assert not a.forgotten
    world.tell()
    assert a.forgotten
    world.tell("a:1")
    assert world.members[0] is not a
    assert world.members[0].breaker.state is State.CLOSED


def test_an_endpoint_of_a_header_that_is_then_discovered() -> None:
    world = Discovered()
    (learned,) = world.candidates([b"a:1"])
    assert world.tell("a:1") == (["a:1"], [])
    assert world.members[0] is learned
    world.tell()
    assert learned.forgotten


def test_discovered_endpoints_make_no_room_for_those_of_headers() -> None:
    world = Discovered()
    world.tell("a:1")
    for n in range(2 * MAX_ENDPOINTS):
        world.candidates([b"h%d:1" % n])
    assert world.labels() == ["a:1"]
    assert len(list(world)) <= MAX_ENDPOINTS + 1


def test_what_is_remembered_is_bounded() -> None:
    """A source that tells of other endpoints each time, for long."""
    world = Discovered()
    for turn in range(200):
        world.discovered({Address(f"h{turn}-{n}", 1): True for n in range(100)})
        world.clock += 0.1
    assert len(world.members) == 100
    assert len(list(world)) == 100
    assert len(world._departed) <= 4 * MAX_DISCOVERED
    world.clock += DEPARTED_FOR_S
    world.discovered({})
    assert not list(world)
    assert len(world._departed) == 100
    learned = sum(what == "learned" for what, _ in world.heard)
    assert learned == sum(what == "forgotten" for what, _ in world.heard) == 20_000


def test_too_many_are_cut_to_the_same_ones_every_time() -> None:
    world = Discovered()
    many = {Address(f"h{n:05}", 1): True for n in range(MAX_DISCOVERED + 50)}
    world.discovered(many)
    first = world.labels()
    assert len(first) == MAX_DISCOVERED
    assert world.discovered(dict(reversed(many.items()))) == ([], [])
    assert world.labels() == first


# -- weighted in gently ----------------------------------------------------------------------------------------


def requests_to(world: Discovered, host: str, number: int = 1000) -> int:
    """How many of so many requests go to that endpoint if it is idle and every other has some."""
    chosen = [world.choose(world.members, [], ordered=False, may_repeat=False) for _ in range(number)]
    return sum(one is not None and one.address.host == host for one in chosen)


def test_no_herd_on_an_endpoint_that_joins() -> None:
    """It is the least loaded one of every sidecar; all of them together must not fall upon it."""
    world = Discovered()
    world._random = random.Random(5)
    world.tell("a:1", "b:1", "c:1", "d:1")
    for one in world.members:
        world.begin(one, 100)
    world.tell("a:1", "b:1", "c:1", "d:1", "new:1")
    assert 10 < requests_to(world, "new") < 100, "enough to find out whether it works"
    assert world.least_tokens_in_flight(world.members) == 100, "nobody is promised an idle one"
    world.clock += WARM_IN_S / 2
    assert 150 < requests_to(world, "new") < 300
    world.clock += WARM_IN_S / 2
    assert 350 < requests_to(world, "new") < 450, "two of five pairs hold it"
    assert world.least_tokens_in_flight(world.members) == 0


def test_conversations_move_to_an_endpoint_that_joins_only_bit_by_bit() -> None:
    world = Discovered()
    world._random, draw = random.Random(5), random.Random(6)
    world.tell("a:1", "b:1", "c:1")

    def moved() -> int:
        chosen = [
            world.choose(world.members, [], ordered=False, may_repeat=False, conversation=number, tokens=1)
            for number in map(draw.getrandbits, [32] * 1000)
        ]
        return sum(one is not None and one.address.host == "new" for one in chosen)

    assert moved() == 0
    world.tell("a:1", "b:1", "c:1", "new:1")
    assert 20 < moved() < 120
    world.clock += WARM_IN_S
    assert 220 < moved() < 280


def test_a_new_endpoint_is_used_where_no_other_can_be() -> None:
    world = Discovered()
    world.tell("a:1")
    world.tell("a:1", "new:1")
    old, new = world.members
    world.broken(old)
    assert world.choose(world.members, [], ordered=False, may_repeat=False) is new
    world.tell("new:1")
    assert world.choose(world.members, [], ordered=False, may_repeat=False) is new


def test_the_first_endpoints_need_not_wait() -> None:
    """Nor one that comes back while it still has requests."""
    world = Discovered()
    world.tell("a:1", "b:1")
    assert [one.share(world.clock) for one in world.members] == [1.0, 1.0]
    a = world.members[0]
    world.begin(a, 1)
    world.tell("b:1")
    world.tell("a:1", "b:1")
    assert a in world.members
    assert a.share(world.clock) == 1.0
    statics = Discovered("s:1")
    statics.tell("a:1")
    assert [one.share(world.clock) for one in statics.members] == [1.0, FIRST_SHARE]
