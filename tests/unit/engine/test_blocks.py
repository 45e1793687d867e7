from __future__ import annotations

from array import array

import pytest

from tests.engine.blocks import ROOT, BlockPool, Kv, chain, root, seed_of


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pool(clock: Clock) -> BlockPool:
    return BlockPool(num_blocks=8, block_size=4, clock=clock)


def ids(*tokens: int) -> array[int]:
    return array("I", tokens)


def test_a_chain_depends_on_everything_before() -> None:
    one = chain(ROOT, ids(1, 2, 3, 4, 5), 4)
    other = chain(ROOT, ids(9, 2, 3, 4, 5), 4)
    assert len(one) == 2
    assert one[1].tokens == other[1].tokens
    assert one[1].before != other[1].before
    assert chain(root("adapter"), ids(1), 4)[0].before != one[0].before


def test_the_seed_is_that_of_exactly_this_kv_in_this_order() -> None:
    one = chain(ROOT, ids(*range(8)), 4)
    assert seed_of(one) == seed_of(chain(ROOT, ids(*range(8)), 4))
    assert seed_of(one) != seed_of(one[:1])
    assert seed_of(one) != seed_of([one[1], one[0]])


def test_a_view_of_unwritten_slots_fits_no_prompt() -> None:
    kv = chain(ROOT, ids(1, 2, 3), 4)[0]
    assert kv.view(2) == chain(ROOT, ids(1, 2), 4)[0]
    assert kv.view(4).after() not in {chain(ROOT, ids(1, 2, 3, n), 4)[0].after() for n in range(100)}


def test_the_least_recently_freed_block_is_taken_first_and_keeps_its_kv_till_then(pool: BlockPool) -> None:
    first = pool.allocate(4)
    assert first is not None
    pool.write(first.block_ids, [Kv(b"x", b"y")] * 4)
    pool.free(first.block_ids)
    assert pool.free_blocks == 8
    second = pool.allocate(4)
    assert second is not None
    assert not set(first.block_ids) & set(second.block_ids)
    assert pool.read(first.block_ids) == [Kv(b"x", b"y")] * 4
    third = pool.allocate(4)
    assert third is not None
    assert set(third.block_ids) == set(first.block_ids)
    assert pool.allocate(1) is None


def test_cached_blocks_are_shared_and_counted(pool: BlockPool) -> None:
    first = pool.allocate(2)
    assert first is not None
    pool.cache(first.block_ids, [b"k0", b"k1"])
    second = pool.allocate(3, [b"k0", b"k1"], 2)
    assert second is not None
    assert second.hit_blocks == 2
    assert second.block_ids[:2] == first.block_ids
    assert pool.used_blocks == 3
    pool.free(first.block_ids)
    assert pool.used_blocks == 3
    pool.free(second.block_ids)
    assert pool.used_blocks == 0
    again = pool.allocate(2, [b"k0", b"other"], 2)
    assert again is not None
    assert again.hit_blocks == 1


def test_a_block_that_is_taken_again_is_found_no_more(pool: BlockPool) -> None:
    first = pool.allocate(1)
    assert first is not None
    pool.cache(first.block_ids, [b"k"])
    pool.free(first.block_ids)
    everything = pool.allocate(8)
    assert everything is not None
    pool.free(everything.block_ids)
    hit = pool.allocate(1, [b"k"], 1)
    assert hit is not None
    assert hit.hit_blocks == 0


def test_a_lease_holds_is_extended_and_ends(pool: BlockPool, clock: Clock) -> None:
    ended: list[int] = []
    pool.on_expired = ended.append
    taken = pool.allocate(3)
    assert taken is not None
    pool.hold("a", taken.block_ids, 30)
    clock.now += 29
    assert pool.held_blocks == 3
    assert pool.extend("a", 20)
    clock.now += 19
    assert pool.held_blocks == 3
    clock.now += 2
    assert pool.held_blocks == 0
    assert pool.used_blocks == 0
    assert ended == [1]
    assert not pool.extend("a", 20)
    assert not pool.release("a")


def test_an_extension_never_shortens(pool: BlockPool, clock: Clock) -> None:
    taken = pool.allocate(1)
    assert taken is not None
    pool.hold("a", taken.block_ids, 30)
    assert pool.extend("a", 20)
    assert pool.leases["a"] == 30
    clock.now += 25
    assert pool.leases["a"] == 5


def test_no_lease_ends_while_the_engine_is_frozen(pool: BlockPool, clock: Clock) -> None:
    taken = pool.allocate(1)
    assert taken is not None
    pool.hold("a", taken.block_ids, 30)
    pool.frozen = True
    clock.now += 100
    assert pool.held_blocks == 1
    pool.frozen = False
    assert pool.held_blocks == 0
