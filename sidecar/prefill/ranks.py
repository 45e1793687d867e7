"""The data-parallel ranks behind one prefill endpoint: which of them bring nothing at present. No I/O.

A rank is an engine of its own, with a side channel and blocks of its own: what goes wrong with its handoffs says
nothing about the others behind the same port, so it is not the endpoint's breaker that counts it.
"""

import re

from sidecar.prefill.breaker import FAILURES_TO_OPEN

PAUSE_S = 10.0
"""A rank that brings nothing is left alone for so long; then requests try it again."""
MAX_RANKS = 256

_OF_ENGINE_ID = re.compile(r"_dp([0-9]{1,3})")
"""How vLLM 0.32 names the NIXL engine of a rank where there are several (v1/engine/core.py)."""
_HEADER = re.compile(rb"[0-9]{1,3}")


def rank_of_engine(engine_id: str) -> int:
    """The rank that an engine id names, or -1."""
    found = _OF_ENGINE_ID.search(engine_id, max(0, len(engine_id) - 6))
    return int(found[1]) if found and found.end() == len(engine_id) else -1


def rank_of_header(values: list[bytes]) -> int:
    """The rank that `x-data-parallel-rank` pins, or -1. What is no rank is for decode to refuse or ignore."""
    value = values[0].strip(b" \t") if values else b""
    return int(value) if _HEADER.fullmatch(value) else -1


Standing = list[tuple[int, int, float]]
"""Rank, its failures in a row, and until when it is left alone (0.0: it is not)."""


class Ranks:
    """Those of one endpoint."""

    __slots__ = ("_failures", "_until")

    def __init__(self) -> None:
        self._failures: dict[int, int] = {}
        """In a row, of ranks that have failed."""
        self._until: dict[int, float] = {}

    def admits(self, rank: int, now: float) -> bool:
        """Whether a request that is pinned to `rank` may be prefilled here."""
        return now >= self._until.get(rank, now)

    def failed(self, rank: int, now: float, *, at_once: bool) -> None:
        """`at_once` pauses it without waiting for more."""
        if rank not in self._failures and len(self._failures) >= MAX_RANKS:
            return
        self._failures[rank] = failures = self._failures.get(rank, 0) + 1
        if at_once or failures >= FAILURES_TO_OPEN:
            self._until[rank] = now + PAUSE_S

    @property
    def standing(self) -> Standing:
        return [(rank, failures, self._until.get(rank, 0.0)) for rank, failures in self._failures.items()]

    def take_over(self, standing: Standing) -> None:
        """As another process counts them."""
        self._failures = {rank: failures for rank, failures, _ in standing}
        self._until = {rank: until for rank, _, until in standing if until}

    def succeeded(self, rank: int) -> None:
        self._failures.pop(rank, None)
        self._until.pop(rank, None)
