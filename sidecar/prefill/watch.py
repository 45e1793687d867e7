"""Watches prefill peers while a decode engine waits for their KV, or a request for their answer.

A decode engine waits for ever for blocks of an engine that is frozen (vLLM 0.32 has no transfer timeout), so the
peer is asked, once for all requests that wait for it, whether it is still there. Where it is and nothing comes, the
local engine is asked whether KV arrives at all. Nothing is asked for requests that get their first byte quickly.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from sidecar.background import Background
from sidecar.connectors.connector import Handoff
from sidecar.prefill.endpoints import Endpoint
from sidecar.prefill.ranks import rank_of_engine
from sidecar.prefill.stall import Fetching, Stall

_log = logging.getLogger("sidecar")

FIRST_PROBE_AFTER_S = 0.5
PROBE_EVERY_S = 1.0
FETCHES_WITHIN_S = 2.0
"""For /metrics of a decode engine that may be busy; nobody waits for it but this watch."""

STALLED_AFTER = 3
"""Times the timeout: so long a transfer may take if the peer answers and nothing else arrives meanwhile either."""

Alive = Callable[[Endpoint, Handoff | None, float], Awaitable[str]]
"""Asks a peer within a time limit; "" if it answers, else what is wrong."""
Fetches = Callable[[float], Awaitable[Fetching | None]]
"""Asks the local engine within a time limit what KV is on its way; None if it does not tell."""


_Peer = tuple[Endpoint, int]
"""An endpoint, and the one of the engines behind it that a handoff is of (-1: there is one, or it is not known)."""


@dataclass(eq=False, slots=True)
class _Waiter:
    handoff: Handoff | None
    """None: its prefill is under way."""
    silent: Callable[[str], None]
    since: float


class Watch:
    """`timeout_s` is how long a peer may be silent before its waiters are told. `fetches` asks the one engine whose
    requests these are."""

    def __init__(
        self, background: Background, alive: Alive, fetches: Fetches, timeout_s: float, now: Callable[[], float]
    ) -> None:
        self._background = background
        self._alive = alive
        self._fetches = fetches
        self._stall = Stall()
        self._looked_at = float("-inf")
        self._timeout_s = timeout_s
        self._now = now
        self._waiting: dict[_Peer, dict[_Waiter, None]] = {}
        self._probing: set[_Peer] = set()

    def watch(
        self, endpoint: Endpoint, handoff: Handoff | None, silent: Callable[[str], None]
    ) -> Callable[[], None]:
        """Calls `silent` once, with what is wrong, unless the function returned is called before."""
        waiter = _Waiter(handoff, silent, self._now())
        peer = endpoint, rank_of_engine(handoff.engine_id) if handoff is not None else -1
        waiters = self._waiting.setdefault(peer, {})
        waiters[waiter] = None
        if peer not in self._probing:
            self._probing.add(peer)
            asyncio.get_running_loop().call_later(self._first_probe_s, self._begin, peer)

        def stop() -> None:
            waiters.pop(waiter, None)

        return stop

    @property
    def _first_probe_s(self) -> float:
        return min(FIRST_PROBE_AFTER_S, self._timeout_s / 4)

    def _begin(self, peer: _Peer) -> None:
        if self._waiting.get(peer):
            self._background.start(f"watch over {peer[0].label}", self._probe(peer))
        else:
            self._end(peer)

    def _end(self, peer: _Peer) -> None:
        self._probing.discard(peer)
        self._waiting.pop(peer, None)

    async def _probe(self, peer: _Peer) -> None:
        endpoint, _ = peer
        waiters = self._waiting[peer]
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
                    stalled_s = await self._stalled_s(waiters, every_s)
                    if stalled_s >= (STALLED_AFTER - 1) * self._timeout_s:
                        limit_s = STALLED_AFTER * self._timeout_s
                        problem = f"it answers, but no KV has come for {limit_s:g} s; are the NIXL data ports open?"
                        self._tell_all(peer, problem, limit_s, 0.0, handed_off=True)
                else:
                    self._tell_all(peer, problem, self._timeout_s, last_seen)
                await asyncio.sleep(every_s)
        finally:
            self._end(peer)

    async def _stalled_s(self, waiters: dict[_Waiter, None], every_s: float) -> float:
        """How long nothing has arrived; the engine is asked where somebody waits for long, once for all peers."""
        now = self._now()
        if not any(one.handoff is not None and now - one.since >= self._timeout_s for one in waiters):
            return 0.0
        if now - self._looked_at >= every_s / 2:
            self._looked_at = now
            try:
                fetching = await self._fetches(min(FETCHES_WITHIN_S, self._timeout_s / 2))
            except Exception:
                _log.exception("asking the decode engine what KV is on its way")
                fetching = None
            self._stall.seen(fetching, self._now())
        return self._stall.seconds

    def _tell_all(
        self, peer: _Peer, problem: str, limit_s: float, last_seen: float, *, handed_off: bool = False
    ) -> None:
        """Those that have waited for so long; `handed_off`: for KV."""
        waiters = self._waiting[peer]
        now = self._now()
        for waiter in list(waiters):
            if handed_off and waiter.handoff is None:
                continue
            if waiter in waiters and now - max(last_seen, waiter.since) >= limit_s:
                del waiters[waiter]
                self._tell(waiter, f"{peer[0].label}: {problem}")

    @staticmethod
    def _tell(waiter: _Waiter, problem: str) -> None:
        try:
            waiter.silent(problem)
        except Exception:  # one request's trouble must not leave the others to wait for ever
            _log.exception("telling a request that its prefill peer is silent")

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))
