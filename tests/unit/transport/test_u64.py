"""The 64-bit map behaves as a dictionary does, whatever collides with what."""

import random
import sys
import time

from hypothesis import given
from hypothesis import strategies as st

from transport.u64 import U64Map, U64Set, nonzero

# Few segments and few low bits, so that nearly everything collides; and anything at all.
crowded = st.builds(lambda top, low: nonzero(top << 56 | low), st.integers(0, 1), st.integers(0, 40))
keys = st.one_of(crowded, crowded, st.integers(1, 2**64 - 1))
steps = st.lists(st.tuples(st.sampled_from("ppprg"), keys, st.integers(0, 2**64 - 1)), max_size=200)


@given(steps)
def test_it_is_a_dictionary(done: list[tuple[str, int, int]]) -> None:
    real: dict[int, int] = {}
    found = U64Map()
    for what, key, value in done:
        match what:
            case "p":
                real[key] = value
                found.put(key, value)
            case "r":
                assert found.pop(key) == real.pop(key, None)
            case _:
                assert found.get(key) == real.get(key)
                assert (key in found) == (key in real)
        assert len(found) == len(real)
    assert all(found.get(key) == value for key, value in real.items())
    found.clear()
    assert len(found) == 0
    assert all(key not in found for key in real)


@given(st.lists(st.tuples(st.booleans(), keys), max_size=200))
def test_the_set_is_a_set(done: list[tuple[bool, int]]) -> None:
    real: set[int] = set()
    found = U64Set()
    for put, key in done:
        if put:
            real.add(key)
            found.add(key)
        else:
            real.discard(key)
            found.discard(key)
        assert (key in found) == (key in real)
        assert len(found) == len(real)
    assert all(key in found for key in real)


def test_a_hundred_thousand_entries_are_small_and_no_single_step_is_slow() -> None:
    source = random.Random(1)
    found = U64Map()
    slowest = 0.0
    entries = [(nonzero(source.getrandbits(64)), source.getrandbits(64)) for _ in range(100_000)]
    for key, value in entries:
        began = time.thread_time()
        found.put(key, value)
        slowest = max(slowest, time.thread_time() - began)
    assert all(found.get(key) == value for key, value in entries)
    size = sum(map(sys.getsizeof, [*found._keys, *found._values]))
    assert size < 50 * 100_000
    assert slowest < 0.005
    for key, _ in entries:
        assert found.pop(key) is not None
    assert len(found) == 0
