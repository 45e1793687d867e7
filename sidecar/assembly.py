"""The usual sidecar: one process that serves the requests and holds everything that a pod has one of."""

from collections.abc import Awaitable, Callable, Sequence

from sidecar.admin.app import Observed, Readiness, nobody_else
from sidecar.admin.health import Health
from sidecar.control import Control
from sidecar.exchange.budget import Budget
from sidecar.prefill.endpoints import Endpoint
from sidecar.prefill.probe import EngineProbe
from sidecar.serving import Serving, Shared, make_tracer
from sidecar.settings import Settings
from transport.kv_events import KvEvents
from transport.prefix_index import PrefixIndex


class Sidecar(Control):
    """All the parts of one process."""

    def __init__(self, settings: Settings, flags: Sequence[str]) -> None:
        budget = Budget(settings.recompute_max_concurrent, settings.recompute_max_tokens)
        super().__init__(settings, flags, budget)
        self._tracer = make_tracer(settings, self._observer.traced)
        self._kv_events: list[KvEvents] = []
        shared = Shared(self._live, self._endpoints, budget, self._observer, self._gate)
        self._serving = Serving(settings, shared, self._tls, self._calls, self._tracer, self._background)

    def _shown(self, health: Health) -> tuple[Observed, Readiness, Callable[[bool], Awaitable[None]]]:
        return self._observer, health, nobody_else

    async def _serve(self, probes: Sequence[EngineProbe]) -> None:
        self._serving.start()
        for rank, probe in enumerate(probes):
            index = self._subscribe(rank) if self.settings.kv_events == "on" else None
            await self._serving.listen(rank, index)
            self._serving.rules[rank].models = self._own_models[rank]
            if self.settings.decision_rule == "cost" or index is not None:
                self._scrape(probe, self._serving.rules[rank].signals)

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

    def _forget(self, endpoint: Endpoint) -> None:
        super()._forget(endpoint)
        self._serving.forget(endpoint)

    async def _drain(self) -> None:
        await self._serving.drain()

    async def close(self) -> None:
        self._serving.close()
        await super().close()
        for events in self._kv_events:
            await events.close()
        if self._tracer is not None:
            await self._tracer.close()
