"""How many gaps between tokens the prompts that are computed here may make long. No I/O, no clock of its own.

A 99th percentile does not notice what happens to fewer than one gap in a hundred. So a prompt may stall the running
streams at a low price as long as that is rare, and at the full one when it is not: the engine's own count of tokens
says how many gaps there were.
"""

import math

SHARE = 0.0075
"""Of all gaps. Three quarters of what a 99th percentile bears: the engine's own doings make some long, too."""
MEMORY_S = 30.0
"""What happened so long ago counts for 1/e."""


class Allowance:
    """Of one engine."""

    __slots__ = ("_at", "_gaps", "_generated", "_long", "taken")

    def __init__(self) -> None:
        self._gaps = self._long = 0.0
        self.taken = 0.0
        """All that was ever taken here."""
        self._generated: int | None = None
        self._at = 0.0

    def generated(self, total: int, now: float) -> None:
        """The engine's count of generated tokens, at this time; less than before: another engine."""
        fresh = total - self._generated if self._generated is not None else 0
        fade = math.exp(-max(now - self._at, 0.0) / MEMORY_S)
        self._gaps = self._gaps * fade + max(fresh, 0)
        self._long *= fade
        self._generated, self._at = total, now

    def used(self, streams: float) -> float:
        """Share of it that is used up if a prompt stalls so many streams more; 1: it is not enough."""
        allowed = SHARE * self._gaps
        return min((self._long + streams) / allowed, 1.0) if allowed else 1.0

    def take(self, streams: float) -> None:
        """A prompt is computed while so many streams run: each of them has one long gap."""
        self._long += streams
        self.taken += streams

    def take_elsewhere(self, streams: float) -> None:
        """The same in another process that sends prompts to this engine, told by it."""
        self._long += streams
