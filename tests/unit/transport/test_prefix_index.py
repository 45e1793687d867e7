"""The index against a model of the engine's block pool: equal where it can be known, never more than the truth."""

import hashlib
import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transport import prefix_index
from transport.prefix_index import AllBlocksCleared, BlockRemoved, BlockStored, Follow, PrefixIndex

BLOCK = 4


class Pool:
    """A block pool as v1/core/block_pool.py keeps it, one block for each hash: least recently used goes first."""

    def __init__(self, index: PrefixIndex, blocks: int, *, raw_hashes: bool = False) -> None:
        self.index = index
        self.blocks = blocks
        self.held: OrderedDict[bytes, None] = OrderedDict()
        self.raw_hashes = raw_hashes

    def name(self, digest: bytes) -> int | bytes:
        return digest if self.raw_hashes else int.from_bytes(digest[-8:], "big")

    def chain(self, ids: Sequence[int], lora: tuple[str, int, str] | None, salt: str | None) -> list[bytes]:
        """The engine's hashes: over more than its events tell (a LoRA's path)."""
        digest, digests = b"seed", []
        for start in range(0, len(ids) - BLOCK + 1, BLOCK):
            content = (digest, tuple(ids[start : start + BLOCK]), lora, salt if start == 0 else None)
            digest = hashlib.sha256(repr(content).encode()).digest()
            digests.append(digest)
        return digests

    def cached_tokens(self, ids: Sequence[int], lora: tuple[str, int, str] | None, salt: str | None) -> int:
        found = 0
        for digest in self.chain(ids, lora, salt)[: (len(ids) - 1) // BLOCK]:
            if digest not in self.held:
                break
            found += BLOCK
        return found

    def prompt(self, ids: Sequence[int], lora: tuple[str, int, str] | None = None, salt: str | None = None) -> None:
        """Compute a prompt: what is missing is stored in one event, and others make room for it."""
        digests = self.chain(ids, lora, salt)[: self.blocks]
        first = next((n for n, digest in enumerate(digests) if digest not in self.held), len(digests))
        for digest in digests[:first]:
            self.held.move_to_end(digest)
        new = [digest for digest in digests[first:] if digest not in self.held]
        if len(new) < len(digests) - first:
            new = digests[first:]  # some were left behind an evicted parent: stored anew under the same name
        for digest in new:
            if digest in self.held:
                self.held.move_to_end(digest)
                continue
            if len(self.held) >= self.blocks:
                gone, _ = self.held.popitem(last=False)
                self.index.apply(BlockRemoved([self.name(gone)], "GPU", 0))
            self.held[digest] = None
        if not new:
            return
        keys: list[list[Any] | None] = []
        for n in range(first, len(digests)):
            key: list[Any] = [lora[0]] if lora else []
            keys.append(([*key, salt] if salt and n == 0 else key) or None)
        self.index.apply(
            BlockStored(
                block_hashes=[self.name(digest) for digest in new],
                parent_block_hash=self.name(digests[first - 1]) if first else None,
                token_ids=list(ids[first * BLOCK : len(digests) * BLOCK]),
                block_size=BLOCK,
                lora_id=lora[1] if lora else None,
                medium="GPU",
                lora_name=lora[0] if lora else None,
                extra_keys=keys,
                group_idx=0,
                kv_cache_spec_kind="full_attention",
            )
        )


# Few tokens, so that prompts share prefixes; two adapters; two salts.
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=30)
loras = st.sampled_from([None, None, ("a", 1, "/a"), ("b", 2, "/b")])
salts = st.sampled_from([None, None, "s", "t"])
asked = st.tuples(prompts, loras, salts)


@settings(max_examples=300)
@given(st.lists(asked, max_size=40), st.integers(8, 64), st.booleans())
def test_index_and_engine_agree_on_every_prompt(
    history: list[tuple[list[int], Any, Any]], blocks: int, raw_hashes: bool
) -> None:
    index = PrefixIndex()
    pool = Pool(index, blocks, raw_hashes=raw_hashes)
    for ids, lora, salt in history:
        expected = pool.cached_tokens(ids, lora, salt)
        assert index.cached_tokens(ids, lora_name=lora[0] if lora else None, cache_salt=salt) == expected
        pool.prompt(ids, lora, salt)
    for ids, lora, salt in history:
        expected = pool.cached_tokens(ids, lora, salt)
        assert index.cached_tokens(ids, lora_name=lora[0] if lora else None, cache_salt=salt) == expected
    assert len(index) == len(pool.held)


