"""The endpoints: who is a candidate, who is chosen, and how many are remembered."""

import random

import pytest

from sidecar.prefill.address import Address, BadAddress
from sidecar.prefill.breaker import State
from sidecar.prefill.endpoints import (
    MAX_ENDPOINTS,
    NO_KV_TO_BE_INEFFECTIVE,
    Endpoint,
    NotAllowed,
)
from sidecar.prefill.slots import Slots
from tests.unit.prefill.world import Known

# -- candidates ------------------------------------------------------------------------------------------------


def test_repeated_configured_endpoints_are_one() -> None:
    world = Known("a:1", "A.:1", "[::1]:2", "[0::1]:2")
    assert [endpoint.label for endpoint in world] == ["a:1", "[::1]:2"]


def test_header_in_another_spelling_is_the_configured_endpoint() -> None:
    world = Known("10.0.0.5:8000", allow=())
    assert world.candidates([b"[::ffff:10.0.0.5]:08000"]) == world.configured


def test_learned_endpoints_are_shared() -> None:
    world = Known()
    first = world.candidates([b"a:1"])
    assert world.candidates([b"A.:1"]) == first
    assert not first[0].configured
    assert world.heard == [("learned", "a:1")]


def test_refusals() -> None:
    world = Known("a:1", allow=())
    with pytest.raises(NotAllowed, match=r"b:1, c:1"):
        world.candidates([b"b:1,c:1"])
    assert [endpoint.label for endpoint in world.candidates([b"b:1,a:1"])] == ["a:1"]
    with pytest.raises(BadAddress):
        world.candidates([b"a:1,b"])
    with pytest.raises(BadAddress):
        world.candidates([b"\xc3\xa4:1"])
    assert [endpoint.label for endpoint in world] == ["a:1"]


def test_lists_are_bounded() -> None:
    world = Known()
    assert len(world.candidates([b",".join(b"h%d:1" % n for n in range(64))])) == 64
    with pytest.raises(BadAddress):
        world.candidates([b",".join(b"h%d:1" % n for n in range(65))])


def test_memory_is_bounded() -> None:
    """Case 44: a header a request must not grow the sidecar, nor push out what is configured or in use."""
    world = Known("a:1", "b:1")
    busy = world.candidates([b"busy:1"])[0]
    world.begin(busy, 10)
    for n in range(3 * MAX_ENDPOINTS):
        world.candidates([b"h%d:1" % n])
    labels = [endpoint.label for endpoint in world]
    assert len(labels) <= MAX_ENDPOINTS + 2
    assert {"a:1", "b:1", "busy:1"} <= set(labels)
    assert len(world._header_cache) <= MAX_ENDPOINTS
    learned = sum(what == "learned" for what, _ in world.heard)
    assert learned - sum(what == "forgotten" for what, _ in world.heard) == len(labels) - 2
    assert not any(endpoint.forgotten for endpoint in world)


def test_forgotten_endpoints_know_it() -> None:
    """A request may still hold one."""
    world = Known()
    first = world.candidates([b"first:1"])[0]
    for n in range(MAX_ENDPOINTS):
        world.candidates([b"h%d:1" % n])
    assert first.forgotten
    again = world.candidates([b"first:1"])[0]
    assert again is not first
    assert not again.forgotten


def test_refusal_of_a_long_list_is_short() -> None:
    world = Known(allow=())
    with pytest.raises(NotAllowed) as caught:
        world.candidates([b",".join(b"host-%d.example.com:8000" % n for n in range(64))])
    assert "host-0.example.com:8000" in str(caught.value)
    assert len(str(caught.value)) < 300


# -- adapters ------------------------------------------------------------------------------------------------


def holding(world: Known, *held: str) -> None:
    """Each endpoint has one slot, with this adapter in it ("": it is free)."""
    for endpoint, adapter in zip(world.configured, held, strict=True):
        endpoint.slots, endpoint.slots_until = Slots(1, frozenset({adapter} - {""})), 100.0


def picks(world: Known, conversation: int = 0, tokens: int = 100) -> set[str]:
    found = set()
    for _ in range(100):
        one = world.choose(
            world.configured,
            [],
            ordered=False,
            may_repeat=False,
            conversation=conversation,
            tokens=tokens,
            adapter="french",
        )
        assert one is not None
        found.add(one.label)
    return found


