"""EngineCore: schedules requests over the block pool, computes or pulls their KV, dies of what kills the real one.

One `Core` is one data-parallel rank. It takes `Job`s (one prompt, one sample each) and gives tokens; it knows
nothing of HTTP or of the APIs' JSON. What a handoff with a flaw does follows a table measured on vLLM 0.32 with
the NIXL pull connector; the lines of the source are named where the behaviour would look odd without them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from tests.engine import nixl
from tests.engine.blocks import Allocation, BlockPool, Kv, chain, root, seed_of
from tests.engine.tokens import EOS_TOKEN, encode, natural_length, words

if TYPE_CHECKING:
    from tests.engine.events import KvEvents

_HANDOFF_KEYS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
BYTES_OF_KV_PER_TOKEN = 256  # of an invented, tiny model
DEAD_MESSAGE = "EngineCore encountered an issue. See stack trace (above) for the root cause."


class EngineDeadError(Exception):
    """The engine core is gone; every request gets this, then the server goes too."""

    def __init__(self) -> None:
        super().__init__(DEAD_MESSAGE)


class GenerationError(Exception):
    """One request failed and the engine lives: `finish_reason` "error" (kv_load_failure_policy `fail`)."""

    def __init__(self) -> None:
        super().__init__("Internal server error")


@dataclass(slots=True)
class Job:
    """One prompt, one sample."""

    request_id: str
    prompt: array[int]
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    sample: int = 0
    lora: str | None = None
    cache_salt: str | None = None
    prompt_logprobs: bool = False
    kv_params: dict[str, Any] | None = None


@dataclass(slots=True)
class Step:
    """What one step of the engine gave to one request."""

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class Limits:
    """Sizes, speeds and policies of an engine; vLLM's own name for each where it has one."""

    num_blocks: int = 65536
    block_size: int = 16
    max_num_seqs: int = 1024
    max_num_queued_reqs: int | None = None
    prefix_caching: bool = True
    kv_load_failure_policy: str = "fail"  # the default of config/kv_transfer.py:88
    kv_connector: bool = True
    kv_lease_seconds: float = 30.0
    handshake_timeout_seconds: float = 5.0
    transfer_failure_seconds: float = 0.0  # what NIXL takes to reject a read; about 1 s on a real engine
    prefill_seconds_per_1k_tokens: float = 0.0
    pull_seconds_per_1k_tokens: float = 0.0
    seconds_per_token: float = 0.0
    death_seconds: float = 0.3  # from the 500 to the closed port; under 1 s on a real engine


