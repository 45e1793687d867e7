"""What a pod has one of: admin port, side channels, discovery, warm-up, the engine's health, switch, signals.

Knows nothing of how requests are served: in this process (assembly.py) or by workers (workers/hub.py), which say so
in the four functions at the end.
"""

import asyncio
import logging
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from sidecar import __version__, config, process, tls
from sidecar.admin.app import Observed, Readiness, application
from sidecar.admin.health import Health
from sidecar.admin.observer import Observer
from sidecar.admin.server import AdminServer
from sidecar.admin.switch import File, Switch
from sidecar.background import Background
from sidecar.calls import Calls
from sidecar.connectors import CONNECTORS
from sidecar.connectors.connector import Channel
from sidecar.decision.guards import Mode
from sidecar.decision.scraper import Hearer, Scraper
from sidecar.edge.service import Live
from sidecar.exchange.budget import Recomputes
from sidecar.prefill.adapters import AdapterKeeper
from sidecar.prefill.address import Address, AllowList, parse
from sidecar.prefill.discovery.discovery import Discovery
from sidecar.prefill.discovery.make import make_source
from sidecar.prefill.endpoints import Endpoint, Endpoints
from sidecar.prefill.facts import FactsKeeper
from sidecar.prefill.gate import Gate
from sidecar.prefill.probe import EngineProbe
from sidecar.prefill.served import Told
from sidecar.prefill.warmup import WarmUp
from sidecar.settings import Settings
from transport.prober import Endpoint as SideChannel
from transport.side_channels import SideChannels

_log = logging.getLogger("sidecar")