@pytest.mark.parametrize("conversation", [0, 12345])
def test_an_adapter_goes_where_it_pushes_no_other_out(conversation: int) -> None:
    world = Known("a:1", "b:1", "c:1", "d:1")
    holding(world, "german", "french", "", "german")
    found = picks(world, conversation)
    assert found <= {"b:1", "c:1"}
    assert len(found) == (1 if conversation else 2), "a conversation stays where it is"


def test_no_adapter_is_worth_a_longer_wait_than_its_prompt() -> None:
    world = Known("a:1", "b:1")
    holding(world, "german", "french")
    world.begin(world.configured[1], 100)
    assert picks(world, tokens=100) == {"b:1"}
    world.begin(world.configured[1], 1)
    assert picks(world, tokens=100) == {"a:1"}


def test_where_no_endpoint_has_place_all_are_alike() -> None:
    world = Known("a:1", "b:1")
    holding(world, "german", "dutch")
    assert picks(world) == {"a:1", "b:1"}


def test_old_slots_and_unknown_ones_are_places() -> None:
    world = Known("a:1", "b:1", "c:1")
    holding(world, "german", "dutch", "polish")
    world.configured[0].slots = None
    assert picks(world) == {"a:1"}
    world.clock = 100.0
    assert picks(world) == {"a:1", "b:1", "c:1"}


def test_an_endpoint_with_the_adapter_that_may_not_be_used() -> None:
    world = Known("a:1", "b:1")
    holding(world, "german", "french")
    world.broken(world.configured[1])
    assert picks(world) == {"a:1"}


# -- the choice ------------------------------------------------------------------------------------------------


def test_the_less_loaded_of_two() -> None:
    """Chance picks the two, so the most loaded one of all is never chosen and no other is never chosen."""
    world = Known("a:1", "b:1", "c:1")
    a, b, c = world.configured
    for endpoint, tokens, number in ((a, 200, 1), (b, 100, 2), (c, 200, 2)):
        endpoint.tokens_in_flight, endpoint.in_flight = tokens, number
    chosen = [world.pick() for _ in range(300)]
    assert 150 < chosen.count(b) < 250
    assert chosen.count(c) == 0
    assert {world.pick(b) for _ in range(20)} == {a}, "by number where the tokens are the same"
    assert world.pick(b, a) is c
    assert world.pick(a, b, c) is None


def test_of_two_always_the_less_loaded() -> None:
    world = Known("a:1", "b:1")
    a, b = world.configured
    world.begin(a, 1)
    assert {world.pick() for _ in range(50)} == {b}


def test_ties_are_broken_by_chance() -> None:
    world = Known("a:1", "b:1", "c:1")
    world._random = random.Random(1)
    chosen = [world.pick() for _ in range(300)]
    assert all(50 < chosen.count(endpoint) < 150 for endpoint in world.configured)


def test_order_of_the_header_is_kept() -> None:
    world = Known("a:1", "b:1")
    a, b = world.configured
    a.in_flight = 100
    assert world.pick(ordered=True) is a
    assert world.pick(a, ordered=True) is b


def test_open_breakers_and_blocked_endpoints_are_passed_over() -> None:
    world = Known("a:1", "b:1", "c:1")
    a, b, c = world.configured
    world.broken(a)
    b.blocked = "incompatible"
    assert world.pick() is c
    assert world.any_usable(world.configured)
    world.broken(c)
    assert world.pick() is None
    assert not world.any_usable(world.configured)
    world.clock = 2.0
    assert world.pick(ordered=True) is a


@pytest.mark.parametrize("may_repeat", [True, False])
def test_only_endpoint_comes_again_only_if_it_may(may_repeat: bool) -> None:
    world = Known("a:1")
    only = world.configured[0]
    assert world.pick(may_repeat=may_repeat) is only
    assert world.pick(only, may_repeat=may_repeat) is (only if may_repeat else None)
    world.broken(only)
    assert world.pick(may_repeat=may_repeat) is None


def test_nothing_to_choose_from() -> None:
    world = Known()
    assert world.pick() is None
    assert not world.any_usable([])


# -- bookkeeping -----------------------------------------------------------------------------------------------


def test_in_flight() -> None:
    world = Known("a:1")
    a = world.configured[0]
    assert world.begin(a, 10) == 0
    world.begin(a, 10)
    assert (a.in_flight, a.tokens_in_flight) == (2, 20)
    world.end(a, 10)
    world.end(a, 10)
    assert a.in_flight == a.tokens_in_flight == 0


