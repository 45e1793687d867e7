"""Three decode and two prefill pods behind Envoy, under load: what clients, sidecars and gateway saw of each step.

It must not know what happens in a step, nor how a pod or the gateway is made.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from e2e.bench.install import install
from e2e.cluster.control import Cluster
from e2e.cluster.gateway import Gateway
from e2e.cluster.load import WHOLE, Load, Outcome
from e2e.cluster.network import Network
from e2e.rounds import table
from tests.kube.api import ThreadedApi

if TYPE_CHECKING:
    from e2e.cluster.pods import Pod

DECODE, PREFILL = 3, 2
TOKENS = 40
SETTLE_S = 4.0
"""A little longer than an answer takes."""
ENVOY_SEES = {
    "upstream_rq_5xx": "answers of 5xx",
    "upstream_rq_retry": "retries",
    "upstream_cx_destroy_remote_with_active_rq": "connections that pods broke off",
}
BUDGET = "503 decode_over_budget"
BUDGET_ONLY = "503 beyond the recompute budget"


class NoEnvoy(Exception):
    """Why there is none here."""


@dataclass
class Step:
    """One thing that happened, and what came of the requests that ended meanwhile."""

    name: str
    began: float
    ended: float = 0.0
    outcomes: list[Outcome] = field(default_factory=list)
    envoy: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    """What no policy allows."""
    allowed: str = "nothing"
    victim: str = ""
    """Address of a decode pod that was killed, and when."""
    killed_at: float = 0.0

    def is_allowed(self, one: Outcome) -> bool:
        if self.victim:  # its own requests die with it: a stream is cut, what had no answer yet gets 503
            was_there = one.pod == self.victim and one.began <= self.killed_at
            return was_there and (one.what == "cut" or one.status == 503)
        return one.what == BUDGET and self.allowed != "nothing"


@dataclass
class Result:
    """The whole run."""

    clients: int
    steps: list[Step] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What no step stands for."""
    metrics: Counter[str] = field(default_factory=Counter)
    """Of all sidecars together: decision and reason of each request that they have counted."""

    @property
    def all_problems(self) -> list[str]:
        return [*(f"{step.name}: {one}" for step in self.steps for one in step.problems), *self.problems]


class Scene:
    """The pods and the load; every client has begun."""

    def __init__(self, clients: int, stack: ExitStack, say: Callable[[str], None], behind_lines: str = "") -> None:
        """`behind_lines`: the role whose pods' lines can be slow."""
        found = install(["envoy"])
        if "envoy" not in found.binaries:
            raise NoEnvoy(found.absent["envoy"])
        self.say = say
        self.result = Result(clients)
        self.network = network = Network()
        stack.callback(network.close)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        api = stack.enter_context(ThreadedApi())
        self.gateway = Gateway(found.binaries["envoy"], *network.pod(), folder)
        stack.callback(self.gateway.close)
        self.cluster = Cluster(network, self.gateway, api, behind_lines)
        stack.callback(self.cluster.close)
        for _ in range(PREFILL):
            self.cluster.add("prefill")
        for _ in range(DECODE):
            self.cluster.add("decode")
        self.cluster.wait_ready(*self.cluster.pods)
        self.load = Load(self.gateway.address, network.pod()[0], clients, TOKENS)
        self.load.start()
        stack.callback(self.load.stop)
        time.sleep(SETTLE_S)

    def pods(self, role: str) -> list[Pod]:
        return [pod for pod in self.cluster.pods if pod.role == role and pod.ready]

    @contextmanager
    def step(self, name: str, allowed: str = "nothing") -> Iterator[Step]:
        """What ends meanwhile is its own; it lasts until answers that it has met have ended."""
        step = Step(name, time.monotonic(), allowed=allowed)
        before, first = self.gateway.stats(), len(self.load.outcomes)
        self.result.steps.append(step)
        yield step
        time.sleep(SETTLE_S)
        step.ended = time.monotonic()
        step.outcomes = self.load.outcomes[first:]
        after = self.gateway.stats()
        step.envoy = Counter({what: after.get(what, 0) - before.get(what, 0) for what in ENVOY_SEES})
        wrong = Counter(f"{one.what} ({one.pod})" for one in step.outcomes if one.what != WHOLE)
        bad = Counter(
            f"{one.what} ({one.pod})" for one in step.outcomes if one.what != WHOLE and not step.is_allowed(one)
        )
        step.problems += [f"{times} requests: {what}" for what, times in bad.items()]
        if allowed == "nothing":
            step.problems += [f"Envoy saw {step.envoy[what]} {ENVOY_SEES[what]}" for what in +step.envoy]
        if not step.outcomes:
            step.problems.append("no request ended: this step shows nothing")
        self.say(f"{name}: {len(step.outcomes)} requests, {dict(wrong) or 'all whole'}")


def end(it: Scene) -> Result:
    """Ends load and pods. What sidecars and engines have counted must be what clients saw."""
    it.load.stop()
    it.cluster.close()
    result = it.result
    for pod in it.cluster.pods:
        for metrics in pod.last_words:
            for labels in metrics.labels("requests_total"):
                if labels["api"] == "completions":
                    shown = f"{labels['decision']}, {labels['reason']}, {labels['status']}"
                    result.metrics[shown] += int(metrics("requests_total", **labels))
        if pod.aborted:
            result.problems.append(f"{pod.name}: the engine counts {pod.aborted} aborted requests")
    whole = sum(1 for one in it.load.outcomes if one.what == WHOLE)
    answered = sum(times for shown, times in result.metrics.items() if shown.endswith(", 200"))
    # The last words of a sidecar that was killed are spoken before its last requests, whole or not.
    lost = sum(1 for step in result.steps for one in step.outcomes if step.is_allowed(one))
    if abs(answered - whole) > lost:
        result.problems.append(f"sidecars have counted {answered} answers of 200, clients {whole} whole ones")
    return result


def report(result: Result) -> str:
    """The table."""
    rows = []
    for step in result.steps:
        wrong = Counter(one.what for one in step.outcomes if one.what != WHOLE)
        ways = Counter(one.decision.partition(";")[0] for one in step.outcomes if one.what == WHOLE)
        rows.append(
            [
                step.name,
                f"{step.ended - step.began:.0f} s",
                f"{len(step.outcomes):,}",
                f"{len(step.outcomes) - wrong.total():,}",
                ", ".join(f"{times} {what}" for what, times in wrong.items()) or "none",
                step.allowed,
                ", ".join(f"{times:,} {way}" for way, times in ways.most_common()),
                f"{max((one.silence_s for one in step.outcomes), default=0.0):.2f} s",
                "**NO**" if step.problems else "yes",
            ]
        )
    head = [
        "step",
        "took",
        "requests ended",
        "whole",
        "others",
        "policy allows",
        "decided",
        "longest silence",
        "ok",
    ]
    lines = [
        f"{result.clients} streams at a time through Envoy, {DECODE} decode and {PREFILL} prefill pods:",
        "",
        *table(head, rows),
        "The sidecars have counted: " + ", ".join(f"{n:,} {what}" for what, n in result.metrics.most_common()),
    ]
    return "\n".join([*lines, *(f"NOT AS IT SHOULD BE: {one}" for one in result.all_problems), ""])
