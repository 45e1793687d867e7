"""`make soak`: a sidecar between simulated engines, in a storm of faults at full rate for as long as one likes.

Memory, descriptors, tasks and gauges are looked at every few seconds; a line is fitted to each; and at rest, before
and after the storm, the same must be open. It must not know which faults there are (tests/integration/storm.py).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import math
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from e2e import machine
from e2e.faults import wire
from e2e.plots import curves
from e2e.rounds import table
from tests.engine import Engine
from tests.integration.sidecar import Sidecar
from tests.integration.storm import DECODE_FAULTS, PREFILL_FAULTS, Storm, add_faults, calm, chaos, flags, start

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "soak.md"
PREFILL_ENGINES = 4
SETTLE_S = 12.0
"""Connections to engines are kept for 4 s, every stage of a request is over by then, and a side channel that was
lost is asked again after 10 at most."""
RESTING_LOOKS = 12
OPEN = ("descriptors", "threads", "tasks", "inflight")
"""What must not be more after a storm than before it."""
# What a measure is called in the report, and the most that its line may rise in an hour.
MEASURES = {"rss_mib": ("RSS, MiB", 1.0), "descriptors": ("descriptors", 1.0), "tasks": ("tasks", 1.0)}


@dataclass(frozen=True)
class Sample:
    """One look at the sidecar."""

    at_s: float
    """Since the storm began."""
    sent: int
    """Requests so far."""
    rss_mib: float
    descriptors: int
    threads: int
    tasks: int
    inflight: int
    """The sum of the gauges that read 0 at rest."""


@dataclass
class Soaked:
    """What came of it."""

    seconds: float
    seed: int
    warm_s: float = 0.0
    """Before it: until allocators have seen the most of everything, which takes tens of minutes."""
    samples: list[Sample] = field(default_factory=list)
    """In the storm, the warm-up not among them."""
    before: Sample | None = None
    after: Sample | None = None
    """At rest."""
    seen: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    """Answers that no row of the failure table allows, and engines that died."""


@dataclass(frozen=True)
class Line:
    """A line with the least squares: how much it rises in one unit of x, and the standard error of that."""

    slope: float
    error: float

    def rises_by(self, limit: float) -> bool:
        """Whether it rises by more than `limit`, and not by chance."""
        return self.slope - 2 * self.error > limit


def fit(points: Sequence[tuple[float, float]]) -> Line:
    """A level line where there are too few points for any other."""
    count = len(points)
    mean_x = sum(x for x, _ in points) / max(count, 1)
    mean_y = sum(y for _, y in points) / max(count, 1)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if count < 3 or not spread:
        return Line(0.0, 0.0)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    residues = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    return Line(slope, math.sqrt(residues / (count - 2) / spread))


def lines_per_hour(samples: Sequence[Sample]) -> dict[str, Line]:
    """How much each measure rises in an hour."""
    return {name: fit([(sample.at_s / 3600, getattr(sample, name)) for sample in samples]) for name in MEASURES}


def problems(soaked: Soaked) -> list[str]:
    """What is not as it was before the storm; nothing of it depends on how fast anything went."""
    found = list(soaked.wrong)
    if soaked.before is None or soaked.after is None:
        return [*found, "it did not come to rest"]
    for name in OPEN:
        was, now = getattr(soaked.before, name), getattr(soaked.after, name)
        if now > was:
            found.append(f"{name}: {was} before, {now} after")
    return found


# ---------------------------------------------------------------- the storm


async def soak(
    seconds: float, warm_s: float, interval_s: float, seed: int, say: Callable[[str], None] = lambda _: None
) -> Soaked:
    """A warm-up storm, rest, the storm, rest. RuntimeError if the sidecar ends."""
    soaked = Soaked(seconds, seed, warm_s)
    engines = [Engine(num_blocks=16384) for _ in range(1 + PREFILL_ENGINES)]
    await start(engines)
    sidecar = None
    try:
        sidecar = await asyncio.to_thread(partial(Sidecar, *flags(engines)))
        say("warming up")
        await _storm(sidecar, engines, warm_s, random.Random(seed).random(), soaked)
        soaked.before = await _rest(sidecar, engines)
        say(f"at rest: {soaked.before}")
        watching = asyncio.create_task(_watch(sidecar, interval_s, soaked, say))
        try:
            await _storm(sidecar, engines, seconds, seed, soaked)
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
        soaked.after = await _rest(sidecar, engines)
        say(f"at rest: {soaked.after}")
    finally:
        if sidecar is not None:
            await asyncio.to_thread(sidecar.stop)
        for engine in engines:
            await engine.stop()
    return soaked


async def _until_ended(run: Coroutine[Any, Any, Soaked]) -> Soaked:
    """`run`, which ends the sidecar and all else that it started on SIGTERM too: an exception out of a signal's
    handler would end the loop before that."""
    task = asyncio.ensure_future(run)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


async def _storm(sidecar: Sidecar, engines: list[Engine], seconds: float, seed: float, soaked: Soaked) -> None:
    decode, *prefills = engines
    end = time.monotonic() + seconds

    def goes_on() -> bool:
        return time.monotonic() < end

    for engine in engines:
        engine.faults.clear()
        add_faults(engine, DECODE_FAULTS if engine is decode else PREFILL_FAULTS)
    storm = Storm(sidecar.port, engines, seed)
    await asyncio.gather(storm.run(goes_on), chaos(decode, prefills, goes_on))
    soaked.seen += storm.seen
    soaked.wrong += storm.wrong
    soaked.wrong += [f"an engine died: {engine.cause_of_death}" for engine in engines if not engine.alive]


async def _watch(sidecar: Sidecar, interval_s: float, soaked: Soaked, say: Callable[[str], None]) -> None:
    began = time.monotonic()
    while True:
        await asyncio.sleep(interval_s)
        sample = await asyncio.to_thread(look, sidecar, time.monotonic() - began)
        soaked.samples.append(sample)
        say(str(sample))


def look(sidecar: Sidecar, at_s: float) -> Sample:
    """One sample."""
    metrics = sidecar.metrics()
    return Sample(
        at_s=round(at_s, 1),
        sent=int(metrics("requests_total")),
        rss_mib=round(sidecar.rss_mib, 2),
        descriptors=sidecar.open_descriptors,
        threads=sidecar.threads,
        tasks=int(metrics("tasks")),
        inflight=int(metrics("inflight") + metrics("recompute_inflight")),
    )


async def _rest(sidecar: Sidecar, engines: list[Engine]) -> Sample:
    """What most of some looks see, once nothing should run any more: probes come and go."""
    await calm(engines)
    await asyncio.sleep(SETTLE_S)
    looks = []
    for _ in range(RESTING_LOOKS):
        looks.append(await asyncio.to_thread(look, sidecar, 0.0))
        await asyncio.sleep(0.25)
    usual = {name: statistics.mode(getattr(one, name) for one in looks) for name in OPEN}
    return replace(looks[-1], **usual)


# ---------------------------------------------------------------- the report


def verdicts(soaked: Soaked) -> list[tuple[str, str, str, str]]:
    """Measure, first and last values, slope, and a word."""
    rows = []
    quarter = max(1, len(soaked.samples) // 4)
    for name, line in lines_per_hour(soaked.samples).items():
        title, limit = MEASURES[name]
        values = [getattr(sample, name) for sample in soaked.samples]
        first, last = (sum(some) / len(some) for some in (values[:quarter], values[-quarter:]))
        word = "**RISES**" if line.rises_by(limit) else "flat"
        rise = f"{line.slope:+,.2f} ± {2 * line.error:,.2f} (limit {limit:g})"
        rows.append((title, f"{first:,.1f} → {last:,.1f}", rise, word))
    return rows


_INTRODUCTION = """# Soak{title}