class Core:
    def __init__(
        self,
        limits: Limits,
        *,
        model: str,
        engine_id: str,
        side_channel_host: str = "127.0.0.1",
        compat_salt: str = "",
        events: KvEvents | None = None,
    ) -> None:
        self.limits = limits
        self.engine_id = engine_id
        self.compat_hash = nixl.compatibility_hash(model, compat_salt)
        self.blob = nixl.new_agent_blob()
        self.pool = BlockPool(
            limits.num_blocks,
            limits.block_size,
            limits.prefix_caching,
            on_free=self._blocks_freed,
            on_expired=self._count_expired,
            on_cleared=self._cache_cleared,
        )
        self.events = events
        if events is not None:
            self.pool.on_evicted = events.removed
        self.side_channel: nixl.SideChannel | None = None
        self._side_channel_host = side_channel_host
        self.handshakes = nixl.Handshakes(self.compat_hash, limits.handshake_timeout_seconds)
        self.alive = True
        self.cause_of_death: str | None = None
        # Cleared while frozen; every step of the engine passes through it.
        self.thawed = Gate()
        self.died: asyncio.Event = asyncio.Event()
        self.running: dict[str, Run] = {}
        self.waiting: deque[Run] = deque()
        self.aborted = 0
        self.counters: Counter[str] = Counter()
        self.sums: dict[str, float] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        # Who was met: engine id -> agent blob, and which engine answers at an address.
        self._agents: dict[Any, bytes] = {}
        self._engine_by_address: dict[tuple[Any, Any], Any] = {}
        self._handshaking: dict[Any, asyncio.Task[bytes]] = {}
        self._heartbeats: dict[str, Run] = {}
        self._heartbeat_task: asyncio.Task[None] | None = None
        self._last_heartbeat = 0.0
        self._parked_notifications: list[tuple[Any, str]] = []
        self._wakeup: asyncio.TimerHandle | None = None

    # -- life

    def start(self, side_channel_port: int) -> None:
        """OSError if the side channel can't have its port."""
        self._loop = asyncio.get_running_loop()
        if self.events is not None and not self.events.started:
            self.events.start()
        if self.limits.kv_connector:
            self.side_channel = nixl.SideChannel(
                self._side_channel_host, side_channel_port, {(0, 0): self._handshake_payload()}
            )
            self.side_channel.start()
            nixl.fabric[self.blob] = self

    def _handshake_payload(self) -> bytes:
        found = nixl.metadata(self.engine_id, self.blob, self.pool.num_blocks, self.pool.block_size)
        return msgspec.msgpack.encode(nixl.HandshakePayload(self.compat_hash, msgspec.msgpack.encode(found)))

    def close_side_channel(self) -> None:
        if self.side_channel is not None:
            self.side_channel.stop()

    def stop(self) -> None:
        """Everything of this start of the engine ends; its KV can be read by nobody any more."""
        self.alive = False
        nixl.fabric.pop(self.blob, None)
        if self._wakeup is not None:
            self._wakeup.cancel()
        for task in [*self._tasks, *self._handshaking.values()]:
            task.cancel()
        self.close_side_channel()
        self.handshakes.stop()
        if self.events is not None:
            self.events.stop()

    def die(self, cause: str) -> None:
        """The core is gone for good: all its requests fail, the server above closes soon after."""
        if not self.alive:
            return
        self.alive = False
        self.cause_of_death = cause
        nixl.fabric.pop(self.blob, None)
        for run in [*self.running.values(), *self.waiting]:
            run.fail(EngineDeadError())
        self.died.set()

    def freeze(self) -> None:
        self.pool.frozen = True
        self.thawed.close()
        if self.side_channel is not None:
            self.side_channel.running.clear()

    def thaw(self) -> None:
        self.pool.frozen = False
        self.thawed.open()
        if self.side_channel is not None:
            self.side_channel.running.set()

    @property
    def frozen(self) -> bool:
        return not self.thawed.is_open

    # -- what /metrics shows

    @property
    def active(self) -> list[Run]:
        return list(self.running.values())

    @property
    def pulling(self) -> int:
        """Requests whose KV is on its way."""
        return sum(1 for run in self.active if run.is_pulling)

    def observe(self, name: str, value: float) -> None:
        self.counters[f"{name}_count"] += 1
        self.sums[name] = self.sums.get(name, 0.0) + value

    def observed(self, name: str) -> tuple[int, float]:
        return self.counters[f"{name}_count"], self.sums.get(name, 0.0)

    # -- requests

    @contextlib.asynccontextmanager
    async def run(self, job: Job) -> AsyncIterator[Run]:
        """The request is in the engine inside this block; leaving it early is an abort."""
        if not self.alive:
            raise EngineDeadError
        run = Run(self, job)
        self._track_heartbeat(run)
        try:
            yield run
        finally:
            run.close()

    def reject(self, params: dict[str, Any]) -> None:
        """A request with a handoff that ended in the API server: tell the prefill engine to free its blocks.

        A pre-aborted request passes through the connector, which reads all five keys without looking
        (generate/base/serving.py:271-303, nixl/metadata.py:332).
        """
        if not self.alive or not self.limits.kv_connector or not params.get("do_remote_prefill"):
            return
        for key in ("remote_block_ids", *_HANDOFF_KEYS):
            if key not in params:
                self.die(f"KeyError: {key!r}")
                return
        engine_id = params["remote_engine_id"]
        request_id = f"{params['remote_request_id']}"
        try:
            known = engine_id in self._agents
        except TypeError as error:
            self.die(f"TypeError: {error}")
            return
        if known:
            self.notify(engine_id, request_id)
            return
        self._parked_notifications.append((engine_id, request_id))
        self._spawn(self._meet_quietly(params))

    def notify(self, engine_id: Any, request_id: str, blob: bytes | None = None) -> None:
        """Tell a prefill engine that the blocks of `request_id` were read (pull_worker.py:642-693)."""
        peer = nixl.fabric.get(blob or self._agents.get(engine_id, b""))
        if peer is None:
            self.counters["nixl_num_failed_notifications_total"] += 1
        else:
            peer.notified(request_id)

    def notified(self, request_id: str) -> None:
        """Called by the decode engine, maybe on another thread."""
        if not self.pool.release(request_id):
            self.counters["nixl_num_notifications_after_expiry_total"] += 1

    def heartbeat(self, message: str) -> None:
        """`HB:` and the request ids, joined by commas: an id with a comma in it renews nothing."""
        for request_id in message.removeprefix("HB:").split(","):
            self.pool.extend(request_id, self.limits.kv_lease_seconds * 2 / 3)

    # -- scheduling

    def schedule(self) -> None:
        """Admit waiting requests in order of arrival while there are seats and blocks."""
        self._flush_notifications()
        while self.waiting:
            run = self.waiting[0]
            if len(self.running) >= self.limits.max_num_seqs or not run.allocate():
                self._wake_at_expiry()
                return
            self.waiting.popleft()
            self.running[run.key] = run
            run.admitted.set_result(None)

    def _wake_at_expiry(self) -> None:
        seconds = self.pool.next_expiry_seconds()
        if seconds is not None and self._loop is not None and self._wakeup is None:
            self._wakeup = self._loop.call_later(max(seconds, 0.001), self._woken)

    def _woken(self) -> None:
        self._wakeup = None
        self.schedule()

    def _blocks_freed(self) -> None:
        if self.waiting and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.schedule)

    def _count_expired(self, count: int) -> None:
        self.counters["nixl_num_kv_expired_reqs_total"] += count

    def _flush_notifications(self) -> None:
        # A cold decode engine sends these only with its next step, once the handshake is done.
        waiting = []
        for engine_id, request_id in self._parked_notifications:
            if engine_id in self._agents:
                self.notify(engine_id, request_id)
            elif engine_id in self._handshaking:
                waiting.append((engine_id, request_id))
        self._parked_notifications = waiting

    # -- the prefix cache

    def cache(self, block_ids: list[int], keys: list[bytes], tokens: array[int], job: Job) -> None:
        """Full blocks become findable, and the world is told of those that are new."""
        new = self.pool.cache(block_ids, keys)
        if self.events is None:
            return
        if new:
            # New ones are the last ones: a cached prefix has no holes.
            self.events.stored(keys, new[0], new[-1] + 1, tokens, self.pool.block_size, job.lora, job.cache_salt)
        self.events.flush()

    def _cache_cleared(self) -> None:
        if self.events is not None:
            self.events.cleared()
            self.events.flush()

    # -- meeting prefill engines

    async def meet(self, params: dict[str, Any]) -> bytes:
        """The agent of the engine that the handoff names; HandshakeError if it can't be met."""
        engine_id = params["remote_engine_id"]
        if engine_id in self._agents:
            return self._agents[engine_id]
        task = self._handshaking.get(engine_id)
        if task is None:
            task = asyncio.create_task(self._handshake(engine_id, params))
            self._handshaking[engine_id] = task
            task.add_done_callback(lambda _task: self._handshaking.pop(engine_id, None))
        return await asyncio.shield(task)

    async def _handshake(self, engine_id: Any, params: dict[str, Any]) -> bytes:
        host, port = params["remote_host"], params["remote_port"]
        try:
            found = await asyncio.wrap_future(
                self.handshakes.submit(engine_id, host, port, params.get("tp_size", 1), params.get("pp_size", 1))
            )
        except nixl.HandshakeError:
            self.counters["nixl_num_failed_transfers_total"] += 1
            raise
        self._agents[engine_id] = found.agent_metadata
        # Another engine at the same address replaces the one that was there (base_worker.py:3585-3651).
        with contextlib.suppress(TypeError):
            previous = self._engine_by_address.get((host, port))
            self._engine_by_address[(host, port)] = engine_id
            if previous is not None and previous != engine_id:
                self._agents.pop(previous, None)
        return found.agent_metadata

    async def _meet_quietly(self, params: dict[str, Any]) -> None:
        with contextlib.suppress(nixl.HandshakeError):
            await self.meet(params)

    def forget_peers(self) -> None:
        """As if this decode engine had met nobody yet (cold)."""
        self._agents.clear()
        self._engine_by_address.clear()

    @property
    def known_engines(self) -> list[Any]:
        return list(self._agents)

    # -- heartbeats

    def _track_heartbeat(self, run: Run) -> None:
        params = run.job.kv_params
        if not self.limits.kv_connector or not params or not params.get("do_remote_prefill"):
            return
        keys = (*_HANDOFF_KEYS, "tp_size")
        if any(params.get(key) is None for key in keys):
            return
        try:
            hash((params["remote_engine_id"], params["remote_request_id"]))
        except TypeError as error:
            self.die(f"TypeError: {error}")
            raise EngineDeadError from error
        self._heartbeats[run.key] = run
        if self._heartbeat_task is None or self._heartbeat_task.done():
            self._heartbeat_task = self._spawn(self._beat())

    def stop_heartbeat(self, key: str) -> None:
        self._heartbeats.pop(key, None)

    async def _beat(self) -> None:
        # Every sixth of the lease, for requests that still wait for KV (base_scheduler.py:88, 507-512).
        interval = self.limits.kv_lease_seconds / 6
        while self._heartbeats and self.alive:
            due = self._last_heartbeat + interval - time.monotonic()
            await asyncio.sleep(max(due, 0.001))
            await self.thawed.wait()
            if not self._heartbeats or not self.alive:
                return
            self._last_heartbeat = time.monotonic()
            by_engine: dict[Any, list[Run]] = {}
            for run in self._heartbeats.values():
                by_engine.setdefault(run.params["remote_engine_id"], []).append(run)
            for engine_id, group in by_engine.items():
                ids = [run.params["remote_request_id"] for run in group]
                if engine_id not in self._agents:
                    # Those that run meet the engine by themselves; for the others it is met in time.
                    if not any(run.admitted.done() for run in group):
                        self._spawn(self._meet_quietly(group[0].params))
                    continue
                try:
                    message = "HB:" + ",".join(ids)
                except TypeError as error:
                    self.die(f"TypeError: {error}")
                    return
                peer = nixl.fabric.get(self._agents[engine_id])
                if peer is not None and not peer.frozen:
                    peer.heartbeat(message)

    def _spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class Run:
    """One job inside the engine: `await prefill()`, then iterate over `decode()`."""

    def __init__(self, core: Core, job: Job) -> None:
        self.core = core
        self.job = job
        # Eight random hex digits make the engine's own id unique (v1/engine/input_processor.py:371).
        self.key = f"{job.request_id}-{os.urandom(4).hex()}"
        self.arrived_at = time.perf_counter()
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.cached_tokens = 0
        # Prompt tokens computed here whose blocks are in the prefix cache now (v1/metrics/stats.py:342).
        self.created_tokens = 0
        self.kv_transfer_params: dict[str, Any] | None = None
        self.generated = 0
        self.finish_reason: str | None = None
        self._allocation: Allocation | None = None
        self._block_ids: list[int] = []
        self._keys: list[bytes] = []
        self._wanted: list[Kv] = []
        self._contents: list[Kv] = []
        self._tokens: array[int] = array("I")
        self._seed = b""
        self._death: asyncio.Future[NoReturn] | None = None
        self._error: Exception | None = None
        self._waiter: asyncio.Future[Any] | None = None
        self._held = False
        self._leaked = False
        self._pulling: asyncio.Task[bool] | None = None
        params = job.kv_params if core.limits.kv_connector else None
        self.params: dict[str, Any] = params or {}
        self._pulls = bool(self.params.get("do_remote_prefill")) and not job.prompt_logprobs
        self._serves = bool(self.params.get("do_remote_decode"))

    # -- prefill

    async def prefill(self) -> None:
        """Until the first token could be given: waits for blocks, then computes or pulls the prompt's KV."""
        core, job = self.core, self.job
        if core.frozen:
            await core.thawed.wait()
        block_size = core.limits.block_size
        # What the KV of this prompt is to be; what is found or pulled may be something else.
        self._wanted = chain(root(job.lora), job.prompt, block_size)
        if not job.prompt_logprobs:
            self._keys = core.pool.keys(job.prompt, self._wanted, job.lora, job.cache_salt)
        self._check_read_back()
        core.waiting.append(self)
        core.schedule()
        if not self.admitted.done():
            await self._until(self.admitted)
        self._raise_error()
        assert self._allocation is not None
        hits = self._allocation.hit_blocks
        local_hit = hits * block_size
        self.cached_tokens = local_hit
        core.counters["prefix_cache_queries_total"] += len(job.prompt)
        core.counters["prefix_cache_hits_total"] += local_hit
        pulled = False
        if self._pulls:
            pulled = await self._load(hits)
        elif self.params.get("do_remote_prefill"):
            # Prompt logprobs need every position computed here; the prefill engine is told at once.
            self._release_remote()
        core.stop_heartbeat(self.key)
        external = len(job.prompt) - local_hit if pulled else 0
        computed = len(job.prompt) - local_hit - external
        if not pulled:
            self._compute(hits)
            if core.limits.prefill_seconds_per_1k_tokens and computed:
                await self._sleep(core.limits.prefill_seconds_per_1k_tokens * computed / 1000)
        self._seed = seed_of(self._contents)
        core.cache(self._block_ids, self._keys, job.prompt, job)
        self.created_tokens = max(0, len(self._keys) * block_size - local_hit - external)
        self._count_prompt(local_hit, external, computed)

    @property
    def is_pulling(self) -> bool:
        return self._pulling is not None

    def allocate(self) -> bool:
        """Called by the scheduler. At least the last token is always computed, so it is never a hit."""
        limit = (len(self.job.prompt) - 1) // self.core.limits.block_size
        needed = -(-len(self.job.prompt) // self.core.limits.block_size)
        self._allocation = self.core.pool.allocate(needed, self._keys, limit)
        if self._allocation is None:
            return False
        self._block_ids = list(self._allocation.block_ids)
        return True

    def _compute(self, hits: int) -> None:
        pool, job = self.core.pool, self.job
        contents = pool.read(self._block_ids[:hits])
        if contents == self._wanted[:hits]:
            contents += self._wanted[hits:]
        else:
            rest = job.prompt[hits * pool.block_size :]
            contents += chain(contents[-1].after(), rest, pool.block_size)
        pool.write(self._block_ids[hits:], contents[hits:])
        self._contents = contents

    def _check_read_back(self) -> None:
        """A prefill request with a whole handoff claims tokens that nobody fetches (pull_scheduler.py:67-134)."""
        params = self.params
        complete = params.get("remote_block_ids") and all(key in params for key in _HANDOFF_KEYS)
        if not self._serves or self._pulls or not complete:
            return
        count = params.get("remote_num_tokens") or 0
        try:
            claimed = min(count, len(self.job.prompt))
        except TypeError as error:
            self._die(f"TypeError: {error}")
        if claimed >= 64:  # kv_recompute_threshold
            self._leaked = True

    async def _load(self, hits: int) -> bool:
        """True if the prompt's KV came from the prefill engine, False if it is to be computed here."""
        params = self.params
        remote = params.get("remote_block_ids")
        if not remote:
            self._die("AssertionError: num_external_tokens == 0 (pull_scheduler.py:186)")
        if any(key not in params for key in _HANDOFF_KEYS):
            # "Got invalid KVTransferParams", and then WAITING_FOR_REMOTE_KVS for ever; the blocks are lost.
            self._leaked = True
            await self._until(asyncio.get_running_loop().create_future())
        try:
            hash(params["remote_engine_id"])
            hash(params["remote_request_id"])
        except TypeError as error:
            self._die(f"TypeError: {error}")
        self._pulling = self.core._spawn(self._pull(hits, remote))
        try:
            loaded = await self._until(self._pulling)
        except nixl.HandshakeError:
            loaded = False
        except _PoisonedPull as poison:
            self._die(str(poison))
        self._pulling = None
        if loaded:
            return True
        if self.core.limits.kv_load_failure_policy == "fail":
            self._finish("error")
            raise GenerationError
        return False

    async def _pull(self, hits: int, remote: Any) -> bool:
        core, params = self.core, self.params
        blob = await core.meet(params)
        began_at = time.perf_counter()
        peer: Core | None = nixl.fabric.get(blob)
        local = self._block_ids[hits:]
        ids = _first_group(remote)
        if len(local) > len(ids):
            raise _PoisonedPull("AssertionError: num_decode_blocks <= len(prefill_group) (base_worker.py:3453)")
        ids = ids[-len(local) :]
        if peer is not None and peer.frozen:
            await peer.thawed.wait()
        if core.limits.pull_seconds_per_1k_tokens:
            tokens = len(self.job.prompt) - hits * core.limits.block_size
            await asyncio.sleep(core.limits.pull_seconds_per_1k_tokens * tokens / 1000)
        if peer is None or not peer.alive or any(not 0 <= block < peer.pool.num_blocks for block in ids):
            if core.limits.transfer_failure_seconds:
                await asyncio.sleep(core.limits.transfer_failure_seconds)
            core.counters["nixl_num_failed_transfers_total"] += 1
            return False
        size = core.limits.block_size
        tokens_in = [min(size, len(self.job.prompt) - (hits + i) * size) for i in range(len(local))]
        contents = [kv.view(count) for kv, count in zip(peer.pool.read(ids), tokens_in, strict=True)]
        core.pool.write(local, contents)
        self._contents = core.pool.read(self._block_ids[:hits]) + contents
        core.observe("nixl_xfer_time_seconds", time.perf_counter() - began_at)
        core.observe("nixl_bytes_transferred", len(local) * size * BYTES_OF_KV_PER_TOKEN)
        core.notify(params["remote_engine_id"], f"{params['remote_request_id']}", blob)
        self.params = {**params, "do_remote_prefill": False}
        return True

    def _release_remote(self) -> None:
        self.core.reject(self.params)
        self._raise_error()

    def _count_prompt(self, local_hit: int, external: int, computed: int) -> None:
        job, counters = self.job, self.core.counters
        if external:
            # Without the number of the prefill engine everything that was pulled counts as cached.
            self.cached_tokens = local_hit + external
        remote_cached = (job.kv_params or {}).get("remote_prefill_cached_tokens")
        if (job.kv_params or {}).get("do_remote_prefill") and isinstance(remote_cached, int):
            self.cached_tokens = remote_cached
        counters["prompt_tokens_total"] += len(job.prompt)
        counters["prompt_tokens_cached_total"] += local_hit + external
        counters["external_prefix_cache_queries_total"] += len(job.prompt) - local_hit
        counters["external_prefix_cache_hits_total"] += external
        self.core.observe("time_to_first_token_seconds", time.perf_counter() - self.arrived_at)
        self.core.observe("request_prompt_tokens", len(job.prompt))
        counters["prompt_tokens_local_compute"] += computed
        counters["prompt_tokens_local_cache_hit"] += local_hit
        counters["prompt_tokens_external_kv_transfer"] += external

    # -- decode

    async def decode(self) -> AsyncIterator[Step]:
        """One step for each token; the last one carries `finish_reason`."""
        core, job = self.core, self.job
        if self._leaked:
            await self._until(asyncio.get_running_loop().create_future())
        seed = self._seed if not job.sample else self._seed + bytes([job.sample % 256])
        length = natural_length(seed)
        pause = core.limits.seconds_per_token
        text = ""
        self._tokens = array("I", job.prompt)
        for word in words(seed):
            if pause:
                await self._sleep(pause)
            else:
                await asyncio.sleep(0)
            if core.frozen:
                await core.thawed.wait()
            self._raise_error()
            ended = self.generated >= length and self.generated >= job.min_tokens and not job.ignore_eos
            token = EOS_TOKEN if ended else encode(word)[0]
            step = Step("" if ended else word, [token])
            self.generated += 1
            self._append(token)
            if ended:
                step.finish_reason = "stop"
            elif self.generated > job.min_tokens and token in job.stop_token_ids:
                step.finish_reason, step.stop_reason = "stop", token
            elif job.stop:
                text = self._apply_stop(text, step)
            if step.finish_reason is None and self.generated >= job.max_tokens:
                step.finish_reason = "length"
            if step.finish_reason is not None:
                self._finish(step.finish_reason)
                yield step
                return
            yield step

    def _apply_stop(self, text: str, step: Step) -> str:
        # The real engine holds back text that may yet become a stop string; words are short enough not to.
        job = self.job
        whole = text + step.text
        for stop in job.stop:
            at = whole.find(stop, max(0, len(text) - len(stop) + 1))
            if at >= 0 and self.generated > job.min_tokens:
                end = at + len(stop) if job.include_stop else at
                step.text = whole[len(text) : end] if end > len(text) else ""
                step.finish_reason, step.stop_reason = "stop", stop
        return whole

    def _append(self, token: int) -> None:
        self._tokens.append(token)
        # The newest token's own KV is written one step later, so N + m - 1 tokens are in the cache.
        computed = len(self._tokens) - 1
        if computed > len(self._block_ids) * self.core.limits.block_size:
            block = self.core.pool.grow()
            if block is not None:
                self._block_ids.append(block)

    def _finish(self, reason: str) -> None:
        core, job = self.core, self.job
        self.finish_reason = reason
        core.counters[f"request_success_{reason}"] += 1
        core.counters["generation_tokens_total"] += self.generated
        core.observe("request_generation_tokens", self.generated)
        core.observe("e2e_request_latency_seconds", time.perf_counter() - self.arrived_at)
        if reason == "error":
            return
        self._write_generated()
        if not self._serves:
            return
        params: dict[str, Any] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(self._block_ids)],
            "remote_engine_id": core.engine_id,
            "remote_request_id": self.key,
            "remote_host": core.side_channel.host if core.side_channel else "localhost",
            "remote_port": core.side_channel.port if core.side_channel else 0,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": len(job.prompt) + self.generated - 1,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
        }
        if self.generated == 1:
            params["remote_prefill_cached_tokens"] = self.cached_tokens
        self._held = True
        core.pool.hold(self.key, list(self._block_ids), core.limits.kv_lease_seconds)
        self.kv_transfer_params = params

    def _write_generated(self) -> None:
        """Put the KV of the generated tokens into the blocks, so that a next turn finds it in the cache."""
        if self.generated < 2 or not self._contents:
            return
        pool = self.core.pool
        size = pool.block_size
        first = (len(self.job.prompt) - 1) // size
        computed = self._tokens[: len(self._tokens) - 1]
        contents = chain(self._contents[first].before, computed[first * size :], size)
        ids = self._block_ids[first:]
        pool.write(ids, contents[: len(ids)])
        if self._keys or len(self.job.prompt) < size:
            whole = self._wanted[:first] + contents
            keys = pool.keys(computed, whole, self.job.lora, self.job.cache_salt)
            self.core.cache(self._block_ids, keys, computed, self.job)

    # -- ends

    def fail(self, error: Exception) -> None:
        self._error = error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    def close(self) -> None:
        core = self.core
        core.stop_heartbeat(self.key)
        with contextlib.suppress(ValueError):
            core.waiting.remove(self)
        core.running.pop(self.key, None)
        if self.finish_reason is None:
            core.aborted += 1
            core.counters["request_success_abort"] += 1
        if self._pulling is not None and not self._pulling.done():
            # The read can't be called back: its target blocks stay pinned until it ends.
            self._pulling.add_done_callback(lambda task: self._free_after_pull(task))
        elif not self._leaked and not self._held and self._block_ids:
            core.pool.free(self._block_ids)
        if core.waiting:
            core.schedule()

    def _free_after_pull(self, task: asyncio.Task[bool]) -> None:
        if not task.cancelled():
            task.exception()
        self.core.pool.free(self._block_ids)

    def _die(self, cause: str) -> NoReturn:
        self.core.die(cause)
        raise EngineDeadError

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if self.core.frozen:
            await self.core.thawed.wait()
        self._raise_error()

    async def _until(self, awaitable: asyncio.Future[Any]) -> Any:
        """Wait for it, or for the death of the engine; leaving early does not cancel it."""
        self._raise_error()
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait({awaitable, self._waiter}, return_when=asyncio.FIRST_COMPLETED)
            if self._waiter.done():
                self._waiter.result()
            return awaitable.result()
        finally:
            self._waiter = None


class _PoisonedPull(Exception):
    """An exception inside the worker's read: the whole engine goes."""


def _first_group(remote: Any) -> list[int]:
    """The block ids of the only KV group, as leniently as the real worker reads them."""
    try:
        group = list(remote[0])
        return [int(block) if not isinstance(block, str) else _no_number(block) for block in group]
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise _PoisonedPull(f"{type(error).__name__}: {error}") from error


def _no_number(block: str) -> NoReturn:
    raise ValueError(f"invalid block id {block!r}")


class Gate:
    """An event that tasks of several event loops may wait for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = True
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    @property
    def is_open(self) -> bool:
        return self._open

    def open(self) -> None:
        with self._lock:
            self._open = True
            waiters, self._waiters = self._waiters, []
        for loop, future in waiters:
            if not loop.is_closed():
                loop.call_soon_threadsafe(_resolve, future)

    def close(self) -> None:
        with self._lock:
            self._open = False

    async def wait(self) -> None:
        while True:
            with self._lock:
                if self._open:
                    return
                loop = asyncio.get_running_loop()
                future: asyncio.Future[None] = loop.create_future()
                self._waiters.append((loop, future))
            await future


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
