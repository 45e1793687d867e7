"""What `make faults` says of what it saw, and what its wire does to packets."""

from __future__ import annotations

import struct
from collections import Counter

import pytest

from e2e.faults.__main__ import QUICK, chosen, markdown
from e2e.faults.scenarios import SCENARIOS
from e2e.faults.stage import Verdict
from e2e.faults.wire import CLEAR, Weather, stops

FACTS = {"words": "", "started": "", "revision": "", "minutes": 1, "machine": "", "seeds": "1, 2"}


def packet(source: int, destination: int, protocol: int = 6) -> bytes:
    """IPv4 with a header of 24 bytes."""
    return bytes([0x46, *[0] * 8, protocol, *[0] * 14]) + struct.pack("!HH", source, destination)


def test_every_scenario_says_what_must_hold() -> None:
    assert all(one.promise.endswith(".") for one in SCENARIOS.values())
    assert set(QUICK) <= set(SCENARIOS)


def test_scenarios_are_chosen_by_name_and_keep_their_order() -> None:
    assert [one.name for one in chosen(["aborts", "half-open"], quick=False)] == ["half-open", "aborts"]
    assert len(chosen([], quick=False)) == len(SCENARIOS)
    assert {one.name for one in chosen([], quick=True)} == set(QUICK)
    with pytest.raises(SystemExit, match="no scenario 'nonsense'"):
        chosen(["nonsense"], quick=False)


def test_one_that_does_not_hold_is_told() -> None:
    good = Verdict("aborts", 1, outcomes=Counter(remote=3), slowest_s=1.0)
    bad = Verdict("aborts", 2, "blocks are still in use")
    assert "aborts (seed 1): holds; 3 remote" in good.line
    assert "BROKEN" in bad.line
    assert bad.line.endswith("blocks are still in use")
    assert "| holds, 1 of 1 |" in markdown([good], [], **FACTS)
    text = markdown([good, bad], ["`half-open` (needs root)"], **FACTS)
    assert "| **BROKEN**, holds 1 of 2 |" in text
    assert "Not run: `half-open` (needs root)." in text


@pytest.mark.parametrize(
    ("weather", "stopped"),
    [
        (CLEAR, set()),
        (Weather(blocked=(80,)), {80}),
        (Weather(blocked_but=(80, 5600)), {20000}),
        (Weather(dead=True), {80, 5600, 20000}),
    ],
)
def test_what_the_wire_stops(weather: Weather, stopped: set[int]) -> None:
    for port in (80, 5600, 20000):
        assert stops(weather, packet(40000, port), from_far=False) == (port in stopped)
        assert stops(weather, packet(port, 40000), from_far=True) == (port in stopped)


def test_the_near_side_s_ports_are_not_meant() -> None:
    assert not stops(Weather(blocked=(80,)), packet(80, 5600), from_far=False)
    assert not stops(Weather(blocked=(80,)), packet(5600, 80), from_far=True)
    assert not stops(Weather(blocked=(80,)), packet(80, 80, protocol=17), from_far=True), "only TCP is looked at"
