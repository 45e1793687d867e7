"""Models and adapters: what an engine's answer says, hostile ones too, and who may prefill what names one."""

import json

import msgspec
import pytest

from sidecar.prefill.address import Address
from sidecar.prefill.endpoints import Endpoint
from sidecar.prefill.served import (
    MAX_NAME_BYTES,
    MAX_NAMES,
    MAX_REFUSED,
    REFUSED_FOR_S,
    Served,
    Told,
    named,
    parse_served,
    serving,
)


def cards(*pairs: tuple[object, object]) -> bytes:
    data = [{"id": name, "object": "model", "parent": parent, "permission": [{}]} for name, parent in pairs]
    return json.dumps({"object": "list", "data": data}).encode()


def test_models_and_adapters() -> None:
    served = parse_served(cards(("base", None), ("alias", None), ("french", "base")))
    assert served == Served(frozenset({"base", "alias"}), frozenset({"french"}))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"data": null}',
        b'{"data": {}}',
        b'{"data": []}',
        b'{"data": [1]}',
        b'{"data": [{}]}',
        b'{"data": [{"id": null}]}',
        b'{"data": [{"id": 5}]}',
        b'{"data": [{"id": "a", "parent": 5}]}',
        b'{"data": [{"id": "\\ud800"}]}',
        b'{"data": [{"id": "a\xff"}]}',
        b'{"data": [{"id": "a"}]',
        b"[" * 100_000,
        b'{"data": [{"id": "a", "x": ' + b"[" * 100_000 + b"}]}",
        cards(*[(f"a{n}", "base") for n in range(MAX_NAMES + 1)]),
    ],
    ids=range(18),
)
def test_what_is_no_list_of_models(body: bytes) -> None:
    assert parse_served(body) is None


def test_names_that_are_too_long_are_nobodys() -> None:
    longest = "é" * (MAX_NAME_BYTES // 2)
    served = parse_served(cards(("base", None), (longest, "base"), (longest + "x", "base"), ("", "base")))
    assert served is not None
    assert served.adapters == {longest}


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (None, ""),
        (b"null", ""),
        (b'""', ""),
        (b"5", ""),
        (b'["a"]', ""),
        (b'"a"', "a"),
        (b'"fr\\u0065nch"', "french"),
        (b'"' + b"x" * MAX_NAME_BYTES + b'"', "x" * MAX_NAME_BYTES),
        (b'"' + b"x" * (MAX_NAME_BYTES + 1) + b'"', ""),
        (b'"' + b"x" * (6 * MAX_NAME_BYTES) + b'"', ""),
    ],
)
def test_the_name_in_a_request(model: bytes | None, name: str) -> None:
    assert named(None if model is None else msgspec.Raw(model)) == name


# -- who may prefill ---------------------------------------------------------------------------------------------


def endpoint(*adapters: str, base: str = "base", loads: bool = False, until: float = 100.0) -> Endpoint:
    one = Endpoint(Address(f"10.0.0.{len(adapters)}", 1), configured=True)
    one.models.tell(Served(frozenset({base}), frozenset(adapters), loads), until)
    return one


def untold() -> Endpoint:
    return Endpoint(Address("10.0.0.9", 1), configured=True)


def decode(*adapters: str, loads: bool = False, until: float = 1000.0) -> Told:
    own = Told()
    own.tell(Served(frozenset({"base"}), frozenset(adapters), loads), until)
    return own


OWN = decode("french")
LISTED = frozenset({"french", "german", "base"})


def test_the_base_model_and_unknown_names_are_as_ever() -> None:
    candidates = [endpoint(), endpoint("french")]
    for name in ("", "base", "nobodys"):
        assert serving(name, OWN, candidates, LISTED - {"base"}, 0.0) == (candidates, "", "")
    assert serving("french", Told(), candidates, LISTED, 0.0) == (candidates, "", "")


def test_an_adapter_goes_where_it_is() -> None:
    having, lacking = endpoint("french"), endpoint()
    assert serving("french", OWN, [lacking, having], LISTED, 0.0) == ([having], "french", "")
    every = [having, endpoint("french", "german")]
    assert serving("french", OWN, every, LISTED, 0.0).candidates is every


def test_whoever_has_not_told_counts_as_having_it() -> None:
    new, stale, lacking = untold(), endpoint(until=50.0), endpoint()
    assert serving("french", OWN, [lacking, stale, new], LISTED, 50.0).candidates == [stale, new]
    assert serving("french", OWN, [lacking, stale, new], LISTED, 49.0).candidates == [new]


