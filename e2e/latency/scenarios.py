"""What is asked of the engines in each scenario, and by which way: data. It must not know how it is sent.

All ways of a round get the same prompts (`seed`); no engine knows them from before, since each sample has a salt.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from e2e.latency.driver import Client, Routing, Turn
from e2e.prompts import TOKENS_PER_SENTENCE, make_prompt

STREAM, LONG = "stream", "long prompt"
"""The two kinds of client in the interference case."""
FOREVER_TOKENS = 4000
"""More than can be generated in a window."""


@dataclass(frozen=True)
class Mode:
    """One way of a request from client to tokens."""

    name: str
    title: str
    disagg: str = ""
    """What the sidecar's switch is turned to; empty: no sidecar."""
    kill_prefill: bool = False
    arrivals: bool = True
    """False: only what runs in the background; the measure of what arrivals do to it."""
    elsewhere: bool = False
    """Arrivals go to the prefill engine, as if they were another decode engine's: one token each."""
    held: bool = False
    """The decode engine has computed what arrives before the sample begins."""
    routing: Callable[[str, str], Routing] | None = None
    """(prefill address, decode engine's URL) → who chooses the way of each request in the sidecar's place, which
    then only moves: a rule that sees everything from the beginning of the sample."""


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("direct", "no sidecar, straight to the decode engine"),
        Mode("local", "sidecar, `--disagg off`", "off"),
        Mode("remote", "sidecar, `--disagg on`", "on"),
        Mode("auto", "sidecar, `--disagg auto` (as it comes)", "auto"),
        Mode("quiet", "sidecar, `--disagg on`, nothing arriving", "on", arrivals=False),
        Mode(
            "elsewhere",
            "as `quiet`, while the prefill engine computes the same prompts for nobody",
            "on",
            elsewhere=True,
        ),
        Mode(
            "held",
            "as `local`, but decode holds the KV of what arrives: what is left is to decode the answers",
            "off",
            held=True,
        ),
        Mode("fallback", "sidecar, `--disagg on`, prefill engine killed in mid-run", "on", kill_prefill=True),
        Mode("vllm-router", "vllm-router in place of the sidecar"),
    )
}
USUAL = ("direct", "local", "remote", "auto", "vllm-router")


@dataclass(frozen=True)
class Scenario:
    """One pattern of load."""

    name: str
    title: str
    clients: Callable[[int], list[Client]]
    """seed → who asks what, and when."""
    modes: tuple[str, ...] = USUAL
    quick_modes: tuple[str, ...] = ()
    """In quick runs; none: not run."""
    rounds: int = 3
    """In full runs."""
    min_window_s: float = 0.0
    kill_at_s: float = 0.0
    """When `kill_prefill` strikes."""
    public: bool = False
    """Not sent by our driver: see public.py."""


def prompt(tokens: int, seed: int) -> str:
    """About so many tokens."""
    return make_prompt(max(0, round(tokens / TOKENS_PER_SENTENCE) - 1), seed)


def _idle(seed: int) -> list[Client]:
    sizes = (40, 300, 1000, 2000)
    turns = tuple(Turn(prompt(size, seed + number), 16) for number, size in enumerate(sizes))
    return [Client("request", turns, pause_s=0.2)]


def _interference(seed: int, answer_tokens: int = 16) -> list[Client]:
    streams = [
        Client(STREAM, (Turn(prompt(40, seed + number), FOREVER_TOKENS),), background=True) for number in range(4)
    ]
    arrivals = [
        Client(LONG, (Turn(prompt(2000, seed + 10 + number), answer_tokens),), at_s=1.5 * number)
        for number in range(3)
    ]
    return streams + arrivals


def _one_token(seed: int) -> list[Client]:
    return _interference(seed, answer_tokens=1)


def _bursts(seed: int) -> list[Client]:
    return [
        Client("request", (Turn(prompt(500, seed + 10 * burst + number), 24),), at_s=4.0 * burst)
        for burst in range(2)
        for number in range(5)
    ]


def _multi_turn(seed: int) -> list[Client]:
    return [
        Client(
            "turn",
            tuple(Turn(prompt(size, seed + 10 * talk + number), 24) for number, size in enumerate((500, 150, 400))),
            at_s=0.7 * talk,
            pause_s=0.3,
            remembers=True,
        )
        for talk in range(3)
    ]


def _mixed(seed: int) -> list[Client]:
    draw = random.Random(0)  # the same arrivals and lengths in every run; only the words differ
    clients, at_s = [], 0.0
    for number in range(12):
        size = draw.choices((60, 400, 1500), (6, 4, 2))[0]
        clients.append(Client("request", (Turn(prompt(size, seed + number), draw.choice((16, 32, 48))),), at_s))
        at_s += draw.expovariate(1.2)
    return clients


SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "interference",
            "Four running streams, three prompts of 2,000 tokens arriving 1.5 s apart",
            _interference,
            modes=("quiet", "elsewhere", "held", *USUAL, "fallback"),
            quick_modes=("quiet", "elsewhere", "held", "local", "remote"),
            rounds=4,
            min_window_s=6.0,
            kill_at_s=2.2,
        ),
        Scenario(
            "one-token",
            "The same, with answers of one token: what arrives is prompts and next to nothing else",
            _one_token,
            modes=("quiet", "local", "remote"),
            quick_modes=("quiet", "local", "remote"),
            rounds=4,
            min_window_s=6.0,
        ),
        Scenario(
            "idle",
            "One request after another: 40, 300, 1,000 and 2,000 tokens",
            _idle,
            quick_modes=("direct", "local", "remote"),
        ),
        Scenario("bursts", "Two bursts of five prompts of 500 tokens, 4 s apart", _bursts),
        Scenario(
            "multi-turn", "Three conversations of three turns, the whole conversation sent each time", _multi_turn
        ),
        Scenario("mixed", "Random arrivals, 1.2 a second, of short, middle and long prompts", _mixed, rounds=2),
        Scenario(
            "public",
            "The load of vLLM's own generator, `vllm bench serve`: random prompts of 100 to 1,700 tokens",
            lambda _: [],
            modes=("local", "remote", "vllm-router"),
            rounds=2,
            public=True,
        ),
    )
}
