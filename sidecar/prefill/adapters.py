"""Asks the decode engine and the prefill endpoints which models and adapters they serve. Decides nothing.

Never on a request's path, and seldom: every sidecar asks every endpoint. Where no adapter is served a small
question a minute is enough to see one come; only where both sides have some are the slots worth asking for.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from sidecar.background import Background
from sidecar.prefill.endpoints import Endpoint, Endpoints
from sidecar.prefill.probe import EngineProbe
from sidecar.prefill.served import Served, Told

LOOK_EVERY_S = 1.0
TIMEOUT_S = 5.0
OWN_EVERY_S = 10.0
"""Between two questions to the decode engine, which is next door."""
EVERY_S = 20.0
"""Between two rounds at an endpoint with adapters; a round is two small questions: its models, and its slots."""
RARELY_S = 60.0
"""Between two rounds where there are none."""
LOADS_EVERY_S = 300.0
"""Whether an engine loads by name is a matter of how it was started."""
JITTER = 0.2
"""Part of a pause by which it may be longer: the sidecars of a fleet that start together do not ask together."""
AT_ONCE = 64
"""Endpoints that are asked at the same time: of a thousand that come together the others wait for the next look."""
COUNTS_FOR = 3.0
"""Pauses until what an engine told counts no more."""


class AdapterKeeper:
    """Fills `Endpoint.models` and `Endpoint.slots`, and the `Told` of each local rank (`own`). `wanted`: whether
    anything may be prefilled elsewhere."""

    def __init__(
        self,
        background: Background,
        endpoints: Endpoints,
        probe: Callable[[Endpoint], EngineProbe],
        own: Sequence[tuple[EngineProbe, Told]],
        wanted: Callable[[], bool],
        now: Callable[[], float],
        told: Callable[[Endpoint | int], None] = lambda _who: None,
    ) -> None:
        """`told` hears of each answer: of an endpoint's, or of the rank of the decode engine."""
        self._background = background
        self._endpoints = endpoints
        self._probe = probe
        self._own = own
        self._wanted = wanted
        self._now = now
        self._told = told
        self._own_adapters: frozenset[str] = frozenset()
        self._asking = 0

    async def run(self) -> None:
        """Asks whoever's turn it is, for ever."""
        while True:
            if self._wanted():
                self.look()
            await asyncio.sleep(LOOK_EVERY_S)

    def look(self) -> None:
        """Starts asking those whose turn it is; returns at once."""
        now = self._now()
        for rank, (probe, known) in enumerate(self._own):
            if known.is_doubted or now >= known.ask_at:
                known.is_doubted = False
                known.ask_at = now + _longer(OWN_EVERY_S)
                self._background.start("models of the decode engine", self._ask_own(rank, probe, known))
        if not any(known.fresh(now) for _, known in self._own):
            return  # what endpoints tell could not be compared with anything
        for endpoint in sorted(self._endpoints, key=_turn):
            if self._asking >= AT_ONCE or now < endpoint.models.ask_at:
                return
            endpoint.models.ask_at = now + _longer(self._pause(endpoint.models.served))
            self._asking += 1
            task = self._background.start(f"models of {endpoint.label}", self._ask(endpoint))
            task.add_done_callback(self._asked)

    def _pause(self, served: Served | None) -> float:
        return EVERY_S if served is not None and served.adapters and self._own_adapters else RARELY_S

    async def _ask_own(self, rank: int, probe: EngineProbe, known: Told) -> None:
        served = await self._served(probe, known)
        if served is None or known.is_doubted:  # it was told to change meanwhile: this may be from before
            return
        known.tell(served, self._now() + COUNTS_FOR * OWN_EVERY_S)
        self._told(rank)
        adapters = frozenset[str]().union(*(one.served.adapters for _, one in self._own if one.served is not None))
        news, self._own_adapters = adapters - self._own_adapters, adapters
        if news:  # whoever lacks one of them may have it by now: both sides are loaded about the same time
            for endpoint in self._endpoints:
                told = endpoint.models.served
                if told is not None and not news <= told.adapters:
                    endpoint.models.ask_at = float("-inf")
        self.look()

    def _asked(self, _task: "asyncio.Task[None]") -> None:
        self._asking -= 1

    async def _ask(self, endpoint: Endpoint) -> None:
        probe = self._probe(endpoint)
        served = await self._served(probe, endpoint.models)
        if served is None or endpoint.forgotten:
            return
        pause_s = self._pause(served)
        until = self._now() + COUNTS_FOR * pause_s
        endpoint.models.ask_at = self._now() + _longer(pause_s)
        self._endpoints.told_models(endpoint, served, until)
        if served.adapters and self._own_adapters:
            slots = await probe.slots(TIMEOUT_S)
            if slots is not None:
                endpoint.slots, endpoint.slots_until = slots, until
        self._told(endpoint)

    async def _served(self, probe: EngineProbe, known: Told) -> Served | None:
        served = await probe.served(TIMEOUT_S)
        if served is None:
            return None
        loads = known.served.loads if known.served is not None else True
        if self._now() >= known.ask_loads_at:
            known.ask_loads_at = self._now() + LOADS_EVERY_S
            loads = await probe.loads_adapters(TIMEOUT_S)
        return replace(served, loads=loads)


def _turn(endpoint: Endpoint) -> float:
    """Who has waited longest comes first."""
    return endpoint.models.ask_at


def _longer(pause_s: float) -> float:
    return pause_s * (1 + JITTER * random.random())  # noqa: S311
