"""Samples to numbers: percentiles over all gaps and requests of all rounds, ratios, verdicts. It must not know how
anything was measured or is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from e2e.latency.numbers import Round, Verdict, gaps_ms, percentile
from e2e.rounds import Spread

GAP_LIMIT = 1.3
"""p99 of the gaps, to always remote."""
EQUAL = 0.05
"""Within this share neither of two is called better."""
TTFT, GAP = "ttft", "gap"


def values(sample: dict[str, Any], name: str, kind: str = "") -> list[float]:
    """TTFTs of all requests or of one kind, or all gaps between tokens; ms."""
    requests = [request for request in sample["requests"] if not kind or request["kind"] == kind]
    if name == TTFT:
        return [request["ttft_ms"] for request in requests if request["ttft_ms"] is not None]
    return [gap for request in requests for gap in gaps_ms(request, sample["window_s"])]


def _samples(rounds: Sequence[Round], *modes: str) -> list[list[dict[str, Any]]]:
    """Of each way, from the rounds that have all of them."""
    return [[samples[mode] for samples in rounds if all(one in samples for one in modes)] for mode in modes]


def pooled(rounds: Sequence[Round], mode: str, name: str, percent: float, kind: str = "") -> Spread | None:
    """The percentile over all rounds together, and the least and greatest of single rounds. None of nothing."""
    [samples] = _samples(rounds, mode)
    single = [percentile(found, percent) for one in samples if (found := values(one, name, kind))]
    every = [value for one in samples for value in values(one, name, kind)]
    return Spread(percentile(every, percent), min(single), max(single)) if every else None


def ratio(rounds: Sequence[Round], mode: str, against: str, name: str, percent: float) -> Spread | None:
    """Of the percentiles over all rounds that have both, and the least and greatest within a round."""
    both = [samples for samples in rounds if mode in samples and against in samples]
    top, bottom = pooled(both, mode, name, percent), pooled(both, against, name, percent)
    if top is None or bottom is None or not bottom.median:
        return None
    within = []
    for samples in both:
        one, other = pooled([samples], mode, name, percent), pooled([samples], against, name, percent)
        if one is not None and other is not None and other.median:
            within.append(one.median / other.median)
    return Spread(top.median / bottom.median, min(within), max(within))


def local_share(rounds: Sequence[Round], mode: str, kind: str = "") -> float | None:
    """Share of the requests that were computed by the decode engine."""
    [samples] = _samples(rounds, mode)
    decided = [
        request["decision"].startswith("local")
        for one in samples
        for request in one["requests"]
        if not kind or request["kind"] == kind
    ]
    return sum(decided) / len(decided) if decided else None


PROMISED = ((GAP, 99, GAP_LIMIT), (TTFT, 50, 1.0), (TTFT, 99, 1.0))
"""(what, percentile, limit) of `auto` to `remote`."""
COMPARED = ((TTFT, 50), (TTFT, 99), (GAP, 99))
TITLES = {TTFT: "TTFT", GAP: "gap between tokens"}


def verdicts(rounds: Sequence[Round]) -> list[Verdict]:
    """Of `auto` to always remote."""
    both = [samples for samples in rounds if "auto" in samples and "remote" in samples]
    troubles = [samples[mode]["trouble"] for samples in both for mode in ("auto", "remote")]
    return [
        Verdict(
            f"p{percent} {TITLES[name]}, auto ÷ always remote",
            limit,
            "",
            ratio(rounds, "auto", "remote", name, percent),
            len(both),
            next(filter(None, troubles), ""),
        )
        for name, percent, limit in PROMISED
    ]


def comparison(rounds: Sequence[Round], against: str) -> list[tuple[str, int, Spread | None]]:
    """`auto` to a rule, by each number."""
    return [(name, percent, ratio(rounds, "auto", against, name, percent)) for name, percent in COMPARED]


def word(measured: Spread | None) -> str:
    """`auto` against another, of a number of which less is better."""
    if measured is None:
        return "not measured"
    if abs(measured.median - 1) <= EQUAL:
        return "equal"
    return "better" if measured.median < 1 else "worse"
