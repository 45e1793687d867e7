"""The hub of `--workers`: everything that a pod has one of, for workers that serve. Serves no request itself."""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from sidecar.admin.app import Observed, Readiness
from sidecar.admin.health import Health
from sidecar.admin.observer import Observer
from sidecar.connectors.connector import Rejection
from sidecar.control import Control
from sidecar.decision.guards import Mode
from sidecar.decision.signals import Load
from sidecar.edge.service import Live
from sidecar.prefill.address import Address, AllowList
from sidecar.prefill.endpoints import Endpoint
from sidecar.prefill.probe import EngineProbe
from sidecar.settings import Settings
from sidecar.workers import messages
from sidecar.workers.budget import SharedBudget, make_memory
from sidecar.workers.crew import Crew
from sidecar.workers.ledger import HubEndpoints, Ledger
from sidecar.workers.metrics import worker_metrics
from sidecar.workers.ports import check_free
from sidecar.workers.totals import Summed
from transport.side_channels import Address as RelayAddress


class ToldLive(Live):
    """What is set is told."""

    __slots__ = ("changed",)
    changed: Callable[[], None]

    def __init__(self, mode: Mode, changed: Callable[[], None]) -> None:
        object.__setattr__(self, "changed", changed)
        super().__init__(mode)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self.changed()


class _ToldSignals:
    """Hands the load of one rank on."""

    def __init__(self, rank: int, tell: Callable[[messages.Load], None]) -> None:
        self._rank = rank
        self._tell = tell

    def tell(self, load: Load | None, now: float) -> None:
        if load is not None:
            self._tell(messages.Load(self._rank, load, now))


class _View:
    """What the admin port shows of all processes together. `Crew.ask` has been awaited."""

    def __init__(self, observer: Observer, crew: Crew) -> None:
        self._observer = observer
        self._crew = crew
        self.collection = Summed(observer.collection, crew.totals, worker_metrics(crew.seats))

    def decisions(self) -> list[dict[str, Any]]:
        return self._crew.decisions()

    def endpoints(self) -> dict[str, Any]:
        return self._observer.endpoints()


class _Readiness:
    def __init__(self, health: Health, crew: Crew) -> None:
        self._health = health
        self._crew = crew

    @property
    def problem(self) -> str:
        return self._health.problem or self._crew.problem


