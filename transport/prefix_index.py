"""Which prompt prefixes an engine holds in its KV cache, exactly, from the events that it publishes. Pure.

The engine's block hashes can't be computed here (their algorithm, their seed and a LoRA's path are the engine's own
affair), so they are never guessed: they only name blocks. What is compared is a chain of our own over token ids,
LoRA name, salt and media, which the events carry beside the hashes (vLLM 0.32 distributed/kv_events.py,
v1/core/block_pool.py). Whatever can't be known is taken as not cached.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Final

import msgspec

from transport.u64 import U64Map, U64Set, nonzero

BLOCKS_MAX: Final = 262_144  # of 16 tokens: 4 million tokens, about 16 MB here
LORA_NAMES_MAX: Final = 4096
FOLLOWED_BLOCKS_MAX: Final = 8192  # of 16 tokens: a prompt of 131,072; some 300 bytes each while it is computed

BlockHash = int | bytes
"""The low 64 bits of the digest, or all of it under VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0 (kv_cache_utils.py)."""
_Hashes = Annotated[list[BlockHash], msgspec.Meta(max_length=1_000_000)]
_WHOLE: Final = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of KV groups (v1/kv_cache_interface.py) in which a block is found if and only if it is held."""


class BlockStored(msgspec.Struct, tag=True, gc=False):
    """Blocks that are now held: consecutive ones of one prompt, `block_size` tokens each."""

    block_hashes: _Hashes
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    """For each block: LoRA name, `[media hash, offset]`..., salt (first block only), digest of embeddings."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    locality: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, gc=False):
    """Blocks that are held no longer."""

    block_hashes: _Hashes
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """Nothing is held any longer."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Follow:
    """What the engine stores behind known blocks of one prompt while a request runs that goes on from there."""

    __slots__ = ("_known", "_left", "_places", "attached", "branches", "lost", "path", "room")

    def __init__(self, blocks: Sequence[int]) -> None:
        """`blocks`: consecutive ones of a chain."""
        self._known = {block: place for place, block in enumerate(blocks)}
        self._places: dict[int, int] = {}
        """Of the new ones in `path`."""
        self._left: set[int] = set()
        """New ones that are in it no more."""
        self.attached = -1
        """Behind which of the known blocks new ones came, by its place among them; -1: none have come."""
        self.path: array[int] = array("Q")
        """The new ones, each behind the one before; where two prompts went on from one block, the later one's."""
        self.branches = 0
        """How often that was."""
        self.room = FOLLOWED_BLOCKS_MAX
        """How long `path` may get. What is stored behind its end then is not followed."""
        self.lost = False
        """All was forgotten."""

    @property
    def watched(self) -> Iterable[int]:
        """Blocks behind which the next one may come."""
        return (*self._known, *self._places, *self._left)

    def grew(self, parent: int, blocks: Sequence[int]) -> Sequence[int]:
        """These were stored behind `parent`, a watched one. Returns those that have to be watched from now on."""
        at = 0
        while at < len(blocks) and (blocks[at] in self._known or blocks[at] in self._places):  # told again
            parent = blocks[at]
            at += 1
        new = [block for block in blocks[at:] if block not in self._left]
        if not new:
            return new
        if parent in self._left:  # the earlier one goes on
            self.branches += 1
            self._left.update(new)
            return new
        keep = self._places[parent] + 1 if parent in self._places else 0
        if keep < len(self.path):
            self.branches += 1
            for block in self.path[keep:]:
                del self._places[block]
                self._left.add(block)
            del self.path[keep:]
        if not keep:
            self.attached = self._known[parent]
        new = new[: max(self.room - keep, 0)]
        for block in new:
            self._places[block] = len(self.path)
            self.path.append(block)
        return new