def test_begin_tells_the_trial() -> None:
    world = Known("a:1")
    a = world.configured[0]
    world.broken(a)
    world.clock = 2.0
    trial = world.begin(a, 10)
    assert trial
    world.failed(a, at_once=False, trial=trial)
    assert a.breaker.state is State.OPEN
    world.clock = 10.0
    world.begin(a, 10)
    world.brought_kv(a)
    assert a.breaker.state is State.CLOSED


def test_effective() -> None:
    world = Known("a:1")
    for _ in range(NO_KV_TO_BE_INEFFECTIVE):
        assert world.effective
        world.brought_no_kv()
    assert not world.effective
    world.brought_kv(world.configured[0])
    assert world.effective


def test_hosts_that_a_handoff_may_name() -> None:
    endpoint = Endpoint(Address("prefill-0", 8000), configured=True)
    assert endpoint.hosts == {"prefill-0"}
    endpoint.peer_host = "10.0.0.5"
    assert endpoint.hosts == {"prefill-0", "10.0.0.5"}


def test_what_a_prompt_finds_before_it() -> None:
    world = Known("a:1", "b:2", "c:3")
    a, b, c = world.configured
    world.begin(a, 500)
    world.begin(b, 300)
    world.broken(c)
    assert world.least_tokens_in_flight(world.configured) == 300
    assert world.least_tokens_in_flight([c]) == 0


# -- conversations ---------------------------------------------------------------------------------------------

CONVERSATIONS = list(map(random.Random(3).getrandbits, [32] * 2000))


def homes(world: Known, tokens: int = 1000) -> list[Endpoint | None]:
    return [
        world.choose(world.configured, [], ordered=False, may_repeat=False, conversation=number, tokens=tokens)
        for number in CONVERSATIONS
    ]


def test_conversation_stays_where_it_is() -> None:
    """And all endpoints have their share."""
    world = Known("a:1", "b:1", "c:1", "d:1")
    first = homes(world)
    assert homes(world) == first
    for endpoint in world.configured:
        assert 400 < first.count(endpoint) < 600


def test_a_beginning_that_a_fleet_shares_is_spread_over_all_endpoints() -> None:
    """A sidecar sees its own load only: two hundred of them must not agree on one endpoint."""
    chosen = []
    for _ in range(200):
        world = Known("a:1", "b:1", "c:1", "d:1")
        one = world.choose(world.configured, [], ordered=False, may_repeat=False, conversation=7, tokens=1000)
        chosen.append(one and one.label)
    for label in ("a:1", "b:1", "c:1", "d:1"):
        assert 25 < chosen.count(label) < 75


def test_endpoint_that_cannot_be_used_moves_only_its_own_conversations() -> None:
    world = Known("a:1", "b:1", "c:1", "d:1")
    before = homes(world)
    gone = world.configured[1]
    world.broken(gone)
    after = homes(world)
    assert gone not in after
    assert all(now is then for then, now in zip(before, after, strict=True) if then is not gone)
    assert {one for then, one in zip(before, after, strict=True) if then is gone} == {*world.configured} - {gone}
    assert homes(world) == after, "and to the same ones each time"


def test_conversation_leaves_an_endpoint_where_more_waits_than_a_cache_could_save() -> None:
    world = Known("a:1", "b:1")
    [number] = [number for number, home in zip(CONVERSATIONS, homes(world), strict=True) if home][:1]
    home = world.choose(world.configured, [], ordered=False, may_repeat=False, conversation=number, tokens=500)
    assert home is not None
    [other] = [one for one in world.configured if one is not home]
    for waiting, chosen in ((500, home), (501, other)):
        world.begin(home, waiting)
        picked = world.choose(
            world.configured, [], ordered=False, may_repeat=False, conversation=number, tokens=500
        )
        assert picked is chosen, waiting
        world.end(home, waiting)


def test_conversation_is_tried_elsewhere_after_a_failure() -> None:
    world = Known("a:1", "b:1", "c:1")
    tried: list[Endpoint] = []
    for _ in range(3):
        one = world.choose(world.configured, tried, ordered=False, may_repeat=False, conversation=7, tokens=10)
        assert one is not None
        assert one not in tried
        tried.append(one)
    assert world.choose(world.configured, tried, ordered=False, may_repeat=False, conversation=7) is None
