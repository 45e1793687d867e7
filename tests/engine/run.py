"""One request in the engine: from the queue through its prompt's KV, computed or pulled, to its last token.

It knows nothing of HTTP or of the APIs' JSON. What a handoff with a flaw does follows a table measured on vLLM 0.32
with the NIXL pull connector; the lines of the source are named where the behaviour would look odd without them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from tests.engine import nixl
from tests.engine.blocks import Allocation, Kv, chain, root, seed_of
from tests.engine.tokens import EOS_TOKEN, encode, natural_length, words

if TYPE_CHECKING:
    from tests.engine.core import Core

HANDOFF_KEYS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
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
        complete = params.get("remote_block_ids") and all(key in params for key in HANDOFF_KEYS)
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
        if any(key not in params for key in HANDOFF_KEYS):
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
        core.on_step()
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