def test_one_that_may_load_it_is_used_where_nobody_has_it() -> None:
    loading, lacking, having = endpoint(loads=True), endpoint(), endpoint("french")
    assert serving("french", OWN, [lacking, loading], LISTED, 0.0).candidates == [loading]
    assert serving("french", OWN, [lacking, loading, having], LISTED, 0.0).candidates == [having]


def test_an_adapter_that_only_decode_has() -> None:
    found = serving("french", OWN, [endpoint(), endpoint("german")], LISTED, 0.0)
    assert not found.candidates
    assert "'french'" in found.problem
    assert "load it there too" in found.problem


def test_an_adapter_that_only_prefill_has() -> None:
    """The decode engine's own 404 is the answer, and no client's word gets into a log."""
    found = serving("german", OWN, [endpoint(), endpoint("german")], LISTED, 0.0)
    assert not found.candidates
    assert "german" not in found.problem
    assert "not on the decode engine" in found.problem


def test_a_decode_engine_that_may_have_it() -> None:
    """By its name, or since a moment ago. If prefill does not know it, decode has the last word."""
    candidates = [endpoint("german")]
    assert serving("german", decode(loads=True), candidates, LISTED, 0.0) == (candidates, "german", "")
    assert serving("dutch", decode(loads=True), candidates, LISTED, 0.0) == (candidates, "dutch", "")
    refusing = endpoint()
    refusing.models.refused("dutch", 10.0)
    assert serving("dutch", decode(loads=True), [refusing, *candidates], LISTED, 20.0).candidates == candidates
    alone = serving("dutch", decode(loads=True), [refusing], LISTED, 20.0)
    assert alone.problem
    assert "dutch" not in alone.problem
    own = decode("french")
    own.doubt()
    for name in ("french", "dutch"):
        assert serving(name, own, candidates, LISTED, 0.0) == (candidates, name, "")
    assert serving("base", own, candidates, LISTED, 0.0) == (candidates, "", "")


def test_what_an_endpoint_told_long_ago_is_not_held_against_a_request() -> None:
    candidates = [endpoint("german", until=10.0)]
    assert serving("german", OWN, candidates, LISTED, 10.0) == (candidates, "", "")


def test_one_that_answered_404_is_left_alone_for_a_while() -> None:
    """Whatever it had told, or not: the engine itself knows best."""
    for one in (endpoint(loads=True), endpoint("french"), untold()):
        other = endpoint(loads=True)
        one.models.refused("french", 10.0)
        assert serving("french", OWN, [one, other], LISTED, 10.0 + REFUSED_FOR_S - 1).candidates == [other]
        assert serving("french", OWN, [one], LISTED, 20.0).problem
        assert not serving("german", OWN, [one], LISTED, 20.0).problem
    again = untold()
    again.models.refused("french", 10.0)
    assert serving("french", OWN, [again], LISTED, 10.0 + REFUSED_FOR_S).candidates == [again]
    again.models.tell(Served(frozenset({"base"}), frozenset({"french"})), 100.0)
    assert serving("french", OWN, [again], LISTED, 20.0).candidates == [again], "it has been loaded there since"


def test_memory_of_refusals_is_bounded() -> None:
    told = Told()
    for number in range(3 * MAX_REFUSED):
        told.refused(f"a{number}", 0.0)
    assert len(told._refused) <= MAX_REFUSED
    assert told.has_refused(f"a{3 * MAX_REFUSED - 1}", 1.0)


def test_a_name_that_means_an_adapter_here_and_a_model_there() -> None:
    """KV of the one is no KV of the other: the text would be wrong, with 200."""
    assert serving("french", OWN, [endpoint(base="french", loads=True)], LISTED, 0.0).problem
    good = endpoint()
    assert serving("base", OWN, [endpoint("base", base="x"), good], LISTED, 0.0).candidates == [good]
    assert serving("base", OWN, [endpoint("base", base="x")], LISTED, 0.0).problem


def test_what_was_told_counts_for_a_while() -> None:
    known, served = Told(), Served(frozenset({"a"}), frozenset())
    assert known.fresh(0.0) is None
    known.tell(served, 10.0)
    assert known.fresh(9.9) is served
    assert known.fresh(10.0) is None
    known.tell(served, 20.0)
    known.doubt()
    assert known.fresh(0.0) is None
    assert known.is_doubted