class PrefixIndex:
    """One engine's (one data-parallel rank's) cache. Costs about 60 bytes a block."""

    def __init__(self) -> None:
        self.block_size = 0
        """Tokens in a block, 0 until the first event. Blocks of other sizes (partial ones) are not indexed."""
        self.counts: Counter[str] = Counter()
        """`stored`, `removed`: blocks. `orphaned`: stored under a parent that is not known. `foreign`: other media,
        groups or sizes. `dropped`: beyond `BLOCKS_MAX`. `cleared`: how often all was forgotten."""
        self._own_of = U64Map()
        """Engine hash -> own chain value."""
        self._held = U64Set()
        """Own chain values that are held."""
        self._follows: dict[int, list[Follow]] = {}
        """By the blocks that they watch."""
        self._group: int | None = None
        self._lora_ids: dict[str, int | None] = {}
        """The adapter that a LoRA name stands for. Its path is part of the engine's hashes, but not of its events;
        what was held for another adapter of the same name is not found any more."""

    def __len__(self) -> int:
        """Blocks that are known to be held."""
        return len(self._held)

    def clear(self) -> None:
        """Forget all: nothing is known of the engine's cache any more."""
        self._own_of.clear()
        self._held.clear()
        self.counts["cleared"] += 1
        for follows in self._follows.values():
            for follow in follows:
                follow.lost = True
        self._follows.clear()

    def apply(self, event: Event) -> None:
        """Follow one event, in the order of their sequence numbers."""
        if isinstance(event, BlockStored):
            self._store(event)
        elif isinstance(event, BlockRemoved):
            if event.medium in (None, "GPU") and event.locality != "REMOTE":
                for block_hash in event.block_hashes:
                    self._remove(_name(block_hash, event.group_idx))
        else:
            self.clear()

    def cached_tokens(
        self, token_ids: Sequence[int], *, lora_name: str | None = None, cache_salt: str | None = None
    ) -> int:
        """How many tokens of this prompt the engine would take from its cache: whole blocks from the start, never
        the last token (v1/core/kv_cache_manager.py `get_computed_blocks`).

        `token_ids`: the prompt as the engine tokenises it, without media and embeddings: what is not in the ids
        can't be looked up. `lora_name`: the adapter's, None for the base model. Costs about 3 us a block found.
        """
        found = 0
        for own in self._links(token_ids, len(token_ids) - 1, lora_name, cache_salt):
            if own not in self._held:
                break
            found += self.block_size
        return found

    def chain(
        self, token_ids: Sequence[int], *, lora_name: str | None = None, cache_salt: str | None = None
    ) -> "array[int]":
        """The prompt's whole blocks as `holds` knows them, held or not, the first one first; as `cached_tokens`
        otherwise. Costs about 1 us a block."""
        return array("Q", self._links(token_ids, len(token_ids), lora_name, cache_salt))

    def holds(self, block: int) -> bool:
        """Whether the engine holds this block of a `chain`, and with it all those before: it frees a prompt's
        blocks from behind, takes what was freed first, and evicts with a broken block what follows it (vLLM 0.32
        v1/core/single_type_kv_cache_manager.py `free`, block_pool.py `free_blocks`, sched/scheduler.py)."""
        return block in self._held

    def follow(self, blocks: Sequence[int]) -> Follow:
        """Watch what is stored behind these consecutive blocks of a `chain`, until `unfollow`."""
        follow = Follow(blocks)
        for block in follow.watched:
            self._watch(block, follow)
        return follow

    def unfollow(self, follow: Follow) -> None:
        for block in follow.watched:
            self._unwatch(block, follow)

    def _watch(self, block: int, follow: Follow) -> None:
        self._follows.setdefault(block, []).append(follow)

    def _unwatch(self, block: int, follow: Follow) -> None:
        follows = self._follows.get(block)
        if follows is not None and follow in follows:
            follows.remove(follow)
            if not follows:
                del self._follows[block]

    def _tell(self, parent: int, blocks: Sequence[int]) -> None:
        for follow in tuple(self._follows[parent]):
            for block in follow.grew(parent, blocks):
                self._watch(block, follow)

    def lora_id(self, lora_name: str | None) -> int | None:
        """Which of the adapters that had this name counts, as far as events have told; None for the base model."""
        return self._lora_ids.get(lora_name) if lora_name else None

    def _links(
        self, token_ids: Sequence[int], usable_tokens: int, lora_name: str | None, cache_salt: str | None
    ) -> Iterator[int]:
        """Own chain values of the whole blocks within the first `usable_tokens`; none where they can't be known."""
        size = self.block_size
        usable = usable_tokens // size if size else 0
        if usable < 1:
            return
        try:
            tokens = memoryview(array("I", token_ids[: usable * size])).cast("B")
        except (OverflowError, TypeError):  # no token of any model
            return
        width = size * _TOKEN_BYTES
        keys: list[Any] = []
        if lora_name:
            if lora_name not in self._lora_ids:
                return
            keys = [self._lora_ids[lora_name], lora_name]
        later = _extra(keys)
        extra = _extra([*keys, cache_salt]) if cache_salt else later
        own = 0
        for start in range(0, usable * width, width):
            own = _link(own, tokens[start : start + width], extra)
            yield own
            extra = later

    def _store(self, event: BlockStored) -> None:
        count = len(event.block_hashes)
        if not self._ours(event) or len(event.token_ids) != count * event.block_size:
            self.counts["foreign"] += count
            return
        own = 0
        if event.parent_block_hash is not None:
            parent = self._own_of.get(_name(event.parent_block_hash, event.group_idx))
            if parent is None:
                self.counts["orphaned"] += count
                return
            own = parent
        try:
            tokens = memoryview(array("I", event.token_ids)).cast("B")
        except OverflowError:
            self.counts["foreign"] += count
            return
        width = event.block_size * _TOKEN_BYTES
        extras = self._extras(event)
        parent, is_followed = own, own in self._follows
        told: list[int] = []
        for block, block_hash in enumerate(event.block_hashes):
            extra = extras[block] if block < len(extras) else b""
            own = _link(own, tokens[block * width : (block + 1) * width], extra)
            if len(self._held) >= BLOCKS_MAX and own not in self._held:
                self.counts["dropped"] += count - block
                self.counts["stored"] += block
                return
            self._own_of.put(_name(block_hash, event.group_idx), own)
            self._held.add(own)
            if is_followed:
                told.append(own)
        self.counts["stored"] += count
        if is_followed:
            self._tell(parent, told)

    def _extras(self, event: BlockStored) -> list[bytes]:
        if event.lora_name is None:
            return [_extra(keys) for keys in event.extra_keys or ()]
        self._lora_ids.pop(event.lora_name, None)
        self._lora_ids[event.lora_name] = event.lora_id
        if len(self._lora_ids) > LORA_NAMES_MAX:
            del self._lora_ids[next(iter(self._lora_ids))]
        return [_extra([event.lora_id, *(keys or ())]) for keys in event.extra_keys or ()]

    def _ours(self, event: BlockStored) -> bool:
        """Whether the event is of the one group of blocks that decides about a prefix. The first one seen is it."""
        whole = event.kv_cache_spec_kind in _WHOLE
        if event.medium not in (None, "GPU") or event.locality == "REMOTE" or not whole or event.block_size < 1:
            return False
        if not self.block_size:
            self.block_size, self._group = event.block_size, event.group_idx
        return (event.block_size, event.group_idx) == (self.block_size, self._group)

    def _remove(self, name: int) -> None:
        # A prompt that is held twice is removed twice: from the first time on it counts as not held, because events
        # that repeat what is held (`kv_cache_report_mode: full`, a client's choice) make counting impossible.
        own = self._own_of.pop(name)
        if own is not None:
            self._held.discard(own)
            self.counts["removed"] += 1


_TOKEN_BYTES: Final = array("I").itemsize


def _name(block_hash: BlockHash, group_idx: int | None) -> int:
    """A block's name in the map. Groups share hashes; only one group is indexed, and the others must not remove."""
    number = int.from_bytes(block_hash[-8:], "big") if isinstance(block_hash, bytes) else block_hash
    return nonzero(number ^ (group_idx or 0) * 0x9E3779B97F4A7C15)


def _link(parent: int, tokens: memoryview, extra: bytes) -> int:
    """One step of the chain: SipHash with this process's secret key, 64 bits."""
    return nonzero(hash((parent, tokens.tobytes(), extra)))


def _extra(keys: Sequence[Any] | None) -> bytes:
    return msgspec.msgpack.encode(keys) if keys else b""
