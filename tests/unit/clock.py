"""An event loop whose time passes only when nothing else is to be done: an hour of sleep takes no time at all."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _Selector(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:  # only a thread can still bring something
            return super().select(10.0)
        self.now += timeout
        return ready


class Loop(asyncio.SelectorEventLoop):
    """Its clock starts at 1000 s."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return 1000.0 + self._virtual.now


def run(main: Coroutine[Any, Any, None]) -> None:
    """`asyncio.run` in virtual time."""
    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(main)
