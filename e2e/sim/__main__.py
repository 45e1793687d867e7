"""`python -m e2e.sim`: a fleet on paper. Compares decision rules on one trace, at sizes that no laptop holds.

The engines' times are models (`e2e/sim/engines.py`, from published fits); what decides is the sidecar's own code.
So the rows of one table can be compared with each other, and with nothing else.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from e2e.sim.fleet import NEW_S, OURS, RULES, Fleet, Seen
from e2e.sim.trace import mixed

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "fleet.md"
FLEETS = ((1, 1), (10, 4), (100, 40), (500, 200))
PER_POD_AND_SECOND = 1.5
SECONDS = 120.0
JOIN_EVERY_S = 5.0
JOIN_RUNS = 5
"""In its first ten seconds an endpoint of the largest fleet gets about ten prompts: of one, nothing is learnt."""
TTFT_GOAL_S, GAP_GOAL_S = 1.0, 0.1


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


def gap_quantile(gaps: Counter[float], share: float) -> float:
    """Seconds that this share of all gaps between tokens does not exceed."""
    left = sum(gaps.values()) * share
    for seconds in sorted(gaps):
        left -= gaps[seconds]
        if left <= 0:
            return seconds
    return max(gaps, default=0.0)


def row(name: str, seen: Seen, requests: int) -> str:
    in_time = sum(1 for seconds in seen.ttft if seconds <= TTFT_GOAL_S) / max(requests, 1)
    smooth = sum(count for gap, count in seen.gaps.items() if gap <= GAP_GOAL_S) / max(sum(seen.gaps.values()), 1)
    return (
        f"| {name} | {seen.remote / max(requests, 1):.0%} | {1000 * quantile(seen.ttft, 0.5):,.0f} "
        f"| {1000 * quantile(seen.ttft, 0.99):,.0f} | {1000 * gap_quantile(seen.gaps, 0.99):,.0f} "
        f"| {1000 * gap_quantile(seen.gaps, 0.9999):,.0f} | {in_time:.1%} | {smooth:.2%} |"
    )


def joins(seconds: float) -> tuple[float, ...]:
    """When endpoints join a run of this length, so that each one's first seconds lie within."""
    count = int((seconds - 2 * NEW_S) // JOIN_EVERY_S) + 1
    return tuple(NEW_S + number * JOIN_EVERY_S for number in range(count)) or (seconds / 2,)


def chance(count: int, expected: float) -> tuple[float, float]:
    """The 95% confidence interval of `count` over `expected` (normal, of a Poisson count)."""
    spread = 1.96 * count**0.5
    return ((count - spread) / expected, (count + spread) / expected) if expected else (0.0, 0.0)


def joined(decode: int, prefill: int, seconds: float, seed: int) -> Seen:
    """What endpoints get that join a fleet one by one, over `JOIN_RUNS` runs."""
    when = joins(seconds)
    found = Seen()
    for run in range(seed, seed + JOIN_RUNS):
        fleet = Fleet(OURS, decode, prefill + len(when), seed=run, join_at=when)
        seen = fleet.run(mixed(decode, PER_POD_AND_SECOND, seconds, run))
        found.new_prompts += seen.new_prompts
        found.new_fair += seen.new_fair
    return found


def report(fleets: tuple[tuple[int, int], ...] = FLEETS, seconds: float = SECONDS, seed: int = 1) -> str:
    lines = [
        "# A fleet on paper",
        "",
        "Written by `python -m e2e.sim --write`. A discrete-event simulation: each decode pod runs the sidecar's",
        "own decision rules, breakers, budget and endpoint choice; engines are models, with the times of published",
        f"fits (`e2e/sim/engines.py`). {PER_POD_AND_SECOND:g} requests a second and decode pod for {seconds:g} s:",
        "half short chats, a third long documents, a sixth later turns of a conversation. All rules see the same",
        f"trace. *In time*: first token within {TTFT_GOAL_S:g} s. *Smooth*: gaps between tokens of at most",
        f"{GAP_GOAL_S:g} s.",
    ]
    for decode, prefill in fleets:
        trace = mixed(decode, PER_POD_AND_SECOND, seconds, seed)
        lines += [
            "",
            f"## {decode} decode, {prefill} prefill",
            "",
            "| rule | remote | TTFT p50, ms | TTFT p99, ms | gap p99, ms | gap p99.99, ms | in time | smooth |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for rule in RULES:
            lines.append(row(rule, Fleet(rule, decode, prefill, seed=seed).run(trace), len(trace)))
    decode, prefill = fleets[-1]
    trace = mixed(decode, PER_POD_AND_SECOND, seconds, seed)
    lost = Fleet(OURS, decode, prefill, seed=seed, fail_at=seconds / 2).run(trace)
    worst = quantile(lost.ttft, 0.99)
    new = joined(decode, prefill, seconds, seed)
    low, high = chance(new.new_prompts, new.new_fair)
    lines += [
        "",
        "## Half of the prefill engines die; others join",
        "",
        f"{decode} decode and {prefill} prefill engines, of which half die at once:",
        f"of {len(trace):,} requests {lost.recomputed:,} were recomputed, at most {lost.most_recomputes} at a time",
        f"on one pod (the budget is 4), {lost.refused:,} told to come back; TTFT p99 {worst:.2f} s.",
        "",
        f"{len(joins(seconds))} prefill engines join these one by one, in each of {JOIN_RUNS} runs. In its first",
        f"{NEW_S:g} s an endpoint gets {new.share_of_new:.2f} times its fair share",
        f"(95% confidence: {low:.2f} to {high:.2f}, from {new.new_prompts:,} prompts).",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m e2e.sim", description="decision rules on a simulated fleet")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of simulated time (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true", help=f"write docs/{DOCUMENT.name}")
    options = parser.parse_args()
    text = report(seconds=options.seconds, seed=options.seed)
    sys.stdout.write(text)
    if options.write:
        DOCUMENT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
