"""What serves requests in one process: ports, connections to engines, watches and rules. One of it in the usual
sidecar, one in each worker of `--workers`.

Must not know who keeps what a pod has one of: that is in `Shared`, as itself or as a replica.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from sidecar.background import Background
from sidecar.calls import Calls
from sidecar.connectors import CONNECTORS
from sidecar.connectors.connector import Channel, Handoff, Rejection
from sidecar.decision.cost import Costs
from sidecar.decision.rules import PrefixLookup, Rules
from sidecar.edge.engine import EnginePool
from sidecar.edge.server import Server
from sidecar.edge.service import Live, Observer, Service
from sidecar.exchange.budget import Recomputes
from sidecar.prefill.address import Address, parse
from sidecar.prefill.bootstrap import BootstrapGate
from sidecar.prefill.endpoints import Endpoint, Endpoints
from sidecar.prefill.p2p import P2PGate
from sidecar.prefill.p2p import alive as p2p_alive
from sidecar.prefill.watch import Watch
from sidecar.settings import Settings
from sidecar.tls import Tls
from sidecar.tracing.tracer import Tracer
from transport.descriptors import OutOfDescriptors

_log = logging.getLogger("sidecar")

ENGINE_CONNECT_TIMEOUT_S = 5.0


class NixlGate(Protocol):
    """The gate of NIXL handoffs: `sidecar.prefill.gate.Gate`, or the way to another process's."""

    def admit(
        self, endpoint: Endpoint, handoff: Handoff, admitted: Callable[[Handoff | Rejection], None]
    ) -> None: ...

    async def alive(self, handoff: Handoff, timeout_s: float) -> str: ...


@dataclass(frozen=True, slots=True)
class Shared:
    """What all requests of the pod share, whichever process serves them."""

    live: Live
    endpoints: Endpoints
    budget: Recomputes
    observer: Observer
    gate: NixlGate | None
    """None: the connector has no side channel, or handoffs are passed on as they are."""
    busy_elsewhere: Callable[[int], int] | None = None
    """Decode legs that other processes have open to a rank; None: there are no others."""


