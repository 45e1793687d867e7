"""`python -m e2e.sim`: a fleet on paper. Compares decision rules on one trace, at sizes that no laptop holds.

The engines' times are models (`e2e/sim/engines.py`, from published fits); what decides is the sidecar's own code.
So the rows of one table can be compared with each other, and with nothing else.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from e2e.sim.fleet import OURS, RULES, Fleet, Seen
from e2e.sim.trace import mixed

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "fleet.md"
FLEETS = ((1, 1), (10, 4), (100, 40), (500, 200))
PER_POD_AND_SECOND = 1.5
SECONDS = 120.0
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
    joined = Fleet(OURS, decode, prefill, seed=seed, join_at=seconds / 2).run(trace)
    lines += [
        "",
        "## Half of the prefill engines die; one more joins",
        "",
        f"{decode} decode and {prefill} prefill engines, of which half die at once:",
        f"of {len(trace):,} requests {lost.recomputed:,} were recomputed, at most {lost.most_recomputes} at a time",
        f"on one pod (the budget is 4), {lost.refused:,} told to come back; TTFT p99 {worst:.2f} s.",
        f"An endpoint that joins gets {joined.share_of_new:.2f} times its fair share in its first ten seconds.",
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
