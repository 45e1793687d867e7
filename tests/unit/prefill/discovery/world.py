"""A discovery in virtual time: what its source tells, as endpoints, log lines and counts."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Self

from sidecar.prefill.discovery.discovery import Discovery, Source
from tests.unit.prefill.world import Discovered


class World:
    """Runs `source` between `async with` and its end."""

    def __init__(self, source: Source) -> None:
        self.loop = asyncio.get_running_loop()
        self.endpoints = Discovered(allow=())
        self.errors: Counter[str] = Counter()
        self.discovery = Discovery(source, self.endpoints, self.loop.time, self._counted)
        self._task: asyncio.Task[None] | None = None

    def _counted(self, reason: str) -> None:
        self.errors[reason] += 1

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self.discovery.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    @property
    def labels(self) -> list[str]:
        return self.endpoints.labels()

    async def until(self, labels: Iterable[str], timeout_s: float = 5.0) -> None:
        """Until exactly these endpoints are the candidates."""
        wanted = sorted(labels)
        await self._until(lambda: sorted(self.labels) == wanted, timeout_s)
        assert sorted(self.labels) == wanted, f"{self.labels} after {timeout_s:g} s; {self.discovery.problem}"

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline = self.loop.time() + timeout_s
        while not condition() and self.loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    async def until_well(self, timeout_s: float = 5.0) -> None:
        """Until nothing is wrong."""
        await self._until(lambda: not self.discovery.problem, timeout_s)
        assert not self.discovery.problem

    async def until_failing(self, reason: str, timeout_s: float = 5.0) -> None:
        """Until one more failure of this reason is counted."""
        before = self.errors[reason]
        await self._until(lambda: self.errors[reason] > before, timeout_s)
        assert self.errors[reason] > before, f"{self.errors}"
