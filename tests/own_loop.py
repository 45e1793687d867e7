"""A server of coroutines (`start`, `stop`) for tests that have no loop: it gets one, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")
_TIMEOUT_S = 10


class OwnLoop:
    """Mixed in before the server's class; it runs while the block lasts."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=type(self).__name__, daemon=True)

    start: Callable[[], Coroutine[Any, Any, None]]
    stop: Callable[[], Coroutine[Any, Any, None]]
    """The server's own."""

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """On the server's loop; what it returns."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_TIMEOUT_S)

    def __enter__(self) -> Self:
        self._thread.start()
        self.run(self.start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.run(self.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
