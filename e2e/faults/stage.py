"""Where scenarios are played: two engines, the wire between them, two sidecars under load; what must hold after.

One sidecar recomputes what fails, the other answers with an error (`--on-prefill-failure`). Every answer is
checked: the text of a plain run, or a status with a row in the failure table. It must not know what scenarios do.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

from e2e.asking import Question, Questions, ask_or_cut, eventually, reason_of_cut, text_of
from e2e.faults.wire import CLEAR, Weather, Wire
from e2e.pair import LEASE_S, Pair, free, idle, mend
from sidecar.exchange.failures import ROWS
from tests.integration.client import Cut
from tests.integration.sidecar import Sidecar

if TYPE_CHECKING:
    from e2e.rig import Rig

PREFILL_TIMEOUT_S = 6.0
PULL_TIMEOUT_S = 2.0
FLAGS = (
    *("--prefill-timeout", f"{PREFILL_TIMEOUT_S}", "--pull-timeout", f"{PULL_TIMEOUT_S}"),
    *("--prefill-connect-timeout", "0.5", "--engine-idle-timeout", "1", "--recompute-max-concurrent", "64"),
)
RETRY_S = 0.3
"""What a client waits that was told so."""
REST_LOOKS_S = 1.8
"""Longer than connections to engines stay open, and than a probe takes."""
REST_S = 15.0
PROBES = 2
"""Connections that may be more than before: probes that met at a slow engine needed one each, and take turns on
them from then on. What leaks, leaks with each of dozens of requests."""
BLOCKS_S = LEASE_S + 20.0
"""Until engines hold no block: a lease, and what a connection needs that lost its packets to find its way again."""
ROWS_OF_TABLE = {(row.reason, row.status) for row in ROWS if row.status}
CUTS_OF_TABLE = {row.reason for row in ROWS}


class Broken(AssertionError):
    """Something that must hold does not."""


@dataclass(frozen=True)
class Scenario:
    """One fault, and what must hold."""

    name: str
    play: Callable[[Play], None]
    within_s: float
    """Every answer comes no later than this after its request."""
    again_s: float
    """Prompts are prefilled remotely again so soon after the fault is over."""
    errors: bool
    """Whether the sidecar that recomputes may answer with errors too: the decode engine itself is hurt."""
    network: bool
    """Whether the fault is the network's."""

    @property
    def promise(self) -> str:
        """What must hold beside what must always hold, in one line."""
        return " ".join((self.play.__doc__ or "").split())


@dataclass
class Asked:
    """What became of one request."""

    outcome: str
    seconds: float


@dataclass
class Verdict:
    """What came of one run of one scenario."""

    name: str
    seed: int
    wrong: str = ""
    outcomes: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    again_s: float = 0.0
    seconds: float = 0.0

    @property
    def line(self) -> str:
        """For people."""
        told = ", ".join(f"{count} {outcome}" for outcome, count in self.outcomes.most_common(6))
        times = f"slowest {self.slowest_s:.1f} s, remote again after {self.again_s:.1f} s"
        word = "BROKEN" if self.wrong else "holds"
        return f"{self.name} (seed {self.seed}): {word}; {told}; {times}" + (
            f"\n{self.wrong}" if self.wrong else ""
        )


class Load:
    """Clients that ask one question after the other, of both sidecars, until the block ends."""

    def __init__(self, play: Play, clients: int) -> None:
        self._play = play
        self._stop = threading.Event()
        strict = max(1, clients // 3)
        sidecars = [play.strict] * strict + [play.sidecar] * (clients - strict)
        self._threads = [threading.Thread(target=self._run, args=(one,), daemon=True) for one in sidecars]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        self._play.wait_for(lambda: self._play.answered("remote") >= len(self._threads), "the load runs remotely")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, sidecar: Sidecar) -> None:
        while not self._stop.is_set():
            outcome = self._play.ask(sidecar)
            if outcome.split(" ")[0] not in ("remote", "recompute", "local"):
                self._stop.wait(RETRY_S)


