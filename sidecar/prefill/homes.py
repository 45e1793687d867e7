"""Where conversations belong among many endpoints, found without a look at each. No I/O; must not know whether an
endpoint may be used.

Every endpoint has a place on a ring of 64 bits and every conversation several; it belongs to the endpoint that
follows most closely on one of them (multi-probe consistent hashing, Appleton and O'Reilly 2015). As by rendezvous
hashing, one that leaves or joins moves only its own conversations. A few get little, their place being close behind
another's; none gets much more than its share, and each sidecar has places of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sidecar.prefill.endpoints import Endpoint

MIX, MASK = 0x9E3779B97F4A7C15, 2**64 - 1
"""Multiplying by an odd number near 2**64 / golden ratio carries every bit into the high ones."""
_STEP = 0xD1342543DE82EF95
"""From one place of a conversation to the next (Steele and Vigna 2021, table of 64-bit multipliers)."""
_PLACES = 16
"""Of 512 endpoints the busiest gets 1.2 shares, the least busy twentieth 0.6 at most; for 5 µs."""


class Homes:
    """The same endpoints for as long as it lives. `salt`: 64 bits of this sidecar's own."""

    def __init__(self, endpoints: Iterable[Endpoint], salt: int) -> None:
        self._salt = salt
        self._put(sorted((((one.point ^ salt) * MIX & MASK, one) for one in endpoints), key=lambda pair: pair[0]))

    def _put(self, placed: list[tuple[int, Endpoint]]) -> None:
        self._places = [place for place, _ in placed]
        self._endpoints = [one for _, one in placed]

    def only(self, usable: Callable[[Endpoint], bool]) -> Homes:
        """The same without some. At least one must be left."""
        some = Homes((), self._salt)
        pairs = zip(self._places, self._endpoints, strict=True)
        some._put([(place, one) for place, one in pairs if usable(one)])
        return some

    def of(self, conversation: int) -> Endpoint:
        """The endpoint of a conversation."""
        places, count = self._places, len(self._places)
        place = (conversation ^ self._salt) * MIX & MASK
        least, home = MASK + 1, 0
        for _ in range(_PLACES):
            at = bisect_left(places, place)
            if at == count:
                at = 0
            distance = places[at] - place & MASK
            if distance < least:
                least, home = distance, at
            place = place * _STEP + 1 & MASK
        return self._endpoints[home]