class Control(ABC):
    """The parts that exist once, put together, started and ended. Made on the running loop."""

    def __init__(self, settings: Settings, flags: Sequence[str], budget: Recomputes) -> None:
        """Raises `tls.BadTls`."""
        self.settings = settings
        self._flags = flags
        self._loop = asyncio.get_running_loop()
        self._live = self._make_live(Mode(settings.disagg))
        self._background = Background()
        self._gate: Gate | None = None
        if settings.nixl_relay == "on" and CONNECTORS[settings.kv_connector].channel is Channel.NIXL:
            self._gate = Gate(self._background, settings.prefill_side_channel_port, self._endpoint_changed)
        self._channels: SideChannels | None = None
        self._warm_up: WarmUp | None = None
        self._endpoints = self._make_endpoints(
            [parse(text) for text in settings.prefill], AllowList(settings.prefill_allow)
        )
        self._observer = Observer(self._endpoints, budget)
        self._tls = tls.Tls(settings, self._observer.tls_handshake)
        self._observer.certificate_ends = lambda: self._tls.serving_ends
        self._calls = Calls(settings, self._tls)
        source = make_source(settings)
        if source is not None:
            self._observer.discovery = Discovery(
                source, self._endpoints, time.monotonic, self._observer.discovery_failed
            )
        self._facts = FactsKeeper(
            self._background, self._calls.prefill_probe, self._splits, self._loop.time, self._endpoint_changed
        )
        self._own_models = [Told() for _ in range(settings.data_parallel_size)]
        """What each rank of the decode engine serves."""
        self._adapters: AdapterKeeper | None = None
        self._switch = Switch(self._live)
        self._admin: AdminServer | None = None
        self._stop: asyncio.Future[int] = self._loop.create_future()
        self._stopping = False

    # -- start ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises `OSError` if a port cannot be had."""
        settings = self.settings
        process.raise_descriptor_limit()
        if self._tls.in_use:
            process.give_large_blocks_back()
        self._calls.open()
        probes = [self._calls.engine_probe(rank) for rank in range(settings.data_parallel_size)]
        health = Health(self._live, probes, self._not_yet)
        if CONNECTORS[settings.kv_connector].splits:
            self._adapters = self._make_adapter_keeper(probes)
        observed, readiness, ask_others = self._shown(health)
        app = application(settings, observed, self._switch, readiness, lambda: self._tls.admin_key.key, ask_others)
        self._admin = AdminServer(app)
        await self._open(probes, health)
        self._say_start()
        process.settle()

    async def _open(self, probes: Sequence[EngineProbe], health: Health) -> None:
        """The ports, and what runs beside them."""
        await self._listen_admin()
        await self._serve(probes)
        self._run(health)
        self._handle_signals()

    def _run(self, health: Health) -> None:
        """Starts everything that is not asked for by a request."""
        self._open_side_channels()
        self._background.keep("facts of prefill endpoints", partial(self._facts.run, self._endpoints))
        if self._adapters is not None:
            self._background.keep("models and adapters of engines", self._adapters.run)
        if self._observer.discovery is not None:  # nothing waits for it: without endpoints requests are local
            self._background.keep("discovery", self._observer.discovery.run)
        self._background.keep("health of the decode engine", health.run)
        if self._gate is not None:

            def wanted() -> bool:
                return health.engine_is_up and self._live.mode is not Mode.OFF

            self._warm_up = self._make_warm_up(self._gate)
            self._background.keep("warm-up", partial(self._warm_up.run, self._endpoints, wanted))
        self._background.keep("tidying memory", process.Tidying(self._observer.pauses.observe).run)
        self._background.keep("watch over descriptors", process.watch_descriptors)
        if self._tls.reads_files:
            self._background.keep("watch over certificates and keys", self._tls.watch)

    def _make_adapter_keeper(self, probes: Sequence[EngineProbe]) -> AdapterKeeper:
        return AdapterKeeper(
            self._background,
            self._endpoints,
            self._calls.prefill_probe,
            list(zip(probes, self._own_models, strict=True)),
            self._splits,
            time.monotonic,
            self._models_told,
        )

    def _splits(self) -> bool:
        """Whether anything may be prefilled elsewhere at present."""
        return CONNECTORS[self.settings.kv_connector].splits and self._live.mode is not Mode.OFF

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

    def _scrape(self, probe: EngineProbe, signals: Hearer) -> None:
        """Keeps the signals of one rank."""
        scraper = Scraper(probe.load, signals, lambda: self._live.mode is Mode.AUTO, time.monotonic)
        self._background.keep("load of the decode engine", scraper.run)

    async def _listen_admin(self) -> None:
        settings = self.settings
        assert self._admin is not None
        try:
            await self._admin.listen(settings.metrics_host, settings.metrics_port)
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
        self._background.keep("watch over the --config file", file.watch)

    def _make_warm_up(self, gate: Gate) -> WarmUp:
        settings = self.settings
        return WarmUp(
            self._calls.session,
            CONNECTORS[settings.kv_connector],
            gate,
            engine_urls=[self._calls.engine_url(rank) for rank in range(settings.data_parallel_size)],
            engine_session=self._calls.engine_session,
            engine_block_size=lambda: self._live.engine_facts.block_size,
            timeout_s=max(settings.warm_up_timeout, 1.0),
            counted=self._observer.warmed_up,
            new_pairs=settings.warm_up == "on",
            prefill_access=self._calls.to_prefill,
            engine_access=self._calls.to_engine,
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

    def _learned(self, endpoint: Endpoint) -> None:
        if self._gate is not None:
            self._gate.learn(endpoint)

    def _forget(self, endpoint: Endpoint) -> None:
        """Nobody needs the endpoint any more: what was kept for it is given back."""
        if self._gate is not None:
            self._gate.forget(endpoint)
        self._facts.forget(endpoint)
        self._observer.forget(endpoint)

    # -- the end ---------------------------------------------------------------------------------------------

    def _stop_wanted(self) -> None:
        if self._stopping:
            _log.warning("second signal: ending at once")
            if not self._stop.done():
                self._stop.set_result(0)
            return
        self._stopping = True
        self._live.draining = True
        self._background.start("drain", self._drain_and_stop())

    async def _drain_and_stop(self) -> None:
        try:
            await self._drain()
        finally:
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
        await self._background.close()
        if self._channels is not None:
            await self._channels.close()
        if self._admin is not None:
            await self._admin.close()
        await self._calls.close()

    # -- what differs with who serves --------------------------------------------------------------------------

    def _make_live(self, mode: Mode) -> Live:
        return Live(mode)

    def _make_endpoints(self, configured: Sequence[Address], allow: AllowList) -> Endpoints:
        return Endpoints(
            configured,
            allow,
            time.monotonic,
            samples=self.settings.enable_prefiller_sampling == "on",
            learned=self._learned,
            forgotten=self._forget,
        )

    def _endpoint_changed(self, endpoint: Endpoint) -> None:
        """Its side channel or its metrics have told something."""
        return

    def _models_told(self, who: Endpoint | int) -> None:
        """An endpoint, or a rank of the decode engine, has told which models it serves."""
        return

    @abstractmethod
    def _shown(self, health: Health) -> tuple[Observed, Readiness, Callable[[bool], Awaitable[None]]]:
        """What the admin port shows: of the requests and of readiness, and what is to be awaited before."""

    @abstractmethod
    async def _serve(self, probes: Sequence[EngineProbe]) -> None:
        """Opens the serving ports. Raises `OSError` if one cannot be had."""

    @abstractmethod
    async def _drain(self) -> None:
        """Returns when no answer is open, or after `--drain-timeout`."""


def _local_side_channel(settings: Settings) -> SideChannel:
    """Where the local engine's own side channel is. In a pod, engine and sidecar share these variables."""
    if settings.local_side_channel:
        address = parse(settings.local_side_channel)
        return SideChannel(address.host, address.port)
    host = os.environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST") or settings.model_server_host
    port = os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT", "")
    return SideChannel(host, int(port) if port.isdigit() else 5600)
