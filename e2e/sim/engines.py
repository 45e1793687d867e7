"""Engines on paper: how long prompts and tokens take, and what a prompt does to the streams beside it.

A decode engine generates for its streams in steps; a prompt that it computes stops them all for as long as its
tokens take (without chunking, or with chunks that fill the step). What a prompt of no tokens would take, a0, it
waits itself: for the step that runs when it comes, for HTTP, for a step of its own; on real engines the streams do
not lose that. A prefill engine computes one prompt after the other. Times come from `Speeds`; nothing here decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Speeds:
    """Seconds; k is thousands of tokens."""

    prefill: tuple[float, float, float] = (0.0263, 0.0246, 0.000312)
    """a0 + a1 k + a2 k (k/2 + cached k)."""
    pull: tuple[float, float] = (0.0219, 0.00432)
    """x0 + x1 k."""
    step: tuple[float, float] = (0.010, 0.0002)
    """Between two tokens of a stream: s0 + s1 streams."""

    def computed(self, new: int, cached: int = 0) -> float:
        a0, a1, a2 = self.prefill
        u, c = new / 1000, cached / 1000
        return a0 + a1 * u + a2 * u * (u / 2 + c)

    def pulled(self, tokens: int) -> float:
        return self.pull[0] + self.pull[1] * tokens / 1000


@dataclass(eq=False)
class DecodeEngine:
    """Streams finish at times of the engine's own clock, which stands still while a prompt is computed."""

    speeds: Speeds
    streams: int = 0
    busy_until: float = 0.0
    """Prompts before this are computed one after the other."""
    stopped: float = 0.0
    """Seconds that the own clock has stood still."""
    waiting: int = 0
    gaps: list[tuple[float, int]] = field(default_factory=list)
    """(seconds, how many streams saw a gap that long) beside the usual steps."""

    def compute(self, now: float, new: int, cached: int) -> float:
        """A prompt is computed here; returns when its first token is there."""
        begins = max(now, self.busy_until)
        seconds = self.speeds.computed(new, cached)
        self.busy_until = begins + seconds
        stalled = seconds - self.speeds.prefill[0]
        self.stopped += stalled
        if self.streams:
            self.gaps.append((stalled + self.step, self.streams))
        return self.busy_until

    @property
    def step(self) -> float:
        return self.speeds.step[0] + self.speeds.step[1] * self.streams


@dataclass(eq=False)
class PrefillEngine:
    """Computes one prompt after the other."""

    speeds: Speeds
    busy_until: float = 0.0
    prompts: int = 0
    alive: bool = True

    def compute(self, now: float, tokens: int) -> float:
        begins = max(now, self.busy_until)
        self.busy_until = begins + self.speeds.computed(tokens)
        self.prompts += 1
        return self.busy_until
