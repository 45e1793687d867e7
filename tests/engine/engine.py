"""A simulated vLLM engine: HTTP in front, NIXL side channel beside, one `Core` for each data-parallel rank behind.

This file puts the parts together and owns the life of the whole: start, stop, freeze, kill, restart, and the way
from a dead core to a closed port. It knows no API's JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
import uuid
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.engine import routes
from tests.engine.apis.adapters import Adapters
from tests.engine.apis.schema import ApiError
from tests.engine.core import Core, Limits
from tests.engine.events import KvEvents
from tests.engine.faults import Faults
from tests.engine.wire import Connection, Server
from tests.ports import free_ports

if TYPE_CHECKING:
    from tests.engine.http_messages import Answer, Received

VERSION = "0.32.0"


class Engine:
    """Lives in the caller's event loop: `await start()`, `await stop()`.

    Every keyword that `Limits` has is taken too (`num_blocks=...`, `kv_lease_seconds=...`).
    """

    def __init__(
        self,
        *,
        model: str = "sim",
        served_models: Iterable[str] | None = None,
        loras: Iterable[str] = (),
        max_loras: int | None = None,
        runtime_loras: bool = False,
        lora_files: Iterable[str] = (),
        resolvable_loras: Iterable[str] = (),
        host: str = "127.0.0.1",
        port: int = 0,
        uds: str | None = None,
        side_channel_host: str = "127.0.0.1",
        side_channel_port: int = 0,
        data_parallel_size: int = 1,
        engine_id: str | None = None,
        max_model_len: int = 1_048_576,
        api_key: str | None = None,
        enable_prompt_tokens_details: bool = True,
        tool_parser: bool = True,
        enable_scale_out: bool = True,
        keep_alive_seconds: float = 5.0,
        compat_salt: str = "",
        kv_events_endpoint: str | None = None,
        kv_events_replay_endpoint: str | None = None,
        kv_events_topic: str = "",
        tls: ssl.SSLContext | None = None,
        seed: int = 0,
        **limits: Any,
    ) -> None:
        self.model = model
        self.served_models = list(served_models) if served_models is not None else [model]
        self.adapters = Adapters(
            {name: f"/adapters/{name}" for name in loras},
            (1 if loras or runtime_loras else 0) if max_loras is None else max_loras,
            runtime=runtime_loras,
            files=set(lora_files),
            resolvable=set(resolvable_loras),
        )
        self.host, self.port, self.uds = host, port, uds
        self.side_channel_host, self.side_channel_port = side_channel_host, side_channel_port
        self.data_parallel_size = data_parallel_size
        self.fixed_engine_id = engine_id
        self.max_model_len = max_model_len
        self.api_key = api_key
        self.enable_prompt_tokens_details = enable_prompt_tokens_details
        self.tool_parser = tool_parser
        self.enable_scale_out = enable_scale_out
        self.compat_salt = compat_salt
        self.tls = tls
        self.kv_events_endpoint = kv_events_endpoint
        self.kv_events_replay_endpoint = kv_events_replay_endpoint
        self.kv_events_topic = kv_events_topic
        self.limits = replace(Limits(), **limits)
        self.version = VERSION
        self.fingerprint = f"vllm-{VERSION}-51b0d9e4"
        self.faults = Faults(seed)
        self.server = Server(self._application, self.faults, keep_alive_seconds)
        self.cores: list[Core] = []
        self.started_at = 0.0
        self._listener: asyncio.Server | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._frozen = False

    # -- life

    async def start(self) -> None:
        """Listens when this returns; `port` and `side_channel_port` are the real ones then."""
        await self._start_cores()
        await self.accept()

    def _kv_events(self, rank: int) -> KvEvents | None:
        if self.kv_events_endpoint is None:
            return None
        return KvEvents(
            self.kv_events_endpoint, self.kv_events_replay_endpoint, rank=rank, topic=self.kv_events_topic
        )

    def _start_side_channels(self) -> None:
        """On consecutive ports, one for each rank; whatever is free if no port was asked for."""
        self.side_channel_port = self.side_channel_port or free_ports(len(self.cores))
        for rank, core in enumerate(self.cores):
            core.start(self.side_channel_port + rank)

    async def _start_cores(self) -> None:
        base_id = self.fixed_engine_id or str(uuid.uuid4())
        self.cores = []
        for rank in range(self.data_parallel_size):
            core = Core(
                self.limits,
                model=self.model,
                engine_id=f"{base_id}_dp{rank}" if self.data_parallel_size > 1 else base_id,
                side_channel_host=self.side_channel_host,
                compat_salt=self.compat_salt,
                events=self._kv_events(rank),
            )
            core.on_step = self._stepped
            self.cores.append(core)
        self.adapters.forget()
        self._start_side_channels()
        self.started_at = time.time()
        self._watchdog = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        self.thaw()
        await self._end()

    async def _end(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watchdog
            self._watchdog = None
        await self.refuse()
        self.server.abort_all()
        # The requests' tasks are cancelled by their connections' ends, in the next turns of the loop.
        while self.server.connections:  # noqa: ASYNC110 a few turns at most
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        for core in self.cores:
            await asyncio.get_running_loop().run_in_executor(None, core.stop)
        if self.uds is not None:
            Path(self.uds).unlink(missing_ok=True)  # noqa: ASYNC240 a local socket file

    async def kill(self) -> None:
        """SIGKILL: everything is dropped, the port is refused."""
        self.server.thaw()
        for core in self.cores:
            core.alive = False
        self._frozen = False
        await self._end()
        for core in self.cores:
            core.thaw()

    async def restart(self) -> None:
        """A new process on the same addresses, with a new engine id (unless one is fixed)."""
        await self.kill()
        await self.start()

    async def _watch(self) -> None:
        """From a dead core to a dead server: 503 on /health for a moment, then nobody is there."""
        died = [asyncio.create_task(core.died.wait()) for core in self.cores]
        try:
            await asyncio.wait(died, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in died:
                task.cancel()
        await asyncio.sleep(self.limits.death_seconds)
        for core in self.cores:
            core.die("another rank died")
        await self.refuse()
        # uvicorn's own shutdown: open answers end, idle connections are closed.
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and any(c.busy for c in self.server.connections):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        self.server.abort_all()
        for core in self.cores:
            await asyncio.get_running_loop().run_in_executor(None, core.stop)

    # -- the port

    async def accept(self) -> None:
        """Listen (again) on the same address."""
        if self._listener is not None:
            return
        loop = asyncio.get_running_loop()
        if self.uds is not None:
            self._listener = await loop.create_unix_server(lambda: Connection(self.server), self.uds)
            return
        self.port = self.port or free_ports()
        self._listener = await loop.create_server(
            lambda: Connection(self.server), self.host, self.port, backlog=2048, reuse_address=True, ssl=self.tls
        )

    async def refuse(self) -> None:
        """New connections are refused; open ones go on."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            await asyncio.sleep(0)

    def freeze(self) -> None:
        """SIGSTOP: nothing is read, answered or released; the kernel still accepts connections."""
        self._frozen = True
        for core in self.cores:
            core.freeze()
        self.server.freeze()

    def thaw(self) -> None:
        self._frozen = False
        for core in self.cores:
            core.thaw()
        self.server.thaw()

    def break_side_channel(self) -> None:
        """What one malformed message does: no more handshakes, and /health stays 200."""
        for core in self.cores:
            if core.side_channel is not None:
                core.side_channel.stop()

    # -- what tests look at

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def requests(self) -> list[Received]:
        return self.server.requests

    @property
    def connections_open(self) -> int:
        return len(self.server.connections)

    @property
    def connections_total(self) -> int:
        return self.server.connections_total

    @property
    def alive(self) -> bool:
        return bool(self.cores) and all(core.alive for core in self.cores)

    @property
    def cause_of_death(self) -> str | None:
        return next((core.cause_of_death for core in self.cores if core.cause_of_death), None)

    @property
    def running(self) -> int:
        return sum(len(core.running) for core in self.cores)

    @property
    def waiting(self) -> int:
        return sum(len(core.waiting) for core in self.cores)

    @property
    def aborted(self) -> int:
        return sum(core.aborted for core in self.cores)

    @property
    def held_blocks(self) -> int:
        """Blocks of finished prefills that nobody has read yet."""
        return sum(core.pool.held_blocks for core in self.cores)

    @property
    def used_blocks(self) -> int:
        return sum(core.pool.used_blocks for core in self.cores)

    @property
    def kv_usage(self) -> float:
        """0 to 1, as vllm:kv_cache_usage_perc."""
        return self.used_blocks / sum(core.pool.num_blocks for core in self.cores)

    @property
    def side_channel_alive(self) -> bool:
        return all(core.side_channel is not None and core.side_channel.alive for core in self.cores)

    @property
    def handshakes_served(self) -> int:
        return sum(core.side_channel.requests for core in self.cores if core.side_channel is not None)

    @property
    def handshakes_tried(self) -> int:
        return sum(core.handshakes.attempts for core in self.cores)

    @property
    def engine_id(self) -> str:
        return self.cores[0].engine_id

    @property
    def frozen(self) -> bool:
        return self._frozen

    def counter(self, name: str) -> float:
        return sum(core.counters[name] for core in self.cores)

    def _stepped(self) -> None:
        if self.adapters.max_loras:
            runs = [run for core in self.cores for run in (*core.running.values(), *core.waiting)]
            self.adapters.step([run.job.lora for run in runs if run.job.lora is not None])

    # -- requests

    def lora_of(self, name: str | None) -> str | None:
        return name if name in self.adapters.loaded else None

    def choose_core(self, received: Received) -> tuple[Core, int | None]:
        """The rank that the header pins, or the least loaded one; a rank out of range is refused later."""
        header = received.header("x-data-parallel-rank")
        rank = None
        with contextlib.suppress(ValueError):
            rank = int(header) if header is not None else None
        if rank is not None and 0 <= rank < len(self.cores):
            return self.cores[rank], rank
        return min(self.cores, key=lambda core: len(core.running) + len(core.waiting)), rank

    async def _application(self, received: Received) -> Answer:
        try:
            answer = await routes.dispatch(self, received)
        except ApiError as error:
            answer = error.answer()
        # starlette's CORS middleware, whether the request has an origin or not.
        answer.appended.append((b"vary", b"Origin"))
        return answer
