"""Whether this sidecar is ready: its engine is healthy and it is not draining. Prefill never matters."""

import asyncio
import logging
import time
from collections.abc import Callable

from sidecar.edge.service import Live
from sidecar.prefill.probe import EngineProbe
from transport.descriptors import OutOfDescriptors

_log = logging.getLogger("sidecar")

PROBE_EVERY_S = 1.0
PROBE_TIMEOUT_S = 5.0
FACTS_EVERY_S = 10.0
"""Between two attempts at an engine that does not tell them."""
FAILURES_TO_UNREADY = 3
"""One slow probe of an engine that computes is no reason to take its streams away."""


class Health:
    """Probes the local engine's ranks; `problem` is "" when ready."""

    def __init__(self, live: Live, probes: list[EngineProbe], not_yet: Callable[[float], str]) -> None:
        """`not_yet(seconds since the engine came up)` says why clients should wait all the same, or ""."""
        self._not_yet = not_yet
        self._healthy_since = 0.0
        self._was_ready = False
        """Since the engine came up: what is to be waited for then cannot take readiness away later."""
        self._next_facts = 0.0
        self._live = live
        self._probes = probes
        self._failures = FAILURES_TO_UNREADY
        self._problem = self._last_said = "the decode engine has not answered yet"

    @property
    def problem(self) -> str:
        if self._live.draining:
            return "draining"
        if self._failures >= FAILURES_TO_UNREADY:
            return self._problem
        return "" if self._was_ready else self._not_yet(time.monotonic() - self._healthy_since)

    @property
    def engine_is_up(self) -> bool:
        return self._failures < FAILURES_TO_UNREADY

    async def run(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(PROBE_EVERY_S)

    async def _look(self) -> None:
        was_up = self.engine_is_up
        try:
            problems = await asyncio.gather(*[probe.healthy(PROBE_TIMEOUT_S) for probe in self._probes])
        except OutOfDescriptors:  # what was known of the engine holds
            return
        problem = next((f"decode engine: {problem}" for problem in problems if problem), "")
        if problem:
            self._failures += 1
            self._problem = problem
        else:
            await self._learn_facts(came_up=not was_up)
            if not was_up:
                self._healthy_since = time.monotonic()
            self._failures = 0
        self._was_ready = self.engine_is_up and not self.problem
        self._say()

    async def _learn_facts(self, *, came_up: bool) -> None:
        """Before an engine that came up is ready: without its block size no handoff can be checked. Asked again
        after every absence, because another engine may have come up."""
        now = time.monotonic()
        if came_up or (not self._live.engine_facts.block_size and now >= self._next_facts):
            self._next_facts = now + FACTS_EVERY_S
            self._live.engine_facts = await self._probes[0].facts(PROBE_TIMEOUT_S)

    def _say(self) -> None:
        if self._last_said != self.problem:
            self._last_said = self.problem
            if self.problem:
                _log.log(
                    logging.WARNING if self.engine_is_up is False else logging.INFO, "not ready: %s", self.problem
                )
            else:
                _log.info("ready")
