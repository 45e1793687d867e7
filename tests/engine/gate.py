"""An event that tasks of several event loops may wait for: engines that freeze may have loops of their own."""

from __future__ import annotations

import asyncio
import threading


class Gate:
    """An event that tasks of several event loops may wait for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = True
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    @property
    def is_open(self) -> bool:
        return self._open

    def open(self) -> None:
        with self._lock:
            self._open = True
            waiters, self._waiters = self._waiters, []
        for loop, future in waiters:
            if not loop.is_closed():
                loop.call_soon_threadsafe(_resolve, future)

    def close(self) -> None:
        with self._lock:
            self._open = False

    async def wait(self) -> None:
        while True:
            with self._lock:
                if self._open:
                    return
                loop = asyncio.get_running_loop()
                future: asyncio.Future[None] = loop.create_future()
                self._waiters.append((loop, future))
            await future


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