Written by `python -m e2e.soak {real}--minutes {minutes:g} --seed {seed} --write`; do not edit. Taken {started},
revision {revision}.

{machine}

{minutes:,.0f} minutes of {what}:
{answers:,} answers, with those of {warm:,.0f} minutes before it, which are not measured.
"""
_SIMULATED = """a storm at full rate on simulated engines, with every sort of fault on both sides, engines frozen,
killed and started again meanwhile"""
_REAL = """faults on real engines, those of [faults.md](faults.md) one after the other as the seed draws them, under
a load that never pauses"""
_GOOD = """Every answer was one that the failure table allows, whole ones had the right text, and what was open is
closed.
"""


def markdown(soaked: Soaked, described: dict[str, Any], started: str, *, real: bool = False) -> str:
    """The report."""
    found = problems(soaked)
    lines = [
        _INTRODUCTION.format(
            title=" on real engines" if real else "",
            real="--real " if real else "",
            what=_REAL if real else _SIMULATED,
            minutes=soaked.seconds / 60,
            warm=soaked.warm_s / 60,
            seed=soaked.seed,
            started=started,
            revision=described["revision"],
            machine=machine.sentence(described),
            answers=sum(soaked.seen.values()),
        ),
        *table(
            ["measure", "mean of the first and the last quarter", "slope per hour ± two standard errors", ""],
            [list(row) for row in verdicts(soaked)],
        ),
    ]
    if soaked.before and soaked.after:
        names = ("rss_mib", *OPEN)
        rows = [[name, str(getattr(soaked.before, name)), str(getattr(soaked.after, name))] for name in names]
        lines += table(["at rest", "before", "after"], rows)
    lines += ["**Not as it should be:**", "", *(f"- {one}" for one in found), ""] if found else [_GOOD]
    lines += [f"![](soak{'-real' if real else ''}.svg)", "", "What became of the requests:", ""]
    return "\n".join([*lines, *table(["answer", "times"], [[k, f"{v:,}"] for k, v in soaked.seen.most_common()])])


def as_json(soaked: Soaked, described: dict[str, Any]) -> str:
    """All of it."""
    return json.dumps(
        {"machine": described, **vars(soaked), "samples": [asdict(one) for one in soaked.samples]}
        | {name: one and asdict(one) for name, one in (("before", soaked.before), ("after", soaked.after))}
    )


def plot(soaked: Soaked) -> str | None:
    """The curves."""
    titles = {name: title for name, (title, _) in MEASURES.items()} | {"inflight": "legs in flight"}
    return curves(
        "A sidecar in a storm of faults",
        [(title, [(s.at_s / 60, getattr(s, name)) for s in soaked.samples]) for name, title in titles.items()],
        "minutes",
    )


def main(arguments: list[str] | None = None) -> int:
    """0 if everything returned to where it was and every curve is flat."""
    parser = argparse.ArgumentParser(prog="python -m e2e.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="length of the storm")
    parser.add_argument("--warm-minutes", type=float, help="of the storm before it (default: a third)")
    parser.add_argument("--interval", type=float, default=5.0, help="seconds between two looks")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--real", action="store_true", help="the scenarios of `make faults` on real engines")
    parser.add_argument("--write", action="store_true", help="write docs/soak.md (soak-real.md), .json and .svg")
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the sidecar is ended then too
    if options.real and not wire.missing():
        wire.enter_namespace([sys.executable, "-m", "e2e.soak", *words])
    warm = options.minutes / 3 if options.warm_minutes is None else options.warm_minutes
    described = machine.describe({}, sys.executable)
    started = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")

    def say(text: str) -> None:
        print(f"soak: {text}", file=sys.stderr, flush=True)

    lengths = (options.minutes * 60, warm * 60, options.interval, options.seed, say)
    if options.real:
        from e2e.faults import days  # real engines' parts are not needed otherwise

        soaked = days.soak(*lengths)
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            soaked = runner.run(_until_ended(soak(*lengths)))
    text = markdown(soaked, described, started, real=options.real)
    print(text)
    if options.write:
        document = DOCUMENT.with_name("soak-real.md") if options.real else DOCUMENT
        document.write_text(text)
        document.with_suffix(".json").write_text(as_json(soaked, described) + "\n")
        if svg := plot(soaked):
            document.with_suffix(".svg").write_text(svg)
    flat = all(row[-1] == "flat" for row in verdicts(soaked))
    return int(not flat or bool(problems(soaked)))


if __name__ == "__main__":
    sys.exit(main())
