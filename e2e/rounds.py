"""Alternating rounds and their numbers: turns, medians with spread, ratios, Markdown tables.

A round takes each contender once, in an order that turns from round to round, and comparisons are made within a
round, so that a noisy minute weighs on all alike. It must not know what is measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of the rounds."""

    median: float
    low: float
    high: float

    def text(self, digits: int = 1) -> str:
        """`12.3 (11.0 to 14.9)`; of a single value that alone."""
        if self.low == self.high:
            return f"{self.median:,.{digits}f}"
        return f"{self.median:,.{digits}f} ({self.low:,.{digits}f} to {self.high:,.{digits}f})"


def spread(values: Sequence[float]) -> Spread | None:
    """None of nothing."""
    return Spread(statistics.median(values), min(values), max(values)) if values else None


def or_dash(found: Spread | None, digits: int = 1) -> str:
    """A cell of a table."""
    return found.text(digits) if found else "-"


def turns(names: list[str], rounds: int) -> Iterator[list[str]]:
    """The order of each round: another one begins every time, and every second round runs backwards."""
    for number in range(rounds):
        at = number % len(names)
        order = names[at:] + names[:at]
        yield order[::-1] if number % 2 else order


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a Markdown table and an empty one."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows] + [""]
