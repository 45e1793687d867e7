"""The scenarios one after the other on one pair of engines for minutes, drawn from a seed, under a load that never
pauses: `python -m e2e.soak --real`. What is measured, and what may not rise, is in e2e/soak.py.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from e2e.engines import Place
from e2e.faults import wire
from e2e.faults.scenarios import AGAIN_S, RECONNECT_S, SCENARIOS
from e2e.faults.stage import BLOCKS_S, REST_LOOKS_S, Broken, Load, Play, Scenario
from e2e.pair import LEASE_S, free, idle
from e2e.rig import Rig
from e2e.soak import OPEN, Sample, Soaked, look

OWN_SIDECARS = ("clock-steps", "dns-away")
"""They need a sidecar that was started for them."""
CLIENTS = 6


class Day(Play):
    """A run of many scenarios: one pair of sidecars, one load, whatever each of them asks for."""

    _served = False

    def serve(
        self, *flags: str, environment: dict[str, str] | None = None, static: bool = True, timeouts: bool = True
    ) -> None:
        if not self._served:
            self._served = True
            super().serve(*flags, environment=environment, static=static, timeouts=timeouts)

    @contextmanager
    def load(self, low: int = 0, high: int = 0) -> Iterator[None]:  # type: ignore[override]
        """It runs already; a scenario begins once prompts are prefilled remotely."""
        self.wait_for(lambda: self.is_remote(self.sidecar), "prompts prefilled remotely", RECONNECT_S)
        yield


def soak(
    seconds: float, warm_s: float, interval_s: float, seed: int, say: Callable[[str], None] = lambda _: None
) -> Soaked:
    """Warms up, rests, plays, rests."""
    soaked = Soaked(seconds, seed, warm_s)
    with ExitStack() as stack:
        line = None if wire.missing() else stack.enter_context(wire.Wire(seed))
        place = Place(wire.FAR, line.netns) if line is not None else None
        rig = stack.enter_context(Rig("tiny", lease_seconds=LEASE_S, prefill_place=place))
        playable = [
            one for one in SCENARIOS.values() if one.name not in OWN_SIDECARS and not (one.network and line is None)
        ]
        whole = Scenario("day", lambda _play: None, 60.0, AGAIN_S, errors=True, network=False)
        day = Day(whole, rig, line, seed, stack)
        day.serve()
        say("warming up")
        with Load(day, CLIENTS):
            _play(day, playable, warm_s, soaked, say)
        soaked.before = _rest(day)
        say(f"at rest: {soaked.before}")
        ended = threading.Event()
        watching = threading.Thread(target=_watch, args=(day, interval_s, soaked, ended, say))
        watching.start()
        try:
            with Load(day, CLIENTS):
                _play(day, playable, seconds, soaked, say)
        finally:
            ended.set()
            watching.join()
        soaked.after = _rest(day)
        say(f"at rest: {soaked.after}")
        for one in day.sidecars:
            one.stop()
        soaked.seen = Counter(one.outcome for one in day.asked)
        soaked.wrong += day.broken
        late = [one for one in day.asked if one.seconds > whole.within_s]
        soaked.wrong += [f"{one.outcome} took {one.seconds:.1f} s" for one in late]
    return soaked


def _play(day: Day, playable: list[Scenario], seconds: float, soaked: Soaked, say: Callable[[str], None]) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        scenario = day.draw.choice(playable)
        say(scenario.name)
        try:
            scenario.play(day)
        except Broken as broken:
            soaked.wrong.append(f"{scenario.name}: {broken}")


def _watch(day: Day, interval_s: float, soaked: Soaked, ended: threading.Event, say: Callable[[str], None]) -> None:
    began = time.monotonic()
    while not ended.wait(interval_s):
        sample = look(day.sidecar, time.monotonic() - began)
        soaked.samples.append(sample)
        say(str(sample))


def _rest(day: Day) -> Sample:
    """The least of some looks, once nothing runs any more."""
    day.wait_for(lambda: day.is_remote(day.sidecar), "prompts prefilled remotely", RECONNECT_S)
    for one in day.sidecars:
        idle(one)
    free(day.prefill, day.decode, within_s=BLOCKS_S)
    time.sleep(REST_LOOKS_S)  # idle connections to engines are closed by then
    looks = []
    end = time.monotonic() + REST_LOOKS_S
    while time.monotonic() < end:
        looks.append(look(day.sidecar, 0.0))
        time.sleep(0.1)
    return replace(looks[-1], **{name: min(getattr(one, name) for one in looks) for name in OPEN})