def stored(ids: list[int], hashes: list[int], parent: int | None = None, **changes: Any) -> BlockStored:
    fields: dict[str, Any] = {"medium": "GPU", "group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    return BlockStored(hashes, parent, ids, BLOCK, **(fields | changes))


def index_of(*events: Any, **options: Any) -> PrefixIndex:
    index = PrefixIndex(**options)
    for event in events:
        index.apply(event)
    return index


IDS = list(range(8))


def test_the_last_token_is_never_taken_from_the_cache() -> None:
    index = index_of(stored(IDS, [1, 2]))
    assert [index.cached_tokens(IDS[:n]) for n in (0, 1, 4, 5, 8)] == [0, 0, 0, 4, 4]
    assert index.cached_tokens([*IDS, 9]) == 8
    assert index.cached_tokens([*IDS, 9, 9, 9, 9, 9, 9]) == 8


def test_blocks_are_found_across_events_and_not_without_their_parent() -> None:
    index = index_of(stored(IDS[:4], [1]), stored(IDS[4:], [2], parent=1), stored(IDS, [3, 4], parent=99))
    assert index.cached_tokens([*IDS, 9]) == 8
    assert index.counts["orphaned"] == 2
    index.apply(BlockRemoved([1], "GPU", 0))
    assert index.cached_tokens([*IDS, 9]) == 0
    index.apply(stored(IDS[:4], [1]))
    assert index.cached_tokens([*IDS, 9]) == 8


def test_what_is_held_twice_counts_as_gone_when_it_is_removed_once() -> None:
    index = index_of(stored(IDS, [1, 2]), stored(IDS, [1, 2]), BlockRemoved([2], "GPU", 0))
    assert index.cached_tokens([*IDS, 9]) == 4
    index.apply(BlockRemoved([2], "GPU", 0))
    assert index.cached_tokens([*IDS, 9]) == 4


def test_salt_and_lora_and_media_keep_prompts_apart() -> None:
    index = index_of(
        stored(IDS, [1, 2], extra_keys=[["s"], None]),
        stored(IDS, [3, 4], lora_name="a", lora_id=1, extra_keys=[["a", "s"], ["a"]]),
        stored(IDS, [5, 6], extra_keys=[[["media hash", 0]], None]),
    )
    longer = [*IDS, 9]
    assert index.cached_tokens(longer) == 0
    assert index.cached_tokens(longer, cache_salt="s") == 8
    assert index.cached_tokens(longer, cache_salt="t") == 0
    assert index.cached_tokens(longer, lora_name="a") == 0
    assert index.cached_tokens(longer, lora_name="a", cache_salt="s") == 8
    assert index.cached_tokens(longer, lora_name="b", cache_salt="s") == 0


def test_another_adapter_of_the_same_name_finds_nothing_of_the_old_one() -> None:
    keys = [["a"], ["a"]]
    index = index_of(stored(IDS, [1, 2], lora_name="a", lora_id=1, extra_keys=keys))
    assert index.cached_tokens([*IDS, 9], lora_name="a") == 8
    index.apply(stored(IDS[:4], [3], lora_name="a", lora_id=2, extra_keys=keys[:1]))
    assert index.cached_tokens([*IDS, 9], lora_name="a") == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"medium": "CPU"},
        {"locality": "REMOTE"},
        {"group_idx": 1},
        {"kv_cache_spec_kind": "sliding_window"},
        {"kv_cache_spec_kind": "mamba"},
    ],
)
def test_blocks_elsewhere_and_of_other_groups_neither_come_nor_go(changes: dict[str, Any]) -> None:
    index = index_of(stored(IDS[:4], [1]), stored(list(range(50, 58)), [7, 8], **changes))
    assert index.cached_tokens([*range(50, 58), 1]) == 0
    assert index.counts["foreign"] == 2
    removal = {key: value for key, value in changes.items() if key != "kv_cache_spec_kind"}
    if removal:
        index.apply(BlockRemoved([1], **({"medium": "GPU", "group_idx": 0} | removal)))
        assert index.cached_tokens([*IDS, 9]) == 4


def test_partial_blocks_and_impossible_events_are_ignored() -> None:
    index = index_of(
        stored(IDS, [1, 2]),
        BlockStored([3], None, [1, 2], 2, medium="GPU", group_idx=0),
        stored(IDS, [4]),
        stored([], [5]),
        stored([-1, 0, 0, 0], [6]),
        stored([2**40, 0, 0, 0], [7]),
        BlockStored([8], None, [], 0),
    )
    assert len(index) == 2
    assert index.counts["foreign"] == 6
    assert index.cached_tokens([-1] * 9) == 0
    assert index.cached_tokens([2**40] * 9) == 0


def test_all_is_forgotten_when_all_is_cleared() -> None:
    index = index_of(stored(IDS, [1, 2]), AllBlocksCleared())
    assert len(index) == 0
    assert index.cached_tokens([*IDS, 9]) == 0
    assert index.counts["cleared"] == 1


def test_the_index_is_bounded_and_says_what_it_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "BLOCKS_MAX", 10)
    index = PrefixIndex()
    source = random.Random(3)
    for n in range(20):
        index.apply(stored([source.randrange(1000) for _ in range(8)], [2 * n + 1, 2 * n + 2]))
    assert len(index) == 10
    assert index.counts["dropped"] == 30
    assert len(index._own_of) == 10
    for n in range(300_000, 300_000 + 5000):
        index.apply(stored(IDS, [1, 2], lora_name=str(n), lora_id=n))
    assert len(index._lora_ids) <= 4096
    for n in range(40):
        index.apply(BlockRemoved([n + 1], "GPU", 0))
    assert len(index) == 0


