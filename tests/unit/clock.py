"""An event loop whose time passes only when nothing else is to be done: an hour of sleep takes no time at all.

What is handed to an executor is done at once, for no thread knows of this time.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class _Selector(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:  # asyncio ends its executor in a thread, even this one
            return super().select(10.0)
        self.now += timeout
        return ready


class _AtOnce(ThreadPoolExecutor):
    def submit(self, work: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args, **named))
        except Exception as error:
            done.set_exception(error)
        return done


class Loop(asyncio.SelectorEventLoop):
    """Its clock starts at 1000 s."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)
        self.set_default_executor(_AtOnce())

    def time(self) -> float:
        return 1000.0 + self._virtual.now


def run(main: Coroutine[Any, Any, None]) -> None:
    """`asyncio.run` in virtual time."""
    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(main)
