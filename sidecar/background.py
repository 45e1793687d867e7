"""Tasks that run beside the requests: kept alive, ended together, and never failing in silence."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

_log = logging.getLogger(__name__)

AGAIN_AFTER_S = 1.0
"""What goes wrong at once every time is said once a second."""


class Background:
    """A set of tasks. An exception in one of them is logged with the task's name and concerns that task only."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, name: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def keep(self, name: str, work: Callable[[], Coroutine[Any, Any, Any]]) -> asyncio.Task[Any]:
        """The same for what goes on until `close`: after an exception it begins anew."""
        return self.start(name, self._kept(name, work))

    async def _kept(self, name: str, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        while True:
            try:
                await work()
            except Exception as error:
                _log.exception("background task %s: begins anew after an error: %s", name, type(error).__name__)
            else:
                return
            await asyncio.sleep(AGAIN_AFTER_S)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("background task %s ended: %s", task.get_name(), type(error).__name__, exc_info=error)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def __len__(self) -> int:
        return len(self._tasks)
