"""A fleet on paper: every decode pod has the real decision rules, breakers and endpoint choice; only engines and
time are modelled. Events come off a heap; nothing waits.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from e2e.sim.engines import DecodeEngine, PrefillEngine, Speeds
from sidecar.decision.cost import Costs
from sidecar.decision.rules import Rules
from sidecar.decision.signals import Load
from sidecar.exchange.budget import Budget
from sidecar.prefill.address import Address, AllowList
from sidecar.prefill.endpoints import Endpoint, Endpoints
from sidecar.settings import Settings

if TYPE_CHECKING:
    from e2e.sim.trace import Asked

SCRAPE_S = 1.0
NEW_S = 10.0
"""For so long an endpoint that has joined counts as new."""

Rule = Callable[[int, int, int], bool]
"""(prompt tokens, of which decode holds, tokens ahead at prefill) -> remote?"""

PUBLISHED: dict[str, Rule] = {
    "always local": lambda tokens, cached, ahead: False,
    "always remote": lambda tokens, cached, ahead: True,
    "Dynamo": lambda tokens, cached, ahead: (
        not ((tokens - cached < 2048 and (tokens - cached) / tokens < 0.7) or ahead > 16_384)
    ),
    "llm-d": lambda tokens, cached, ahead: tokens - cached >= 256,
}
OURS = "pd-sidecar auto"
RULES = (*PUBLISHED, OURS)


@dataclass
class Seen:
    """What came of one run."""

    ttft: list[float] = field(default_factory=list)
    gaps: Counter[float] = field(default_factory=Counter)
    """Seconds between two tokens, rounded to milliseconds -> how often."""
    remote: int = 0
    recomputed: int = 0
    refused: int = 0
    most_recomputes: int = 0
    """At once, on one pod."""
    new_prompts: int = 0
    """Prompts that endpoints got in their first `NEW_S` seconds."""
    new_fair: float = 0.0
    """And how many that would have been, had each prompt gone to any of those that were there."""

    @property
    def share_of_new(self) -> float:
        return self.new_prompts / self.new_fair if self.new_fair else 0.0


@dataclass(eq=False)
class Pod:
    """One decode pod: the engine, and the sidecar's own parts."""

    engine: DecodeEngine
    endpoints: Endpoints
    rules: Rules
    budget: Budget
    generated: float = 0.0
    """Tokens, about: by the streams at each scrape."""