class Serving:
    """The servers of all ranks, and what is behind them. Made on the running loop."""

    def __init__(
        self,
        settings: Settings,
        shared: Shared,
        tls: Tls,
        calls: Calls,
        tracer: Tracer | None,
        background: Background,
    ) -> None:
        self._settings = settings
        self._shared = shared
        self._tls = tls
        self._calls = calls
        self._tracer = tracer
        self._background = background
        self._loop = asyncio.get_running_loop()
        self._costs = Costs.make(settings.stall_weight) if settings.decision_rule == "cost" else None
        self._bootstrap: BootstrapGate | None = None
        self._prefill_pools: dict[Address, EnginePool] = {}
        self._servers: list[Server] = []
        self._services: dict[int, Service] = {}
        self._engines: list[EnginePool] = []
        self.rules: list[Rules] = []
        """Those of each rank that is served."""

    def start(self) -> None:
        """The sessions are open; the first port is about to be."""
        settings = self._settings
        if CONNECTORS[settings.kv_connector].channel is Channel.MOONCAKE:
            timeout_s = settings.prefill_connect_timeout
            self._bootstrap = BootstrapGate(self._background, self._calls.session, timeout_s, time.monotonic)
        if self._tracer is not None:
            self._background.keep("sending of traces", self._tracer.run)
        self._background.keep("sweep of prefill connections", self._sweep_pools)

    async def listen(self, rank: int, index: PrefixLookup | None = None) -> None:
        """Serves one rank; `index` knows which prefixes its engine holds. Raises `OSError` if its port cannot be
        had."""
        settings, shared = self._settings, self._shared
        fetching = self._calls.engine_probe(rank).fetching
        watch = Watch(self._background, self._prefill_alive, fetching, settings.pull_timeout, self._loop.time)
        engine = EnginePool(
            self._loop,
            settings.model_server_host,
            settings.model_server_port + rank,
            uds=settings.model_server_uds,
            tls=self._tls.decode,
            connect_timeout_s=ENGINE_CONNECT_TIMEOUT_S,
            idle_timeout_s=settings.engine_idle_timeout,
        )
        self._engines.append(engine)
        connector = CONNECTORS[settings.kv_connector]
        own = _local_p2p(settings, rank)
        p2p = P2PGate(self._background, own, settings.prefill_connect_timeout)
        from_decode = settings.prefill_from_decode == "on"
        if from_decode and own is None:
            _log.warning("--prefill-from-decode needs --local-p2p: where the decode engine's P2P tier is")
        service = Service(
            loop=self._loop,
            settings=settings,
            live=shared.live,
            connector=connector,
            endpoints=shared.endpoints,
            budget=shared.budget,
            engine=engine,
            prefill_pool=self._prefill_pool,
            observer=shared.observer,
            watch=watch,
            gate=p2p if connector.channel is Channel.P2P else self._bootstrap or shared.gate,
            p2p=p2p if from_decode or settings.enable_p2p_pull == "on" else None,
            rules=self._make_rules(rank, engine, index),
            tracer=self._tracer,
            by_port=self._services,
        )
        self._services[settings.port + rank] = service
        shares_port = settings.workers > 1
        server = Server(service, settings.host, settings.port + rank, self._tls.serving, shares_port=shares_port)
        self._servers.append(server)
        try:
            await server.listen()
        except OSError as error:
            raise OSError(error.errno, f"--port {settings.port + rank}: {error.strerror or error}") from None

    def _make_rules(self, rank: int, engine: EnginePool, index: PrefixLookup | None) -> Rules:
        elsewhere = self._shared.busy_elsewhere
        rules = Rules(
            self._settings.min_remote_tokens,
            time.monotonic,
            costs=self._costs,
            index=index,
            running_now=(lambda: engine.busy) if elsewhere is None else (lambda: engine.busy + elsewhere(rank)),
            remote_media=self._settings.split_remote_media == "on",
        )
        self.rules.append(rules)
        return rules

    def busy(self, rank: int) -> int:
        """Decode legs that are open to a rank."""
        return self._engines[rank].busy

    def _prefill_pool(self, endpoint: Endpoint) -> EnginePool:
        address = endpoint.address
        pool = self._prefill_pools.get(address)
        if pool is None:
            pool = self._prefill_pools[address] = EnginePool(
                self._loop,
                address.host,
                address.port,
                tls=self._tls.prefill,
                connect_timeout_s=self._settings.prefill_connect_timeout,
                idle_timeout_s=self._settings.engine_idle_timeout,
            )
        return pool

    def forget(self, endpoint: Endpoint) -> None:
        """Nobody needs the endpoint any more."""
        pool = self._prefill_pools.get(endpoint.address)
        if pool is not None:
            pool.sweep(float("inf"))

    async def _sweep_pools(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            now = self._loop.time()
            known = {endpoint.address for endpoint in self._shared.endpoints}
            for address, pool in list(self._prefill_pools.items()):
                pool.sweep(now)
                if address not in known and pool.is_empty:
                    del self._prefill_pools[address]

    async def _prefill_alive(self, endpoint: Endpoint, handoff: Handoff | None, timeout_s: float) -> str:
        try:
            problem = await self._calls.prefill_probe(endpoint).healthy(timeout_s)
        except OutOfDescriptors:  # that we cannot ask says nothing against it
            return ""
        if problem or handoff is None:
            return problem
        if CONNECTORS[self._settings.kv_connector].channel is Channel.P2P:
            return await p2p_alive(handoff, timeout_s)
        gate = self._shared.gate
        return await gate.alive(handoff, timeout_s) if gate is not None else ""

    # -- the end ---------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Takes no new connection and waits for open answers, up to `--drain-timeout`. `live.draining` has been
        set."""
        timeout_s = self._settings.drain_timeout
        open_now = sum(server.open_connections for server in self._servers)
        _log.info("draining: %d client connections, up to %g s", open_now, timeout_s)
        cut = sum(await asyncio.gather(*[server.drain(timeout_s) for server in self._servers]))
        if cut:
            _log.warning("drain timeout: %d connections cut off", cut)

    def close(self) -> None:
        for server in self._servers:
            server.close()
        for pool in self._prefill_pools.values():
            pool.close()


def make_tracer(settings: Settings, counted: Callable[[str, int], None]) -> Tracer | None:
    """The tracer of this process, if `--tracing` wants one."""
    if settings.tracing == "off":
        return None
    return Tracer(settings.trace_sample, settings.otlp_endpoint, os.environ, counted)


def _local_p2p(settings: Settings, rank: int) -> Address | None:
    """Where the local engine's own P2P channel is, if anyone says it."""
    if settings.local_p2p:
        address = parse(settings.local_p2p)
        return Address(address.host, address.port + rank)
    host, port = (os.environ.get(f"VLLM_P2P_SIDE_CHANNEL_{name}", "") for name in ("HOST", "PORT"))
    return Address(host, int(port) + rank) if host and port.isdigit() else None
