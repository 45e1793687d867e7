"""Asks the local engine for its load once a second, for as long as the decision rules need it. Decides nothing."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from sidecar.decision.signals import Load

EVERY_S = 1.0
TIMEOUT_S = 1.0


class Hearer(Protocol):
    """`sidecar.decision.signals.Signals`, or what hands on to those of other processes."""

    def tell(self, load: Load | None, now: float) -> None: ...


class Scraper:
    """Keeps the signals of one rank. `ask` takes a time limit in seconds; None: the engine does not tell."""

    def __init__(
        self,
        ask: Callable[[float], Awaitable[Load | None]],
        signals: Hearer,
        wanted: Callable[[], bool],
        now: Callable[[], float],
    ) -> None:
        self._ask = ask
        self._signals = signals
        self._wanted = wanted
        self._now = now

    async def run(self) -> None:
        while True:
            if self._wanted():
                self._signals.tell(await self._ask(TIMEOUT_S), self._now())
            await asyncio.sleep(EVERY_S)