@given(st.lists(st.integers(-(2**70), 2**70), max_size=20))
def test_no_token_ids_break_the_lookup(ids: list[int]) -> None:
    assert index_of(stored(IDS, [1, 2])).cached_tokens(ids) in (0, 4, 8)


# -- following a prompt ----------------------------------------------------------------------------------------


def test_chain_names_blocks_as_they_are_held() -> None:
    index = index_of(stored(IDS[:8], [1, 2]))
    chain = index.chain([*IDS[:8], 99, 99, 99, 99, 5])
    assert [index.holds(block) for block in chain] == [True, True, False]
    assert list(index.chain(IDS[:7])) == list(chain[:1])
    assert not len(index.chain(IDS[:3]))
    assert not len(PrefixIndex().chain(IDS)), "nobody has told how long a block is"
    assert not len(index.chain([-1] * 8))
    assert not len(index.chain(IDS, lora_name="unknown"))


def followed(index: PrefixIndex, ids: list[int]) -> Follow:
    return index.follow(index.chain(ids)[1:])


LONG = list(range(100, 140))


def test_what_is_stored_behind_a_prompt_is_followed() -> None:
    """Behind its end, block by block; from within it; and by others that come from elsewhere."""
    index = index_of(stored(LONG[:16], [1, 2, 3, 4]))
    end, within, far = followed(index, LONG[:16]), followed(index, LONG[:16]), followed(index, LONG[:8])
    index.apply(stored(LONG[16:24], [5, 6], parent=4))
    index.apply(stored(LONG[24:28], [7], parent=6))
    chain = index.chain(LONG)
    for follow in (end, within):
        assert (follow.attached, list(follow.path), follow.branches) == (2, list(chain[4:7]), 0)
    assert (far.attached, list(far.path)) == (-1, []), "behind a block that it does not know"
    index.unfollow(end)
    index.apply(stored(LONG[28:32], [8], parent=7))
    assert list(end.path) == list(chain[4:7])
    assert list(within.path) == list(chain[4:8])


def test_where_two_go_on_from_one_block_the_later_is_followed() -> None:
    index = index_of(stored(LONG[:16], [1, 2, 3, 4]))
    follow = followed(index, LONG[:16])
    index.apply(stored(LONG[16:28], [5, 6, 7], parent=4))
    assert not follow.branches
    index.apply(stored([9] * 4, [8], parent=5))  # from within what is new
    chain = index.chain([*LONG[:20], *[9] * 4])
    assert (follow.attached, list(follow.path), follow.branches) == (2, list(chain[4:]), 1)
    index.apply(stored([3] * 4, [9], parent=7))  # the earlier one goes on
    index.apply(stored([4] * 4, [10], parent=9))
    assert (list(follow.path), follow.branches) == (list(chain[4:]), 3)
    index.apply(stored([9] * 4, [11], parent=8))
    assert list(follow.path) == list(index.chain([*LONG[:20], *[9] * 8])[4:])
    index.apply(stored([8] * 4, [12], parent=2))  # from within what was known
    assert (follow.attached, list(follow.path)) == (0, list(index.chain([*LONG[:8], *[8] * 4])[2:]))
    index.unfollow(follow)
    assert not index._follows


def test_no_more_is_followed_than_there_is_room_for() -> None:
    index = index_of(stored(LONG[:8], [1, 2]))
    follow = followed(index, LONG[:8])
    follow.room = 3
    index.apply(stored(LONG[8:16], [3, 4], parent=2))
    index.apply(stored(LONG[16:28], [5, 6, 7], parent=4))
    index.apply(stored(LONG[28:32], [8], parent=7))
    assert list(follow.path) == list(index.chain(LONG)[2:5])
    index.apply(stored(LONG[20:24], [6], parent=5))
    assert len(follow.path) == 3
    index.unfollow(follow)
    assert not index._follows


def test_blocks_that_are_told_again_are_no_news() -> None:
    """`kv_cache_report_mode: full`, or a tail that was evicted and computed anew."""
    index = index_of(stored(LONG[:16], [1, 2, 3, 4]))
    follow = followed(index, LONG[:16])
    index.apply(stored(LONG[8:16], [3, 4], parent=2))
    assert (follow.attached, list(follow.path)) == (-1, [])
    index.apply(stored(LONG[8:20], [3, 4, 5], parent=2))
    assert (follow.attached, list(follow.path)) == (2, list(index.chain(LONG)[4:5]))
    index.apply(stored(LONG[16:20], [5], parent=4))
    assert not follow.branches
    assert len(follow.path) == 1


def test_what_is_forgotten_is_not_followed_any_more() -> None:
    index = index_of(stored(LONG[:16], [1, 2, 3, 4]))
    follow = followed(index, LONG[:16])
    index.apply(AllBlocksCleared())
    index.apply(stored(LONG[:20], [1, 2, 3, 4, 5]))
    assert follow.lost
    assert not len(follow.path)
    index.unfollow(follow)
