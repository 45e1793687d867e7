"""Keeps the facts of prefill endpoints: asked for as soon as one is known, and again while it does not tell."""

import asyncio
from collections.abc import Callable, Iterable

from sidecar.background import Background
from sidecar.prefill.endpoints import Endpoint
from sidecar.prefill.probe import EngineProbe

TIMEOUT_S = 5.0
LOOK_EVERY_S = 1.0
PAUSE_S = 10.0
"""Between two attempts at an endpoint that does not tell."""
AT_ONCE = 64
"""Endpoints that are asked at the same time: of a thousand that come together the others wait for the next look."""
REFRESH_S = 300.0
"""An endpoint may come back as another engine on the same address."""


class FactsKeeper:
    """Fills `Endpoint.facts` in the background, while anything may be prefilled elsewhere (`wanted`): handoffs are
    checked against them, and nothing else looks at them."""

    def __init__(
        self,
        background: Background,
        probe: Callable[[Endpoint], EngineProbe],
        wanted: Callable[[], bool],
        now: Callable[[], float],
        changed: Callable[[Endpoint], None] = lambda _endpoint: None,
    ) -> None:
        """`changed` hears of every endpoint that has told its facts."""
        self._changed = changed
        self._background = background
        self._probe = probe
        self._wanted = wanted
        self._now = now
        self._next: dict[Endpoint, float] = {}
        self._asking = 0

    async def run(self, endpoints: Iterable[Endpoint]) -> None:
        """Asks every endpoint whose turn it is, for ever."""
        while True:
            if self._wanted():  # who has waited longest comes first
                for endpoint in sorted(endpoints, key=lambda one: self._next.get(one, 0.0)):
                    self.want(endpoint)
            await asyncio.sleep(LOOK_EVERY_S)

    def want(self, endpoint: Endpoint) -> None:
        """Starts asking if it is time to; returns at once."""
        now = self._now()
        if endpoint.facts.engine_id or now < self._next.get(endpoint, 0.0) or self._asking >= AT_ONCE:
            return
        self._next[endpoint] = now + PAUSE_S
        self._asking += 1
        task = self._background.start(f"facts of {endpoint.label}", self._ask(endpoint))
        task.add_done_callback(self._asked)

    def _asked(self, _task: "asyncio.Task[None]") -> None:
        self._asking -= 1

    def forget(self, endpoint: Endpoint) -> None:
        """Nothing is kept for the endpoint any more."""
        self._next.pop(endpoint, None)

    async def _ask(self, endpoint: Endpoint) -> None:
        facts = await self._probe(endpoint).facts(TIMEOUT_S)
        if endpoint.forgotten:
            return
        if facts.block_size and not endpoint.facts.engine_id:  # the side channel's word counts for more
            endpoint.facts = facts
            self._next[endpoint] = self._now() + REFRESH_S
            self._changed(endpoint)
