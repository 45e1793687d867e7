"""The parts of one process, put together, started and ended. The only file that knows every room."""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import time
from collections.abc import Sequence

import aiohttp
from aiohttp import web

from sidecar import __version__, config, process, tls
from sidecar.admin.app import application
from sidecar.admin.health import Health
from sidecar.admin.observer import Observer
from sidecar.admin.switch import File, Switch
from sidecar.background import Background
from sidecar.connectors import CONNECTORS
from sidecar.connectors.connector import Channel, Handoff
from sidecar.decision.cost import Costs
from sidecar.decision.guards import Mode
from sidecar.decision.rules import Rules
from sidecar.decision.scraper import Scraper
from sidecar.edge.engine import EnginePool
from sidecar.edge.server import Server
from sidecar.edge.service import Live, Service
from sidecar.exchange.budget import Budget
from sidecar.prefill.address import Address, AllowList, parse
from sidecar.prefill.bootstrap import BootstrapGate
from sidecar.prefill.discovery.discovery import Discovery
from sidecar.prefill.discovery.make import make_source
from sidecar.prefill.endpoints import Endpoint, Endpoints
from sidecar.prefill.facts import FactsKeeper
from sidecar.prefill.gate import Gate
from sidecar.prefill.p2p import P2PGate
from sidecar.prefill.p2p import alive as p2p_alive
from sidecar.prefill.probe import Access, EngineProbe
from sidecar.prefill.warmup import WarmUp
from sidecar.prefill.watch import Watch
from sidecar.settings import Settings
from sidecar.tracing.tracer import Tracer
from transport.kv_events import KvEvents
from transport.prefix_index import PrefixIndex
from transport.prober import Endpoint as SideChannel
from transport.side_channels import SideChannels

_log = logging.getLogger("sidecar")

ENGINE_CONNECT_TIMEOUT_S = 5.0