class Hub(Control):
    """Is what its workers ask and tell: see `crew.Ears`."""

    _endpoints: HubEndpoints

    def __init__(self, settings: Settings, flags: Sequence[str]) -> None:
        """Raises `tls.BadTls`."""
        self._crew: Crew | None = None
        self._memory = make_memory(settings.workers)
        self._budget = SharedBudget(
            self._memory, settings.workers, 0, settings.recompute_max_concurrent, settings.recompute_max_tokens
        )
        super().__init__(settings, flags, self._budget)
        self._loads: dict[int, messages.Load] = {}
        self._crew = Crew(self._background, self, settings.workers, self._memory, settings.drain_timeout)
        self._ledger = Ledger(
            self._endpoints,
            self._crew.send,
            time.monotonic,
            settings.data_parallel_size,
            self._observer.tell_changes,
        )

    # -- Control ---------------------------------------------------------------------------------------------

    def _make_live(self, mode: Mode) -> Live:
        return ToldLive(mode, self._live_changed)

    def _make_endpoints(self, configured: Sequence[Address], allow: AllowList) -> HubEndpoints:
        return HubEndpoints(
            configured,
            allow,
            time.monotonic,
            samples=self.settings.enable_prefiller_sampling == "on",
            learned=self._learned,
            forgotten=self._forget,
            announce=self._announce,
            later=self._loop.call_later,
        )

    def _shown(self, health: Health) -> tuple[Observed, Readiness, Callable[[bool], Awaitable[None]]]:
        crew = self._crew
        assert crew is not None

        async def ask(decisions: bool) -> None:
            await crew.ask(decisions=decisions)

        return _View(self._observer, crew), _Readiness(health, crew), ask

    async def _open(self, probes: Sequence[EngineProbe], health: Health) -> None:
        """The admin port last: workers take a second to start, and who finds it open may come to the others. What
        they are to know is found out meanwhile, and they ask for side channels as soon as they serve."""
        settings = self.settings
        check_free("--metrics-port", settings.metrics_host, settings.metrics_port)
        for rank in range(settings.data_parallel_size):
            check_free("--port", settings.host, settings.port + rank)
        self._handle_signals()
        self._run(health)
        await self._serve(probes)
        await self._listen_admin()

    async def _serve(self, probes: Sequence[EngineProbe]) -> None:
        settings = self.settings
        assert self._crew is not None
        await self._crew.start()
        if settings.decision_rule == "cost":
            for rank, probe in enumerate(probes):
                self._scrape(probe, _ToldSignals(rank, self._tell_load))

    def _endpoint_changed(self, endpoint: Endpoint) -> None:
        if self._crew is not None and not self._endpoints.in_discovery:
            self._ledger.tell(endpoint)

    def _forget(self, endpoint: Endpoint) -> None:
        super()._forget(endpoint)
        self._ledger.forget(endpoint)

    async def _drain(self) -> None:
        assert self._crew is not None
        await self._crew.drain(self._live_changed)

    async def close(self) -> None:
        if self._crew is not None:
            await self._crew.close()
        await super().close()
        self._budget.close()

    # -- told to workers -------------------------------------------------------------------------------------

    def _tell_all(self, message: msgspec.Struct) -> None:
        if self._crew is not None:
            self._crew.send_all(message)

    def _announce(self, discovered: messages.Discovered, joined: list[Endpoint]) -> None:
        self._tell_all(discovered)
        for endpoint in joined:
            self._ledger.tell(endpoint)

    def _state(self) -> messages.State:
        return messages.State(self._live.mode.value, self._live.draining, self._live.engine_facts)

    def _live_changed(self) -> None:
        if self._crew is not None:
            self._tell_all(self._state())

    def _models_told(self, who: Endpoint | int) -> None:
        if (message := self._models(who)) is not None:
            self._tell_all(message)

    def _models(self, who: Endpoint | int) -> messages.OwnModels | messages.Models | None:
        told = self._own_models[who] if isinstance(who, int) else who.models
        if told.served is None:
            return None
        if isinstance(who, int):
            return messages.OwnModels(who, told.served, told.until)
        place = messages.Place(who.address.host, who.address.port)
        return messages.Models(place, told.served, told.until, who.slots, who.slots_until)

    def _tell_load(self, load: messages.Load) -> None:
        self._loads[load.rank] = load
        self._tell_all(load)

    # -- crew.Ears -------------------------------------------------------------------------------------------

    def welcome(self, worker: int) -> messages.Welcome:
        return messages.Welcome(worker, self.settings, self._endpoints.salt, self._memory)

    def opened(self, worker: int) -> None:
        assert self._crew is not None
        self._crew.send(worker, self._state())
        self._ledger.opened(worker)

    def serves(self, worker: int) -> None:
        assert self._crew is not None
        self._ledger.serves(worker)
        for load in self._loads.values():
            self._crew.send(worker, load)
        for who in (*range(len(self._own_models)), *self._endpoints):
            if (message := self._models(who)) is not None:
                self._crew.send(worker, message)

    def closed(self, worker: int) -> None:
        self._budget.clear(worker - 1)
        self._ledger.closed(worker)

    def heard(self, worker: int, message: messages.ToHub) -> None:
        match message:
            case messages.Use():
                self._ledger.used(worker, message)
            case messages.DecodeUse():
                self._ledger.decode_used(worker, message)
            case messages.Reloaded():
                self._own_models[message.rank].doubt()
            case messages.Locate():
                self._locate(worker, message)
            case messages.AskAlive():
                self._background.start("side channel for a worker", self._ask_alive(worker, message))
            case messages.Outcome():
                self._ledger.outcome(worker, message)
            case messages.Learned():
                self._ledger.learned(message)

    def _locate(self, worker: int, asked: messages.Locate) -> None:
        gate = self._gate
        assert gate is not None
        assert self._crew is not None
        send = self._crew.way_to(worker)
        endpoint = self._endpoints.learn(asked.place)

        def located(where: RelayAddress | Rejection) -> None:
            if isinstance(where, Rejection):
                send(messages.Located(asked.question, "", 0, where.fault, where.detail))
            else:
                send(messages.Located(asked.question, where.host, where.port, "", ""))

        if endpoint is None:
            located(Rejection("side_channel_dead", "the endpoint has left meanwhile"))
        else:
            gate.locate(endpoint, asked, located)

    async def _ask_alive(self, worker: int, asked: messages.AskAlive) -> None:
        assert self._gate is not None
        assert self._crew is not None
        send = self._crew.way_to(worker)
        try:
            problem = await self._gate.alive(asked, asked.timeout_s)
        except Exception as error:
            problem = f"the probe failed: {type(error).__name__}"
        send(messages.Answered(asked.question, problem))
