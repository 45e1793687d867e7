"""Sets of 64-bit hashes, and dictionaries from them to 64-bit numbers, for 12 to 48 bytes an entry, not 75 to 150.

Only for keys that are hashes already: their bits choose the place. Knows nothing of what is counted. It grows a
256th at a time, so that no insertion takes longer than a millisecond however large it is.
"""

from array import array
from typing import Final

_SEGMENTS: Final = 256
_FIRST_SLOTS: Final = 8


class U64Set:
    """Linear probing in 256 tables of their own, chosen by the key's top byte. Key 0 stands for an empty slot, so
    callers keep it out (`nonzero`)."""

    __slots__ = ("_count", "_fill", "_keys")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._count = 0
        self._fill = [0] * _SEGMENTS
        self._keys = [array("Q", bytes(8 * _FIRST_SLOTS)) for _ in range(_SEGMENTS)]

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: int) -> bool:
        keys = self._keys[key >> 56]
        return keys[_slot(keys, key)] != 0

    def add(self, key: int) -> None:
        self._place(key)

    def discard(self, key: int) -> None:
        self._take(key)

    def _place(self, key: int) -> int:
        """Put a key in and return its slot."""
        segment = key >> 56
        if self._fill[segment] * 3 >= len(self._keys[segment]) * 2:
            self._grow(segment)
        keys = self._keys[segment]
        slot = _slot(keys, key)
        if not keys[slot]:
            keys[slot] = key
            self._fill[segment] += 1
            self._count += 1
        return slot

    def _take(self, key: int) -> None:
        """Take a key out; nothing happens if it is not there."""
        segment = key >> 56
        keys = self._keys[segment]
        mask = len(keys) - 1
        hole = slot = _slot(keys, key)
        if not keys[slot]:
            return
        self._fill[segment] -= 1
        self._count -= 1
        # Close the gap: whoever behind it would no longer be found moves up.
        while True:
            slot = (slot + 1) & mask
            moved = keys[slot]
            if not moved:
                break
            if (slot - (moved & mask)) & mask >= (slot - hole) & mask:
                self._move(segment, slot, hole)
                hole = slot
        keys[hole] = 0

    def _move(self, segment: int, slot: int, hole: int) -> None:
        keys = self._keys[segment]
        keys[hole] = keys[slot]

    def _grow(self, segment: int) -> None:
        keys = self._keys[segment]
        larger = self._keys[segment] = array("Q", bytes(16 * len(keys)))
        for key in keys:
            if key:
                larger[_slot(larger, key)] = key


class U64Map(U64Set):
    """The same with a 64-bit number to each key."""

    __slots__ = ("_values",)

    def clear(self) -> None:
        super().clear()
        self._values = [array("Q", bytes(8 * _FIRST_SLOTS)) for _ in range(_SEGMENTS)]

    def get(self, key: int) -> int | None:
        segment = key >> 56
        keys = self._keys[segment]
        slot = _slot(keys, key)
        return self._values[segment][slot] if keys[slot] else None

    def put(self, key: int, value: int) -> None:
        slot = self._place(key)
        self._values[key >> 56][slot] = value

    def pop(self, key: int) -> int | None:
        """Take a key out and return its value, or None."""
        value = self.get(key)
        if value is not None:
            self._take(key)
        return value

    def _move(self, segment: int, slot: int, hole: int) -> None:
        super()._move(segment, slot, hole)
        values = self._values[segment]
        values[hole] = values[slot]

    def _grow(self, segment: int) -> None:
        keys, values = self._keys[segment], self._values[segment]
        super()._grow(segment)
        larger = self._keys[segment]
        moved = self._values[segment] = array("Q", bytes(16 * len(values)))
        for key, value in zip(keys, values, strict=True):
            if key:
                moved[_slot(larger, key)] = value


def _slot(keys: "array[int]", key: int) -> int:
    """Where a key is, or the empty slot where it belongs."""
    mask = len(keys) - 1
    slot = key & mask
    while (found := keys[slot]) and found != key:
        slot = (slot + 1) & mask
    return slot


def nonzero(number: int) -> int:
    """Any whole number as a legal key."""
    return number & (2**64 - 1) or 1