class Sidecar:
    """All the parts of one process."""

    def __init__(self, settings: Settings, flags: Sequence[str]) -> None:
        self.settings = settings
        self._flags = flags
        loop = self._loop = asyncio.get_running_loop()
        self._live = Live(Mode(settings.disagg))
        self._switch = Switch(self._live)
        self._background = Background()
        allow = AllowList(settings.prefill_allow)
        self._gate: Gate | None = None
        if settings.nixl_relay == "on" and CONNECTORS[settings.kv_connector].channel is Channel.NIXL:
            self._gate = Gate(self._background, settings.prefill_side_channel_port)
        self._bootstrap: BootstrapGate | None = None
        self._channels: SideChannels | None = None
        self._warm_up: WarmUp | None = None
        self._endpoints = Endpoints(
            [parse(text) for text in settings.prefill],
            allow,
            time.monotonic,
            samples=settings.enable_prefiller_sampling == "on",
            learned=self._gate.learn if self._gate else _ignore,
            forgotten=self._forget,
        )
        self._costs = Costs.make(settings.stall_weight) if settings.decision_rule == "cost" else None
        self._kv_events: list[KvEvents] = []
        self._budget = Budget(settings.recompute_max_concurrent, settings.recompute_max_tokens)
        self._observer = Observer(self._endpoints, self._budget)
        self._tls = tls.Tls(settings, self._observer.tls_handshake)
        self._observer.certificate_ends = lambda: self._tls.serving_ends
        self._to_prefill = Access(self._tls.prefill, lambda: self._tls.probe_key.key)
        self._to_engine = Access(self._tls.decode, lambda: self._tls.probe_key.key)
        self._tracer = (
            Tracer(settings.trace_sample, settings.otlp_endpoint, os.environ, self._observer.traced)
            if settings.tracing == "on"
            else None
        )
        source = make_source(settings)
        if source is not None:
            self._observer.discovery = Discovery(
                source, self._endpoints, time.monotonic, self._observer.discovery_failed
            )
        self._facts = FactsKeeper(self._background, self._prefill_probe, loop.time)
        self._prefill_pools: dict[Address, EnginePool] = {}
        self._session: aiohttp.ClientSession | None = None
        self._uds_session: aiohttp.ClientSession | None = None
        self._servers: list[Server] = []
        self._services: dict[int, Service] = {}
        self._admin: web.AppRunner | None = None
        self._stop: asyncio.Future[int] = loop.create_future()
        self._stopping = False

    # -- start ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises `OSError` if a port cannot be had."""
        settings = self.settings
        process.raise_descriptor_limit()
        if self._tls.in_use:
            process.give_large_blocks_back()
        self._session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
        if CONNECTORS[settings.kv_connector].channel is Channel.MOONCAKE:
            timeout_s = settings.prefill_connect_timeout
            self._bootstrap = BootstrapGate(self._background, self._session, timeout_s, time.monotonic)
        probes = [self._engine_probe(rank) for rank in range(settings.data_parallel_size)]
        health = Health(self._live, probes, self._not_yet)
        app = application(settings, self._observer, self._switch, health, lambda: self._tls.admin_key.key)
        self._admin = web.AppRunner(app, access_log=None)
        await self._admin.setup()
        await self._listen_admin(self._admin)
        for rank, probe in enumerate(probes):
            await self._listen(rank, probe)
        self._open_side_channels()
        self._background.start("facts of prefill endpoints", self._facts.run(self._endpoints))
        if self._observer.discovery is not None:  # nothing waits for it: without endpoints requests are local
            self._background.start("discovery", self._observer.discovery.run())
        self._background.start("health of the decode engine", health.run())
        if self._gate is not None:
            self._warm_up = self._make_warm_up(self._gate)
            self._background.start(
                "warm-up",
                self._warm_up.run(self._endpoints, lambda: health.engine_is_up and self._live.mode is not Mode.OFF),
            )
        if self._tracer is not None:
            self._background.start("sending of traces", self._tracer.run())
        self._background.start("sweep of prefill connections", self._sweep_pools())
        self._background.start("giving memory back", process.keep_giving_back())
        if self._tls.reads_files:
            self._background.start("watch over certificates and keys", self._tls.watch())
        self._handle_signals()
        self._say_start()
        gc.collect()
        gc.freeze()  # what lives as long as the process need not be looked through again
        # Requests free themselves, cycles are the exception (faults). What is under way during a collection grows
        # old by it, so the old must be looked at too, or memory creeps (e2e/soak.py).
        gc.set_threshold(20_000, 5, 5)

    def _open_side_channels(self) -> None:
        gate = self._gate
        if gate is None:
            return
        self._channels = SideChannels(
            local=_local_side_channel(self.settings),
            port=self.settings.nixl_relay_port,
            on_state=gate.state_changed,
            on_handshake=self._observer.handshake,
        )
        gate.attach(self._channels)
        for endpoint in self._endpoints:
            gate.learn(endpoint)

    def _make_rules(self, rank: int, probe: EngineProbe, engine: EnginePool) -> Rules:
        settings = self.settings
        index = None
        if settings.kv_events == "on":
            index = self._subscribe(rank)
        rules = Rules(
            settings.min_remote_tokens,
            time.monotonic,
            costs=self._costs,
            index=index,
            running_now=lambda: engine.busy,
            remote_media=settings.split_remote_media == "on",
        )
        if self._costs is not None or index is not None:
            scraper = Scraper(probe.load, rules.signals, lambda: self._live.mode is Mode.AUTO, time.monotonic)
            self._background.start("load of the decode engine", scraper.run())
        return rules

    def _subscribe(self, rank: int) -> KvEvents:
        """Raises `OSError` if the port is taken."""
        settings = self.settings
        port = settings.kv_events_port + rank
        replay_port = settings.kv_events_replay_port
        index = PrefixIndex()
        try:
            events = KvEvents(
                index,
                port=port,
                replay=(settings.model_server_host, replay_port + rank) if replay_port else None,
                on_events=self._observer.kv_event,
            )
        except OSError as error:
            raise OSError(error.errno, f"--kv-events-port {port}: {error.strerror or error}") from None
        self._kv_events.append(events)
        self._observer.prefix_indexes.append(index)
        return events

    async def _listen(self, rank: int, probe: EngineProbe) -> None:
        settings = self.settings
        watch = Watch(self._background, self._prefill_alive, probe.fetching, settings.pull_timeout, self._loop.time)
        engine = EnginePool(
            self._loop,
            settings.model_server_host,
            settings.model_server_port + rank,
            uds=settings.model_server_uds,
            tls=self._tls.decode,
            connect_timeout_s=ENGINE_CONNECT_TIMEOUT_S,
            idle_timeout_s=settings.engine_idle_timeout,
        )
        connector = CONNECTORS[settings.kv_connector]
        own = _local_p2p(settings, rank)
        p2p = P2PGate(self._background, own, settings.prefill_connect_timeout)
        from_decode = settings.prefill_from_decode == "on"
        if from_decode and own is None:
            _log.warning("--prefill-from-decode needs --local-p2p: where the decode engine's P2P tier is")
        service = Service(
            loop=self._loop,
            settings=settings,
            live=self._live,
            connector=connector,
            endpoints=self._endpoints,
            budget=self._budget,
            engine=engine,
            prefill_pool=self._prefill_pool,
            observer=self._observer,
            watch=watch,
            gate=p2p if connector.channel is Channel.P2P else self._bootstrap or self._gate,
            p2p=p2p if from_decode or settings.enable_p2p_pull == "on" else None,
            rules=self._make_rules(rank, probe, engine),
            tracer=self._tracer,
            by_port=self._services,
        )
        self._services[settings.port + rank] = service
        server = Server(service, settings.host, settings.port + rank, self._tls.serving)
        self._servers.append(server)
        try:
            await server.listen()
        except OSError as error:
            raise OSError(error.errno, f"port {settings.port + rank}: {error.strerror or error}") from None

    async def _listen_admin(self, runner: web.AppRunner) -> None:
        settings = self.settings
        try:
            await web.TCPSite(runner, settings.metrics_host or None, settings.metrics_port).start()
        except OSError as error:
            raise OSError(
                error.errno, f"--metrics-port {settings.metrics_port}: {error.strerror or error}"
            ) from None

    def _say_start(self) -> None:
        settings = self.settings
        engine = settings.model_server_uds or f"{settings.model_server_host}:{settings.model_server_port}"
        _log.info(
            "pd-sidecar %s: clients on %s, decode engine at %s, admin on %s, disagg %s, connector %s, %d prefill",
            __version__,
            settings.port,
            engine,
            settings.metrics_port,
            settings.disagg,
            settings.kv_connector,
            len(settings.prefill),
        )
        if self._observer.discovery is not None:
            _log.info("prefill endpoints: waiting for --discovery %s; local until then", settings.discovery)
        flags = ["--prefill"] * bool(settings.prefill) + ["--discovery"] * (settings.discovery != "none")
        if flags and not settings.prefill_allow:
            targets = f"only endpoints of {' and '.join(flags)}"
            _log.info(
                "x-prefiller-host-port may name %s (others get 403); add --prefill-allow CIDR for more", targets
            )

    def _handle_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop_wanted)
        reading = config.load(self._flags)[1]
        if reading is None:
            self._loop.add_signal_handler(signal.SIGHUP, lambda: _log.info("SIGHUP: there is no --config file"))
            return
        file = File(reading, lambda: config.load(self._flags)[0], self.settings, self._switch)
        self._loop.add_signal_handler(signal.SIGHUP, lambda: file.reload("SIGHUP"))
        self._background.start("watch over the --config file", file.watch())

    def _make_warm_up(self, gate: Gate) -> WarmUp:
        settings = self.settings
        assert self._session is not None
        return WarmUp(
            self._session,
            CONNECTORS[settings.kv_connector],
            gate,
            engine_urls=[self._engine_url(rank) for rank in range(settings.data_parallel_size)],
            engine_session=self._uds_session or self._session,
            engine_block_size=lambda: self._live.engine_facts.block_size,
            timeout_s=max(settings.warm_up_timeout, 1.0),
            counted=self._observer.warmed_up,
            new_pairs=settings.warm_up == "on",
            prefill_access=self._to_prefill,
            engine_access=self._to_engine,
        )

    def _not_yet(self, seconds_up: float) -> str:
        """Readiness waits for the warm-up of engines known at the start, but not for long."""
        warm_up, gate = self._warm_up, self._gate
        if warm_up is None or gate is None or seconds_up > self.settings.warm_up_timeout:
            return ""
        if self._live.mode is Mode.OFF:
            return ""
        for endpoint in self._endpoints.configured:
            if gate.is_undecided(endpoint) or warm_up.is_cold(endpoint):
                return f"warming up {endpoint.label}"
        return ""

    # -- the parts that others ask for -----------------------------------------------------------------------

    def _prefill_pool(self, endpoint: Endpoint) -> EnginePool:
        address = endpoint.address
        pool = self._prefill_pools.get(address)
        if pool is None:
            pool = self._prefill_pools[address] = EnginePool(
                self._loop,
                address.host,
                address.port,
                tls=self._tls.prefill,
                connect_timeout_s=self.settings.prefill_connect_timeout,
                idle_timeout_s=self.settings.engine_idle_timeout,
            )
        return pool

    def _forget(self, endpoint: Endpoint) -> None:
        """Nobody needs the endpoint any more: what was kept for it is given back."""
        if self._gate is not None:
            self._gate.forget(endpoint)
        self._facts.forget(endpoint)
        self._observer.forget(endpoint)
        pool = self._prefill_pools.get(endpoint.address)
        if pool is not None:
            pool.sweep(float("inf"))

    async def _sweep_pools(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            now = self._loop.time()
            known = {endpoint.address for endpoint in self._endpoints}
            for address, pool in list(self._prefill_pools.items()):
                pool.sweep(now)
                if address not in known and pool.is_empty:
                    del self._prefill_pools[address]

    def _engine_probe(self, rank: int) -> EngineProbe:
        settings = self.settings
        assert self._session is not None
        if settings.model_server_uds:
            connector = aiohttp.UnixConnector(settings.model_server_uds)
            self._uds_session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
            return EngineProbe(self._uds_session, self._engine_url(rank), self._to_engine)
        return EngineProbe(self._session, self._engine_url(rank), self._to_engine)

    def _engine_url(self, rank: int) -> str:
        settings = self.settings
        if settings.model_server_uds:
            return "http://localhost"
        host = settings.model_server_host
        bracketed = f"[{host}]" if ":" in host else host
        return self._to_engine.url(f"{bracketed}:{settings.model_server_port + rank}")

    def _prefill_probe(self, endpoint: Endpoint) -> EngineProbe:
        assert self._session is not None
        return EngineProbe(self._session, self._to_prefill.url(endpoint.label), self._to_prefill)

    async def _prefill_alive(self, endpoint: Endpoint, handoff: Handoff | None, timeout_s: float) -> str:
        problem = await self._prefill_probe(endpoint).healthy(timeout_s)
        if problem or handoff is None:
            return problem
        if CONNECTORS[self.settings.kv_connector].channel is Channel.P2P:
            return await p2p_alive(handoff, timeout_s)
        return await self._gate.alive(handoff, timeout_s) if self._gate is not None else ""

    # -- the end ---------------------------------------------------------------------------------------------

    def _stop_wanted(self) -> None:
        if self._stopping:
            _log.warning("second signal: ending at once")
            if not self._stop.done():
                self._stop.set_result(0)
            return
        self._stopping = True
        self._live.draining = True
        self._background.start("drain", self._drain())

    async def _drain(self) -> None:
        open_now = sum(server.open_connections for server in self._servers)
        _log.info("draining: %d client connections, up to %g s", open_now, self.settings.drain_timeout)
        cut = sum(await asyncio.gather(*[server.drain(self.settings.drain_timeout) for server in self._servers]))
        if cut:
            _log.warning("drain timeout: %d connections cut off", cut)
        if not self._stop.done():
            self._stop.set_result(0)

    async def run(self) -> int:
        """Until a signal; returns the exit code."""
        try:
            return await self._stop
        finally:
            await self.close()
            _log.info("ended")

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for pool in self._prefill_pools.values():
            pool.close()
        await self._background.close()
        if self._tracer is not None:
            await self._tracer.close()
        for events in self._kv_events:
            await events.close()
        if self._channels is not None:
            await self._channels.close()
        if self._admin is not None:
            await self._admin.cleanup()
        for session in (self._session, self._uds_session):
            if session is not None:
                with contextlib.suppress(Exception):
                    await session.close()


def _ignore(_endpoint: Endpoint) -> None:
    return None


def _local_side_channel(settings: Settings) -> SideChannel:
    """Where the local engine's own side channel is. In a pod, engine and sidecar share these variables."""
    if settings.local_side_channel:
        address = parse(settings.local_side_channel)
        return SideChannel(address.host, address.port)
    host = os.environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST") or settings.model_server_host
    port = os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT", "")
    return SideChannel(host, int(port) if port.isdigit() else 5600)


def _local_p2p(settings: Settings, rank: int) -> Address | None:
    """Where the local engine's own P2P channel is, if anyone says it."""
    if settings.local_p2p:
        address = parse(settings.local_p2p)
        return Address(address.host, address.port + rank)
    host, port = (os.environ.get(f"VLLM_P2P_SIDE_CHANNEL_{name}", "") for name in ("HOST", "PORT"))
    return Address(host, int(port) + rank) if host and port.isdigit() else None
