"""EngineCore: schedules requests over the block pool, meets prefill engines, dies of what kills the real one.

One `Core` is one data-parallel rank. It takes `Job`s (one prompt, one sample each) and gives tokens (run.py); it
knows nothing of HTTP or of the APIs' JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from tests.engine import nixl
from tests.engine.blocks import BlockPool
from tests.engine.gate import Gate
from tests.engine.run import HANDOFF_KEYS, EngineDeadError, Job, Run

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.engine.events import KvEvents


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
        self.on_step: Callable[[], None] = lambda: None
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
        for key in ("remote_block_ids", *HANDOFF_KEYS):
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
            self.on_step()

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
        keys = (*HANDOFF_KEYS, "tp_size")
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
