"""Requests on paper: long-tailed prompts, and conversations whose next turn begins with all that was said."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Asked:
    """One request. Of its `tokens` the decode pod that it goes to has `cached` in its cache already."""

    at: float
    pod: int
    tokens: int
    cached: int
    output: int


def mixed(pods: int, per_pod_and_second: float, seconds: float, seed: int) -> list[Asked]:
    """Half short chats, a third long documents, a sixth later turns of a conversation on the pod that had the
    earlier ones. Lengths are log-normal: medians of 120, 3,000 and 300 new tokens, with a long tail."""
    draw = random.Random(seed)
    said: dict[int, list[int]] = {}
    found = []
    now = 0.0
    while True:
        now += draw.expovariate(pods * per_pod_and_second)
        if now >= seconds:
            return found
        pod = draw.randrange(pods)
        kind = draw.random()
        output = min(int(draw.lognormvariate(5.0, 0.6)) + 1, 1000)
        earlier = said.setdefault(pod, [])
        if kind < 1 / 2:
            tokens, cached = min(int(draw.lognormvariate(4.8, 0.7)) + 1, 2000), 0
        elif kind < 5 / 6 or not earlier:
            tokens, cached = min(int(draw.lognormvariate(8.0, 0.8)) + 1, 60_000), 0
        else:
            cached = earlier.pop(draw.randrange(len(earlier)))
            tokens = cached + min(int(draw.lognormvariate(5.7, 0.8)) + 1, 8000)
        earlier.append((tokens + output) // 16 * 16)
        del earlier[:-8]
        found.append(Asked(now, pod, tokens, cached, output))