class Play:
    """One run of one scenario."""

    def __init__(self, scenario: Scenario, rig: Rig, wire: Wire | None, seed: int, stack: ExitStack) -> None:
        self.scenario = scenario
        self.draw = random.Random(f"{scenario.name} {seed}")
        """Chooses moments and sizes."""
        self._kinds = random.Random(seed)
        """Chooses what is streamed, in whatever order the clients ask."""
        self.pair = Pair(rig.prefill[0], rig.decode[0], stack)
        self.prefill, self.decode = self.pair.prefill, self.pair.decode
        self.asked: list[Asked] = []
        self._wire = wire
        self.broken: list[str] = []
        self._rest: dict[Sidecar, tuple[int, int]] = {}
        tokens, generate = self.draw.randrange(150, 600), self.draw.randrange(6, 16)
        self.questions = Questions(self.decode, tokens=tokens, generate=generate)

    # -- what scenarios use

    def serve(
        self, *flags: str, environment: dict[str, str] | None = None, static: bool = True, timeouts: bool = True
    ) -> None:
        """Starts both sidecars, and waits until they prefill remotely and are at rest. `static`: they are told of
        the prefill engine. `timeouts`: with those that the scenarios are made for."""
        told = self.pair.flags()
        if not static:
            at = told.index("--prefill")
            del told[at : at + 2]
        if timeouts:
            told += FLAGS
        self.sidecar = Sidecar(*told, "--disagg", "on", *flags, environment=environment)
        self.pair.closing(self.sidecar.kill)
        self.strict = Sidecar(
            *told, "--disagg", "on", "--on-prefill-failure", "fail", *flags, environment=environment
        )
        self.pair.closing(self.strict.kill)
        for one in self.sidecars:
            self.wait_for(partial(self.is_remote, one), "a first remote prefill")
        for one in self.sidecars:
            self._rest[one] = self._looks(one)

    @property
    def sidecars(self) -> tuple[Sidecar, Sidecar]:
        return self.sidecar, self.strict

    def load(self, low: int = 3, high: int = 8) -> Load:
        """So many clients, while the block lasts."""
        return Load(self, self.draw.randint(low, high))

    def pause(self, low_s: float, high_s: float) -> None:
        """A moment of the seed's choosing."""
        time.sleep(self.draw.uniform(low_s, high_s))

    @contextmanager
    def weather(self, weather: Weather) -> Iterator[None]:
        """On the wire, while the block lasts."""
        assert self._wire is not None
        self._wire.set(weather)
        try:
            yield
        finally:
            self._wire.set(CLEAR)

    def answered(self, outcome: str) -> int:
        """How many requests ended so."""
        return sum(one.outcome == outcome for one in list(self.asked))

    def wait_for(self, condition: Callable[[], object], what: str, within_s: float = 30.0) -> None:
        """Until it is so; Broken if it is not in time."""
        try:
            eventually(condition, within_s)
        except AssertionError:
            raise Broken(f"not within {within_s:g} s: {what}") from None

    def must(self, holds: bool, what: str) -> None:
        """Broken if it does not hold."""
        if not holds:
            raise Broken(what)

    def ask(self, sidecar: Sidecar) -> str:
        """One request, its answer checked and noted; what became of it."""
        question = self.questions.next(streamed=self._kinds.random() < 0.5)
        began = time.monotonic()
        try:
            outcome = self._outcome(sidecar, question)
        except Exception as error:
            outcome = f"{type(error).__name__}"
            self.broken.append(f"{question.api}: {type(error).__name__}: {str(error)[:400]}")
        self.asked.append(Asked(outcome, time.monotonic() - began))
        return outcome

    def is_remote(self, sidecar: Sidecar) -> bool:
        """Whether the next request is prefilled remotely."""
        return self.ask(sidecar) == "remote"

    # -- what must hold

    def _outcome(self, sidecar: Sidecar, question: Question) -> str:
        answer = ask_or_cut(sidecar, question.api, question.body, 90.0)
        if isinstance(answer, Cut):
            reason = reason_of_cut(answer)
            if reason not in CUTS_OF_TABLE:
                raise Broken(f"cut without a reason: {answer.answer.body[-300:]!r}")
            return f"cut {reason}"
        if answer.status != 200:
            if (answer.reason_code, answer.status) not in ROWS_OF_TABLE:
                raise Broken(f"{answer.status} {answer.body[:300]!r}")
            return f"{answer.status} {answer.reason_code}"
        if text_of(answer) != question.text:
            raise Broken(f"wrong text ({answer.decision}): {text_of(answer)!r} in place of {question.text!r}")
        return answer.decision.partition(";")[0]

    def check(self, verdict: Verdict) -> None:
        """What must hold after every scenario; Broken."""
        began = time.monotonic()
        for one in self.sidecars:
            self.wait_for(partial(self.is_remote, one), "prompts prefilled remotely again", self.scenario.again_s)
        verdict.again_s = time.monotonic() - began
        for one in self.sidecars:
            idle(one)
        try:
            free(self.prefill, self.decode, within_s=BLOCKS_S)
        except AssertionError:
            usage = f"prefill {self.prefill.kv_usage():.3f}, decode {self.decode.kv_usage():.3f}"
            raise Broken(f"blocks are still in use after {BLOCKS_S:g} s: {usage}") from None
        for one in self.sidecars:
            self._back_at_rest(one)
        for one in self.sidecars:
            one.stop()
        if self.broken:
            raise Broken("\n".join(dict.fromkeys(self.broken)))
        late = max(self.asked, key=lambda one: one.seconds)
        if late.seconds > self.scenario.within_s:
            raise Broken(f"an answer ({late.outcome}) took {late.seconds:.1f} s")

    def _back_at_rest(self, sidecar: Sidecar) -> None:
        deadline = time.monotonic() + REST_S
        before = self._rest[sidecar]
        while True:
            now = self._looks(sidecar)
            if now[0] <= before[0] + PROBES and now[1] <= before[1]:
                return
            if time.monotonic() > deadline:
                raise Broken(f"descriptors and tasks: {before} before, {now} after\n{sidecar.descriptors()}")

    @staticmethod
    def _looks(sidecar: Sidecar) -> tuple[int, int]:
        """The least of some looks at descriptors and tasks: probes come and go."""
        looks = []
        deadline = time.monotonic() + REST_LOOKS_S
        while time.monotonic() < deadline:
            looks.append((sidecar.open_descriptors, int(sidecar.metrics()("tasks"))))
            time.sleep(0.1)
        return min(one for one, _ in looks), min(one for _, one in looks)

    def tally(self, verdict: Verdict) -> None:
        """What was seen, good or bad."""
        verdict.outcomes = Counter(one.outcome for one in self.asked)
        verdict.slowest_s = max((one.seconds for one in self.asked), default=0.0)

    def errors_of_recompute(self) -> list[str]:
        """Error statuses that the sidecar sent that recomputes."""
        labels = self.sidecar.metrics().labels("requests_total")
        return sorted(
            {f"{one['status']} {one['reason']}" for one in labels if one["status"] not in ("200", "none")}
        )


def perform(scenario: Scenario, rig: Rig, wire: Wire | None, seed: int) -> Verdict:
    """One run, on engines that are mended before it."""
    verdict = Verdict(scenario.name, seed)
    began = time.monotonic()
    with ExitStack() as stack:
        play: Play | None = None
        try:
            if wire is not None:
                wire.set(CLEAR)
            mend(*rig.engines)
            play = Play(scenario, rig, wire, seed, stack)
            scenario.play(play)
            errors = play.errors_of_recompute()
            play.check(verdict)
            play.must(scenario.errors or not errors, f"errors though it recomputes: {errors}")
        except Exception as error:
            told = "" if isinstance(error, Broken) else f"{type(error).__name__}: "
            verdict.wrong = told + str(error)
            if play is not None and hasattr(play, "sidecar"):
                verdict.wrong += "\n".join(["", *play.broken[:3], play.sidecar.log[-3000:]])
        if play is not None:
            play.tally(verdict)
        if wire is not None:
            wire.set(CLEAR)
        mend(*rig.engines)
    verdict.seconds = time.monotonic() - began
    return verdict
