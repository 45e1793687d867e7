"""Watches prefill peers while a decode engine waits for their KV, or a request for their answer.

A decode engine waits for ever for blocks of an engine that is frozen (vLLM 0.32 has no transfer timeout), so the
peer is asked, once for all requests that wait for it, whether it is still there. Nothing is asked for requests that
get their first byte quickly.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from sidecar.background import Background
from sidecar.connectors.connector import Handoff
from sidecar.prefill.endpoints import Endpoint

_log = logging.getLogger("sidecar")

FIRST_PROBE_AFTER_S = 0.5
PROBE_EVERY_S = 1.0

Alive = Callable[[Endpoint, Handoff | None, float], Awaitable[str]]
"""Asks a peer within a time limit; "" if it answers, else what is wrong."""


@dataclass(eq=False, slots=True)
class _Waiter:
    handoff: Handoff | None
    """None: its prefill is under way."""
    silent: Callable[[str], None]
    since: float


class Watch:
    """`timeout_s` is how long a peer may be silent before its waiters are told."""

    def __init__(self, background: Background, alive: Alive, timeout_s: float, now: Callable[[], float]) -> None:
        self._background = background
        self._alive = alive
        self._timeout_s = timeout_s
        self._now = now
        self._waiting: dict[Endpoint, dict[_Waiter, None]] = {}
        self._probing: set[Endpoint] = set()

    def watch(
        self, endpoint: Endpoint, handoff: Handoff | None, silent: Callable[[str], None]
    ) -> Callable[[], None]:
        """Calls `silent` once, with what is wrong, unless the function returned is called before."""
        waiter = _Waiter(handoff, silent, self._now())
        waiters = self._waiting.setdefault(endpoint, {})
        waiters[waiter] = None
        if endpoint not in self._probing:
            self._probing.add(endpoint)
            asyncio.get_running_loop().call_later(self._first_probe_s, self._begin, endpoint)

        def stop() -> None:
            waiters.pop(waiter, None)

        return stop

    @property
    def _first_probe_s(self) -> float:
        return min(FIRST_PROBE_AFTER_S, self._timeout_s / 4)

    def _begin(self, endpoint: Endpoint) -> None:
        if self._waiting.get(endpoint):
            self._background.start(f"watch over {endpoint.label}", self._probe(endpoint))
        else:
            self._end(endpoint)

    def _end(self, endpoint: Endpoint) -> None:
        self._probing.discard(endpoint)
        self._waiting.pop(endpoint, None)

    async def _probe(self, endpoint: Endpoint) -> None:
        waiters = self._waiting[endpoint]
        every_s = min(PROBE_EVERY_S, self._timeout_s / 4)
        last_seen = 0.0
        try:
            while waiters:
                handoff = next((waiter.handoff for waiter in waiters if waiter.handoff is not None), None)
                try:
                    problem = await self._alive(endpoint, handoff, every_s)
                except Exception as error:  # a probe that cannot be made must not leave the waiters to themselves
                    problem = f"the probe failed: {type(error).__name__}"
                now = self._now()
                if not problem:
                    last_seen = now
                else:
                    for waiter in list(waiters):
                        if waiter in waiters and now - max(last_seen, waiter.since) >= self._timeout_s:
                            del waiters[waiter]
                            self._tell(waiter, f"{endpoint.label}: {problem}")
                await asyncio.sleep(every_s)
        finally:
            self._end(endpoint)

    @staticmethod
    def _tell(waiter: _Waiter, problem: str) -> None:
        try:
            waiter.silent(problem)
        except Exception:  # one request's trouble must not leave the others to wait for ever
            _log.exception("telling a request that its prefill peer is silent")

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))
