"""The recompute budget: how much of a failed prefill side's work the local engine takes on at once. No I/O."""

from typing import Protocol


class Recomputes(Protocol):
    """What a request asks before it is recomputed: a `Budget`, or one that several processes share."""

    @property
    def in_flight(self) -> int: ...

    def take(self, tokens: int) -> bool:
        """Whether a recompute of so many prompt tokens may begin."""

    def give_back(self, tokens: int) -> None:
        """Its prompt is computed, or it will not be."""


class Budget:
    """Counts recomputes and their prompt tokens while their prefill runs locally.

    `max_concurrent` requests and `max_tokens` tokens (0: no limit) at once. One request is always let through
    when nothing else runs, however long: a limit below its size would refuse it for ever.
    """

    __slots__ = ("in_flight", "max_concurrent", "max_tokens", "tokens")

    def __init__(self, max_concurrent: int, max_tokens: int) -> None:
        self.max_concurrent = max_concurrent
        self.max_tokens = max_tokens
        self.in_flight = 0
        self.tokens = 0

    def take(self, tokens: int) -> bool:
        if self.in_flight >= self.max_concurrent:
            return False
        if self.max_tokens and self.in_flight and self.tokens + tokens > self.max_tokens:
            return False
        self.in_flight += 1
        self.tokens += tokens
        return True

    def give_back(self, tokens: int) -> None:
        self.in_flight -= 1
        self.tokens -= tokens
