"""Samples to numbers: percentiles, goodput, ratios within rounds, verdicts. It must not know how anything was
measured or is shown.

Percentiles are interpolated between the two nearest values; of few values the 99th is close to the greatest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from e2e.latency.scenarios import LONG, STREAM
from e2e.rounds import Spread, spread

Request = dict[str, Any]
Round = dict[str, dict[str, Any]]
"""Samples (as JSON has them) by mode."""


@dataclass(frozen=True)
class Targets:
    """What a request must keep to count as good: its TTFT, and the 99th percentile of its own gaps."""

    ttft_ms: float
    itl_ms: float


def percentile(values: Sequence[float], percent: float) -> float:
    """ValueError of nothing."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    below = int(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)


def gaps_ms(request: Request, window_s: float) -> list[float]:
    """Between one token and the next, for the gaps that reach into the window."""
    return [b - a for a, b in pairwise(request["token_ms"]) if b > 0 and a < window_s * 1000]


def _gaps(sample: dict[str, Any]) -> list[float]:
    """Of the streams where there are any: they are who is disturbed; else of every request."""
    streams = [request for request in sample["requests"] if request["kind"] == STREAM]
    chosen = streams or sample["requests"]
    return [gap for request in chosen for gap in gaps_ms(request, sample["window_s"])]


def _arrivals(sample: dict[str, Any]) -> list[Request]:
    """The requests that began in the window."""
    return [request for request in sample["requests"] if request["kind"] != STREAM]


def is_good(request: Request, window_s: float, targets: Targets) -> bool:
    """Whether a request kept the targets. A stream that runs all the time has no TTFT in the window."""
    if request["error"]:
        return False
    if request["kind"] != STREAM and (request["ttft_ms"] is None or request["ttft_ms"] > targets.ttft_ms):
        return False
    gaps = gaps_ms(request, window_s)
    return not gaps or percentile(gaps, 99) <= targets.itl_ms


def metric(sample: dict[str, Any], name: str, targets: Targets) -> float | None:
    """One number of one sample; None where there is nothing to take it from.

    `ttft_p50` ..., `itl_p99`, `itl_max`, `e2e_p90` in ms; `goodput` as a share of all requests;
    `tokens_computed`, `tokens_cached`, `tokens_pulled` of the decode engine, `tokens_prefilled` of the other one;
    `failed` requests.
    """
    tokens = {
        "tokens_computed": sample["decode_tokens"]["local_compute"],
        "tokens_cached": sample["decode_tokens"]["local_cache_hit"],
        "tokens_pulled": sample["decode_tokens"]["external_kv_transfer"],
        "tokens_prefilled": sample["prefill_tokens"],
    }
    if name in tokens:
        return float(tokens[name])
    if name == "failed":
        return float(sum(bool(request["error"]) for request in sample["requests"]))
    if name == "goodput":
        good = [is_good(request, sample["window_s"], targets) for request in sample["requests"]]
        return sum(good) / len(good) if good else None
    kind, _, at = name.partition("_")
    if kind == "itl":
        values = _gaps(sample)
    else:
        values = [request[f"{kind}_ms"] for request in _arrivals(sample) if request[f"{kind}_ms"] is not None]
    return percentile(values, 100 if at == "max" else float(at.removeprefix("p"))) if values else None


def series(rounds: Iterable[Round], mode: str, name: str, targets: Targets) -> Spread | None:
    """A metric over the rounds."""
    values = [metric(samples[mode], name, targets) for samples in rounds if mode in samples]
    return spread([value for value in values if value is not None])


def ratio(rounds: Iterable[Round], mode: str, against: str, name: str, targets: Targets) -> Spread | None:
    """A metric over the rounds, each divided by the other way's in the *same* round."""
    quotients = []
    for samples in rounds:
        if mode in samples and against in samples:
            top, bottom = metric(samples[mode], name, targets), metric(samples[against], name, targets)
            if top is not None and bottom:
                quotients.append(top / bottom)
    return spread(quotients)


def overheads_ms(results: dict[str, Any]) -> list[float]:
    """The sidecar's own share of the TTFT of every remote request of every scenario, as
    `pd_sidecar_overhead_seconds` has it. Runs in which an engine is killed don't count: what is waited for there is
    not the sidecar."""
    return [
        request["sidecar_overhead_ms"]
        for result in results.values()
        for samples in result["rounds"]
        for mode, sample in samples.items()
        if mode != "fallback"
        for request in sample["requests"]
        if request["decision"].startswith("remote") and "sidecar_overhead_ms" in request
    ]


# ---------------------------------------------------------------- what must be shown


@dataclass(frozen=True)
class Verdict:
    """One thing that must be shown, and whether it was."""

    what: str
    limit: float
    unit: str
    """Empty for a ratio."""
    measured: Spread | None
    values: int
    """Rounds, or requests."""
    trouble: str = ""
    """Why the measurement does not show what it should."""

    @property
    def holds(self) -> bool | None:
        """None where nothing was measured."""
        return None if self.measured is None else not self.trouble and self.measured.median <= self.limit

    @property
    def word(self) -> str:
        """For the report."""
        if self.holds is None:
            return "not measured"
        return "holds" if self.holds else "**DOES NOT HOLD**" + (f": {self.trouble}" if self.trouble else "")


RATIOS = (
    ("interference", "local", 0.15),
    ("interference", "held", 1.3),
    ("interference", "quiet", 1.3),
    ("one-token", "local", 0.15),
    ("one-token", "quiet", 1.3),
)
"""p99 of the gaps between tokens of the running streams, remote's against another way's: (scenario, way, limit)."""
OVERHEADS = ((50, 1.0), (99, 3.0))
"""Percentile of the sidecar's own share of TTFT, and its limit in ms."""
_TITLES = {
    "local": "local",
    "held": "the same answers, nothing to prefill",
    "quiet": "nothing arriving",
}


def verdicts(results: dict[str, Any], targets: Targets) -> list[Verdict]:
    """`results` by scenario, as JSON has them."""
    found = []
    for scenario, against, limit in RATIOS:
        rounds: list[Round] = results.get(scenario, {"rounds": []})["rounds"]
        measured = ratio(rounds, "remote", against, "itl_p99", targets)
        both = [samples for samples in rounds if "remote" in samples and against in samples]
        troubles = [samples[name]["trouble"] for samples in both for name in ("remote", against)]
        found.append(
            Verdict(
                f"{scenario}: p99 gap between tokens, remote ÷ {_TITLES[against]}",
                limit,
                "",
                measured,
                len(both),
                next(filter(None, troubles), ""),
            )
        )
    shares = overheads_ms(results)
    for percent, limit in OVERHEADS:
        value = percentile(shares, percent) if shares else None
        found.append(
            Verdict(
                f"the sidecar's own share of TTFT, p{percent}",
                limit,
                "ms",
                None if value is None else Spread(value, min(shares), max(shares)),
                len(shares),
            )
        )
    return found


def long_prompts(sample: dict[str, Any]) -> list[Request]:
    """The arrivals of the interference case."""
    return [request for request in sample["requests"] if request["kind"] == LONG]
