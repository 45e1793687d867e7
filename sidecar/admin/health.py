"""Whether this sidecar is ready: its engine is healthy and it is not draining. Prefill never matters."""

import asyncio
import logging

from sidecar.edge.service import Live
from sidecar.prefill.probe import EngineProbe

_log = logging.getLogger("sidecar")

PROBE_EVERY_S = 1.0
PROBE_TIMEOUT_S = 5.0
FAILURES_TO_UNREADY = 3
"""One slow probe of an engine that computes is no reason to take its streams away."""


class Health:
    """Probes the local engine's ranks; `problem` is "" when ready."""

    def __init__(self, live: Live, probes: list[EngineProbe]) -> None:
        self._live = live
        self._probes = probes
        self._failures = FAILURES_TO_UNREADY
        self._problem = "the decode engine has not answered yet"

    @property
    def problem(self) -> str:
        if self._live.draining:
            return "draining"
        return self._problem if self._failures >= FAILURES_TO_UNREADY else ""

    async def run(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(PROBE_EVERY_S)

    async def _look(self) -> None:
        was_ready = not self.problem
        problems = await asyncio.gather(*[probe.healthy(PROBE_TIMEOUT_S) for probe in self._probes])
        problem = next((f"decode engine: {problem}" for problem in problems if problem), "")
        if problem:
            self._failures += 1
            self._problem = problem
        else:
            self._failures = 0
            if not self._live.engine_facts.block_size or not was_ready:
                # Asked again after every absence: another engine may have come up.
                self._live.engine_facts = await self._probes[0].facts(PROBE_TIMEOUT_S)
        if was_ready != (not self.problem):
            if self.problem:
                _log.warning("not ready: %s", self.problem)
            else:
                _log.info("ready")
