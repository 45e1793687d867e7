"""The engine for blocking code: the same `Engine` on a loop in a thread, driven and observed from outside.

All engines of a process share one thread unless `own_thread=True`: two busy loops would only take the
interpreter lock from each other.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import uvloop

from tests.engine.engine import Engine

if TYPE_CHECKING:
    from tests.engine.faults import Fault, Faults, Rule
    from tests.engine.http_messages import Received

T = TypeVar("T")


class _Thread:
    """An event loop on a thread, ended by its last user."""

    _shared: _Thread | None = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        self.loop = uvloop.new_event_loop()
        self.users = 0
        self._thread = threading.Thread(target=self._run, name="simulated-engines", daemon=True)
        self._thread.start()

    @classmethod
    def borrow(cls, own: bool) -> _Thread:
        with cls._lock:
            if own:
                thread = cls()
            else:
                thread = cls._shared = cls._shared or cls()
            thread.users += 1
            return thread

    def give_back(self) -> None:
        with _Thread._lock:
            self.users -= 1
            if self.users:
                return
            if _Thread._shared is self:
                _Thread._shared = None
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
        finally:
            self.loop.close()


class ThreadedEngine:
    """`with ThreadedEngine(num_blocks=64) as engine: ...`; every method may be called from any thread."""

    def __init__(self, *, own_thread: bool = False, **options: Any) -> None:
        self._own_thread = own_thread
        self._options = options
        self._thread: _Thread | None = None
        self.engine = Engine(**options)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        self._thread = _Thread.borrow(self._own_thread)
        try:
            self._await(self.engine.start())
        except BaseException:
            self._thread.give_back()
            self._thread = None
            raise

    def stop(self) -> None:
        if self._thread is not None:
            self._await(self.engine.stop())
            self._thread.give_back()
            self._thread = None

    # -- control

    def kill(self) -> None:
        self._await(self.engine.kill())

    def restart(self) -> None:
        self._await(self.engine.restart())

    def refuse(self) -> None:
        self._await(self.engine.refuse())

    def accept(self) -> None:
        self._await(self.engine.accept())

    def freeze(self) -> None:
        self.call(self.engine.freeze)

    def thaw(self) -> None:
        self.call(self.engine.thaw)

    def break_side_channel(self) -> None:
        self.engine.break_side_channel()

    def die(self, cause: str = "killed by the test") -> None:
        """The engine core crashes: 500s, 503 on /health, then a closed port."""
        self.call(lambda: self.engine.cores[0].die(cause))

    def forget_peers(self) -> None:
        for core in self.engine.cores:
            self.call(core.forget_peers)

    def fault(self, fault: Fault, **where: Any) -> Rule:
        return self.engine.faults.add(fault, **where)

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the engine's loop and wait for what it returns."""

        async def called() -> T:
            return function()

        return self._await(called())

    def wait_for(self, condition: Callable[[Engine], object], timeout_seconds: float = 5.0) -> None:
        """Until `condition(engine)` is true; AssertionError if it does not come true in time."""
        deadline = time.monotonic() + timeout_seconds
        while not condition(self.engine):
            if time.monotonic() > deadline:
                raise AssertionError(f"not true within {timeout_seconds} s: {condition}")
            time.sleep(0.002)

    def _await(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._thread is None:
            coroutine.close()
            raise RuntimeError("the engine is not started")
        return asyncio.run_coroutine_threadsafe(coroutine, self._thread.loop).result(30)

    # -- observation

    @property
    def faults(self) -> Faults:
        return self.engine.faults

    @property
    def requests(self) -> list[Received]:
        return self.engine.requests

    def __getattr__(self, name: str) -> Any:
        # Everything else to look at is the engine's own: url, running, held_blocks, alive, aborted, ...
        if name.startswith("_") or name == "engine":
            raise AttributeError(name)
        return getattr(self.engine, name)
