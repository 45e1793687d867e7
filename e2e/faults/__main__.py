"""`make faults`: plays the scenarios on real engines, several seeds one after the other, and says what holds.

    python -m e2e.faults                          # all, three seeds
    python -m e2e.faults --only half-open --seed 7 --rounds 1
    python -m e2e.faults --write                  # and writes docs/faults.md

Ends with 1 if anything does not hold. The network's scenarios need root, /dev/net/tun and iproute2.
"""

from __future__ import annotations

import argparse
import datetime
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from e2e import machine
from e2e.engines import Place
from e2e.faults import clock, wire
from e2e.faults.scenarios import SCENARIOS
from e2e.faults.stage import Scenario, Verdict, perform
from e2e.pair import LEASE_S
from e2e.rig import Rig
from e2e.rounds import table

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "faults.md"
QUICK = ("side-channel-blocked", "data-ports-blocked", "half-open", "clock-steps", "aborts")
"""What no other end-to-end test does, and the quickest of it."""


def chosen(only: Sequence[str], *, quick: bool) -> list[Scenario]:
    """In their order; all where none is named. SystemExit for a name that is none."""
    for name in only:
        if name not in SCENARIOS:
            sys.exit(f"faults: no scenario {name!r}; there are {', '.join(SCENARIOS)}")
    wanted = only or (QUICK if quick else SCENARIOS)
    return [one for name, one in SCENARIOS.items() if name in wanted]


def play(scenarios: Sequence[Scenario], seeds: Sequence[int], *, with_wire: bool) -> list[Verdict]:
    """Every scenario with every seed, on one pair of engines."""
    verdicts = []
    with ExitStack() as stack:
        line = stack.enter_context(wire.Wire(seeds[0])) if with_wire else None
        place = Place(wire.FAR, line.netns) if line is not None else None
        rig = stack.enter_context(Rig("tiny", lease_seconds=LEASE_S, prefill_place=place))
        for seed in seeds:
            for one in scenarios:
                verdict = perform(one, rig, line, seed)
                print(f"{verdict.line} [{verdict.seconds:.0f} s]", flush=True)
                verdicts.append(verdict)
    return verdicts


_INTRODUCTION = """# Faults on real engines

Written by `python -m e2e.faults {words}`; do not edit. Taken {started}, revision {revision}; {minutes:.0f} minutes.

{machine}

One prefill and one decode vLLM engine on CPU (a tiny model), the prefill engine in a network namespace of its own
behind a wire that loses, delays and drops what a scenario wants. Two sidecars, one that recomputes and one with
`--on-prefill-failure fail`, have 2 to 8 clients that ask one question after the other by four APIs, streamed or
not. Every scenario ran with the seeds {seeds}, which choose moments, sizes and questions.

What must hold after each of them: every answer has the text of a plain run, or a status and reason with a row in
[failures.md](failures.md), which only the second sidecar may send unless the decode engine itself was killed; none
comes later than the bound; prompts are prefilled remotely again within the next bound; then gauges of legs in
flight read 0, neither engine holds a KV block, descriptors and tasks are as many as before (but for a connection or
two of probes), SIGTERM ends with 0, and the log has no traceback.
"""


def markdown(verdicts: Sequence[Verdict], missing: Sequence[str], **facts: object) -> str:
    """The report."""
    rows = []
    for name in dict.fromkeys(one.name for one in verdicts):
        runs = [one for one in verdicts if one.name == name]
        scenario = SCENARIOS[name]
        held = sum(not one.wrong for one in runs)
        answers = sum(sum(one.outcomes.values()) for one in runs)
        slowest, again = max(one.slowest_s for one in runs), max(one.again_s for one in runs)
        rows.append(
            [
                f"`{name}`",
                scenario.promise,
                f"{answers:,}",
                f"{slowest:.1f} s ({scenario.within_s:g})",
                f"{again:.1f} s ({scenario.again_s:g})",
                f"holds, {held} of {held}" if held == len(runs) else f"**BROKEN**, holds {held} of {len(runs)}",
            ]
        )
    head = ["scenario", "what must hold", "answers", "slowest (bound)", "remote again (bound)", "verdict"]
    lines = [_INTRODUCTION.format(**facts), *table(head, rows)]
    if missing:
        lines += ["Not run: " + "; ".join(missing) + ".", ""]
    seen = sorted({outcome for one in verdicts for outcome in one.outcomes})
    lines += ["What became of the requests: " + ", ".join(f"`{one}`" for one in seen) + ".", ""]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if all that was played holds."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m e2e.faults", description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1, help="of the first round")
    parser.add_argument("--rounds", type=int, default=3, help="each with the next seed")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="a scenario (repeatable)")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--list", action="store_true", help="the scenarios, and what must hold")
    parser.add_argument("--write", action="store_true", help=f"write docs/{DOCUMENT.name}")
    options = parser.parse_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended then too
    scenarios = chosen(options.only, quick=options.quick)
    if options.list:
        for one in scenarios:
            print(f"{one.name}: {one.promise}")
        return 0
    lacking = wire.missing()
    if not lacking:
        wire.enter_namespace([sys.executable, "-m", "e2e.faults", *words])
    missing = [f"`{one.name}` ({lacking})" for one in scenarios if lacking and one.network]
    if clock.compiler() is None:
        missing += [f"`{one.name}` (needs a C compiler)" for one in scenarios if one.name == "clock-steps"]
    for text in missing:
        print(f"not run: {text}", flush=True)
    scenarios = [one for one in scenarios if not any(f"`{one.name}`" in text for text in missing)]
    if not scenarios:
        return 1
    began = time.monotonic()
    started = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    described = machine.describe({}, sys.executable)
    seeds = [options.seed + number for number in range(options.rounds)]
    verdicts = play(scenarios, seeds, with_wire=not lacking)
    broken = [one for one in verdicts if one.wrong]
    print(f"{len(verdicts) - len(broken)} of {len(verdicts)} hold", flush=True)
    if options.write:
        text = markdown(
            verdicts,
            missing,
            words=" ".join(words),
            started=started,
            revision=described["revision"],
            machine=machine.sentence(described),
            minutes=(time.monotonic() - began) / 60,
            seeds=", ".join(map(str, seeds)),
        )
        DOCUMENT.write_text(text, encoding="utf-8")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
