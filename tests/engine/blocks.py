"""The KV cache: a pool of blocks whose *contents* depend on the prompt that filled them, and the leases on them.

A block remembers what was computed before it (a hash chain) and the tokens in it, never whose it is. So a reader
with wrong block ids, or one that comes too late, gets somebody else's KV and no error, as with the real engine.
Knows nothing of requests' JSON, of HTTP, or of who reads. Thread-safe: two engines may live on two threads.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.engine.tokens import BYTES_PER_TOKEN, digest, to_bytes

ROOT = digest(b"root")


@dataclass(slots=True)
class Kv:
    """What is in one block: the chain hash of everything before it, and its own tokens as bytes."""

    before: bytes
    tokens: bytes

    def view(self, count: int) -> Kv:
        """The first `count` tokens; slots that were never written give KV that fits no prompt."""
        wanted = count * BYTES_PER_TOKEN
        missing = wanted - len(self.tokens)
        if missing > 0:
            return Kv(self.before, self.tokens + b"\xff" * missing)
        return Kv(self.before, self.tokens[:wanted])

    def after(self) -> bytes:
        return digest(self.before, self.tokens)


def root(lora: str | None, salt: str | None = None) -> bytes:
    """Where a chain starts. KV depends on the adapter; only the cache key depends on the salt."""
    if not lora and not salt:
        return ROOT
    return digest(ROOT, (lora or "").encode(), b"\0", (salt or "").encode())


def chain(start: bytes, tokens: array[int], block_size: int) -> list[Kv]:
    """The contents of the blocks that hold `tokens`, computed after `start`."""
    data = to_bytes(tokens)
    step = block_size * BYTES_PER_TOKEN
    contents = []
    before = start
    for offset in range(0, len(data), step):
        kv = Kv(before, data[offset : offset + step])
        contents.append(kv)
        before = kv.after()
    return contents


def seed_of(contents: Sequence[Kv]) -> bytes:
    """What the model makes of KV: equal for equal KV in equal order, and for nothing else."""
    if not contents:
        return ROOT
    return digest(*(kv.before for kv in contents), contents[-1].after())


@dataclass(slots=True)
class Lease:
    block_ids: list[int]
    deadline: float


@dataclass(slots=True)
class Allocation:
    block_ids: list[int]
    # Blocks at the start that came out of the prefix cache.
    hit_blocks: int


@dataclass
class BlockPool:
    """`num_blocks` blocks of `block_size` tokens with a prefix cache, reference counts and leases.

    Freed blocks keep their contents until they are needed again, least recently used first
    (v1/core/block_pool.py). Leases end lazily: whoever looks at the pool next finds the expired ones gone.
    """

    num_blocks: int
    block_size: int
    prefix_caching: bool = True
    clock: Callable[[], float] = time.monotonic
    on_free: Callable[[], None] = lambda: None
    on_expired: Callable[[int], None] = lambda _count: None
    on_evicted: Callable[[bytes], None] = lambda _key: None
    on_cleared: Callable[[], None] = lambda: None
    lock: threading.RLock = field(default_factory=threading.RLock)
    # While the engine is frozen (SIGSTOP) no lease ends.
    frozen: bool = False

    def __post_init__(self) -> None:
        self._contents: dict[int, Kv] = {}
        self._references: dict[int, int] = {}
        self._fresh: deque[int] = deque(range(self.num_blocks))
        self._freed: OrderedDict[int, None] = OrderedDict()
        self._block_of_key: dict[bytes, int] = {}
        self._key_of_block: dict[int, bytes] = {}
        self._leases: dict[str, Lease] = {}

    # -- reading the state

    @property
    def free_blocks(self) -> int:
        with self.lock:
            self._expire()
            return len(self._fresh) + len(self._freed)

    @property
    def used_blocks(self) -> int:
        return self.num_blocks - self.free_blocks

    @property
    def held_blocks(self) -> int:
        """Blocks of finished prefills that wait for a decode engine."""
        with self.lock:
            self._expire()
            return sum(len(lease.block_ids) for lease in self._leases.values())

    @property
    def leases(self) -> dict[str, float]:
        """Seconds left, by request id."""
        with self.lock:
            self._expire()
            now = self.clock()
            return {request_id: lease.deadline - now for request_id, lease in self._leases.items()}

    def next_expiry_seconds(self) -> float | None:
        return min(self.leases.values(), default=None)

    # -- blocks of running requests

    def keys(self, tokens: array[int], contents: Sequence[Kv], lora: str | None, salt: str | None) -> list[bytes]:
        """The cache keys of the *full* blocks of `tokens`; `contents` is their chain without the salt."""
        if not self.prefix_caching:
            return []
        if salt:
            contents = chain(root(lora, salt), tokens, self.block_size)
        full = len(tokens) // self.block_size
        keys = [kv.before for kv in contents[1:]]
        if len(keys) < full:
            keys.append(contents[-1].after())
        return keys[:full]

    def allocate(self, count: int, keys: Sequence[bytes] = (), max_hits: int = 0) -> Allocation | None:
        """`count` blocks, of the first `max_hits` as many as possible cached ones; None when too few are free."""
        with self.lock:
            self._expire()
            hits: list[int] = []
            for key in keys[:max_hits]:
                block = self._block_of_key.get(key)
                if block is None:
                    break
                hits.append(block)
            idle_hits = sum(1 for block in hits if block not in self._references)
            if count - len(hits) > len(self._fresh) + len(self._freed) - idle_hits:
                return None
            for block in hits:
                self._freed.pop(block, None)
                self._references[block] = self._references.get(block, 0) + 1
            block_ids = hits + [self._take() for _ in range(count - len(hits))]
            return Allocation(block_ids, len(hits))

    def grow(self) -> int | None:
        with self.lock:
            self._expire()
            if not self._fresh and not self._freed:
                return None
            return self._take()

    def write(self, block_ids: Sequence[int], contents: Sequence[Kv]) -> None:
        with self.lock:
            self._contents.update(zip(block_ids, contents, strict=True))

    def read(self, block_ids: Sequence[int]) -> list[Kv]:
        """Whatever is in these blocks now. A block that was never written holds nothing that fits a prompt."""
        with self.lock:
            return [self._contents.get(block) or Kv(b"", b"") for block in block_ids]

    def cache(self, block_ids: Sequence[int], keys: Sequence[bytes]) -> list[int]:
        """Let later prompts find these full blocks under these keys, whatever their contents are.

        The positions of those that were not there before.
        """
        new = []
        with self.lock:
            for place, (block, key) in enumerate(zip(block_ids, keys, strict=False)):
                if key not in self._block_of_key and block not in self._key_of_block:
                    self._block_of_key[key] = block
                    self._key_of_block[block] = key
                    new.append(place)
        return new

    def free(self, block_ids: Sequence[int]) -> None:
        with self.lock:
            # The tail of a prompt is the least likely to be wanted again, so it is evicted first.
            for block in reversed(block_ids):
                left = self._references.get(block, 0) - 1
                if left > 0:
                    self._references[block] = left
                elif self._references.pop(block, None) is not None:
                    self._freed[block] = None
        self.on_free()

    def reset_prefix_cache(self) -> None:
        with self.lock:
            self._block_of_key.clear()
            self._key_of_block.clear()
        self.on_cleared()

    # -- blocks on loan

    def hold(self, request_id: str, block_ids: list[int], seconds: float) -> None:
        with self.lock:
            self._leases[request_id] = Lease(block_ids, self.clock() + seconds)

    def extend(self, request_id: str, seconds: float) -> bool:
        with self.lock:
            self._expire()
            lease = self._leases.get(request_id)
            if lease is None:
                return False
            lease.deadline = max(lease.deadline, self.clock() + seconds)
            return True

    def release(self, request_id: str) -> bool:
        """Free what `request_id` holds; False if it holds nothing (any more)."""
        with self.lock:
            self._expire()
            lease = self._leases.pop(request_id, None)
        if lease is None:
            return False
        self.free(lease.block_ids)
        return True

    def _expire(self) -> None:
        if not self._leases or self.frozen:
            return
        now = self.clock()
        expired = [request_id for request_id, lease in self._leases.items() if lease.deadline <= now]
        for request_id in expired:
            lease = self._leases.pop(request_id)
            self.free(lease.block_ids)
        if expired:
            self.on_expired(len(expired))

    def _take(self) -> int:
        if self._fresh:
            block = self._fresh.popleft()
        else:
            block, _ = self._freed.popitem(last=False)
            key = self._key_of_block.pop(block, None)
            if key is not None:
                self._block_of_key.pop(key, None)
                self.on_evicted(key)
        self._references[block] = 1
        return block