class Fleet:
    """`rule`: one of `RULES`. `fail_at`: half of the prefill engines die then. `join_at`: when the last
    so many of them join."""

    def __init__(
        self,
        rule: str,
        decode: int,
        prefill: int,
        *,
        speeds: Speeds | None = None,
        seed: int = 1,
        fail_at: float = 0.0,
        join_at: Sequence[float] = (),
    ) -> None:
        self._rule = rule
        speeds = speeds or Speeds()
        self.now = 0.0
        addresses = [Address(f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}", 8000) for n in range(prefill)]
        self._prefill = {address: PrefillEngine(speeds) for address in addresses}
        self._speeds = speeds
        self._fail_at = fail_at
        self._joins = dict(zip(addresses[prefill - len(join_at) :], join_at, strict=True))
        self._absent = set(self._joins)
        self._new: set[Address] = set()
        draw = random.Random(seed)
        self.pods = []
        for _ in range(decode):
            engine = DecodeEngine(speeds)
            endpoints = Endpoints(addresses, AllowList([]), lambda: self.now)
            endpoints._random.seed(draw.random())
            rules = Rules(
                256,
                lambda: self.now,
                costs=Costs.make(Settings().stall_weight),
                running_now=lambda engine=engine: engine.streams,
            )
            self.pods.append(Pod(engine, endpoints, rules, Budget(4, 0)))
        self.seen = Seen()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    @property
    def prefill(self) -> list[PrefillEngine]:
        return list(self._prefill.values())

    def run(self, trace: Sequence[Asked]) -> Seen:
        for asked in trace:
            self._at(asked.at, lambda asked=asked: self._arrives(asked))
        end = trace[-1].at if trace else 0.0
        for second in range(int(end / SCRAPE_S) + 1):
            self._at(second * SCRAPE_S, self._scrape)
        if self._fail_at:
            self._at(self._fail_at, self._fail)
        for address, when in self._joins.items():
            self._at(when, lambda address=address: self._join(address))
            self._at(when + NEW_S, lambda address=address: self._new.remove(address))
        while self._events:
            self.now, _, happen = heapq.heappop(self._events)
            happen()
        for pod in self.pods:
            for seconds, streams in pod.engine.gaps:
                self.seen.gaps[round(seconds, 3)] += streams
        return self.seen

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), happen))

    def _scrape(self) -> None:
        for pod in self.pods:
            waiting = int(pod.engine.busy_until > self.now + 0.05)
            pod.generated += pod.engine.streams * SCRAPE_S / pod.engine.step
            load = Load(pod.engine.streams, waiting, generated=int(pod.generated))
            pod.rules.signals.tell(load, self.now)

    def _fail(self) -> None:
        engines = self.prefill
        for engine in engines[: len(engines) // 2]:
            engine.alive = False

    def _join(self, address: Address) -> None:
        self._absent.remove(address)
        self._new.add(address)

    # -- one request --

    def _arrives(self, asked: Asked) -> None:
        pod = self.pods[asked.pod]
        candidates = [one for one in pod.endpoints if one.address not in self._absent]
        if not self._is_remote(pod, asked, candidates):
            self._local(pod, asked)
            return
        tried: list[Endpoint] = []
        for _ in range(2):
            endpoint = pod.endpoints.choose(candidates, tried, ordered=False, may_repeat=False)
            if endpoint is None:
                break
            tried.append(endpoint)
            trial = pod.endpoints.begin(endpoint, asked.tokens)
            engine = self._prefill[endpoint.address]
            if engine.alive:
                self._prefills(pod, asked, endpoint, engine)
                return
            pod.endpoints.end(endpoint, asked.tokens)
            pod.endpoints.failed(endpoint, at_once=True, trial=trial)
        if not pod.budget.take(asked.tokens):
            self.seen.refused += 1
            return
        self.seen.recomputed += 1
        self.seen.most_recomputes = max(self.seen.most_recomputes, pod.budget.in_flight)
        self._local(pod, asked, budgeted=True)

    def _prefills(self, pod: Pod, asked: Asked, endpoint: Endpoint, engine: PrefillEngine) -> None:
        self.seen.remote += 1
        self.seen.new_prompts += endpoint.address in self._new
        self.seen.new_fair += len(self._new) / (len(self._prefill) - len(self._absent))
        ahead = endpoint.tokens_in_flight > asked.tokens
        self._at(engine.compute(self.now, asked.tokens), lambda: self._prefilled(pod, asked, endpoint, ahead=ahead))

    def _is_remote(self, pod: Pod, asked: Asked, candidates: Sequence[Endpoint]) -> bool:
        ahead = pod.endpoints.least_tokens_in_flight(candidates)
        if self._rule != OURS:
            return PUBLISHED[self._rule](asked.tokens, asked.cached, ahead)
        if asked.tokens - asked.cached < pod.rules.min_remote_tokens:
            return False
        return pod.rules.weigh(asked.tokens, asked.cached, ahead)[1].remote

    def _local(self, pod: Pod, asked: Asked, *, budgeted: bool = False) -> None:
        ahead = pod.rules.began_here(asked.tokens)
        first = pod.engine.compute(self.now, asked.tokens - asked.cached, asked.cached)

        def begun() -> None:
            pod.rules.ended_here(asked.tokens)
            if budgeted:
                pod.budget.give_back(asked.tokens)
            if not ahead and pod.rules.costs is not None:
                pod.rules.costs.computed_here(asked.tokens - asked.cached, asked.cached, first - asked.at, self.now)
            self._streams(pod, asked)

        self._at(first, begun)

    def _prefilled(self, pod: Pod, asked: Asked, endpoint: Endpoint, *, ahead: bool) -> None:
        pod.endpoints.end(endpoint, asked.tokens)
        pod.endpoints.brought_kv(endpoint)
        costs = pod.rules.costs
        if costs is not None and not ahead:
            costs.computed_there(asked.tokens, self.now - asked.at, self.now)
        seconds = self._speeds.pulled(asked.tokens - asked.cached) + pod.engine.step

        def begun() -> None:
            if costs is not None:
                costs.pulled(asked.tokens - asked.cached, seconds, self.now)
            self._streams(pod, asked)

        self._at(self.now + seconds, begun)

    def _streams(self, pod: Pod, asked: Asked) -> None:
        self.seen.ttft.append(self.now - asked.at)
        engine = pod.engine
        engine.streams += 1
        self.seen.gaps[round(engine.step, 3)] += asked.output
        self._finishes(engine, engine.stopped, self.now + engine.step * asked.output)

    def _finishes(self, engine: DecodeEngine, stopped: float, when: float) -> None:
        """A stream ends at `when` unless the engine's own clock has stood still meanwhile."""

        def end() -> None:
            if engine.stopped > stopped:
                self._finishes(engine, engine.stopped, self.now + engine.stopped - stopped)
            else:
                engine.streams -= 1

        self._at(when, end)
