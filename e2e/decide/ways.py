"""The ways of a request in this comparison, the configuration that all share, and the load. Data."""

from __future__ import annotations

import random

from e2e.decide.rules import LLM_D_LEAST_TOKENS, dynamo, llm_d
from e2e.decide.trace import mixed
from e2e.latency.driver import Client, Turn
from e2e.latency.scenarios import Mode, Scenario

LEAST_TOKENS = 40
"""What the decode engine here computes in about the time of one of its steps (25 ms, 0.6 ms a token):
`--min-remote-tokens`, and the peers' thresholds where they are scaled."""
_WARM_UP_SIZES = (*(48 + 12 * number for number in range(18)), 400, 800, 400, 1600)

MAIN: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("remote", "sidecar, `--disagg on`: always remote", "on"),
        Mode("auto", f"sidecar, `--disagg auto --min-remote-tokens {LEAST_TOKENS} --kv-events on`", "auto"),
        Mode(
            "dynamo-rule",
            f"Dynamo's `isl_bounding`, threshold {LEAST_TOKENS} tokens in place of 2,048, ratio 0.7",
            "on",
            routing=dynamo(LEAST_TOKENS),
        ),
        Mode(
            "llm-d-rule",
            f"llm-d's `prefix-based-pd-decider`, `nonCachedTokens: {LEAST_TOKENS}`",
            "on",
            routing=llm_d(LEAST_TOKENS),
        ),
    )
}
SIDE: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("local", "sidecar, `--disagg off`: always local", "off"),
        Mode(
            "dynamo-default", "Dynamo's `isl_bounding` as it comes: 2,048 tokens, ratio 0.7", "on", routing=dynamo()
        ),
        Mode(
            "dynamo-load",
            f"Dynamo's `isl_or_load`, threshold {LEAST_TOKENS}, `prefill_busy_threshold` 0.5",
            "on",
            routing=dynamo(LEAST_TOKENS, busy=0.5),
        ),
        Mode(
            "llm-d-default",
            f"llm-d's decider with the `nonCachedTokens: {LLM_D_LEAST_TOKENS}` of its deployment files",
            "on",
            routing=llm_d(),
        ),
    )
}
"""In the first round only: what they show does not hang on a few milliseconds."""
WAYS = MAIN | SIDE


def _warm_up(_seed: int) -> list[Client]:
    draw = random.Random(7)
    turns = tuple(Turn("", 2, tuple(draw.randrange(300, 2000) for _ in range(size))) for size in _WARM_UP_SIZES)
    return [Client("warm-up", turns, pause_s=0.4)]


MIXED = Scenario("mixed", "Short chats, long documents, conversations and bursts", mixed)
WARM_UP = Scenario("warm-up", "One prompt after another, for `auto` to learn what both ways cost", _warm_up)
