"""How a cost grows: slopes between neighbours, the last step that held, how many series there can be at most, and
the Markdown that shows them. It must not know how anything was measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from e2e.rounds import Spread, spread, table
from sidecar.exchange.apis import APIS
from sidecar.exchange.failures import PREFILL_STATUS_RELAYED, ROWS, Then
from sidecar.prefill.endpoints import MAX_DISCOVERED, MAX_ENDPOINTS

GAP_LIMIT_US = 5_000.0
"""More added latency at p99 than this is felt between tokens that come every 20 to 100 ms."""
FULL = 0.97
"""Of a core: what queues beyond this only grows."""
DELIVERED = 0.97
"""Of the chunks that the rate asks for."""

WAITED = 0.1
"""Of the time: beyond it a step that does not hold says more of what else ran on the machine."""
BUSY = "the machine was busy"

KEPT_REASONS = (
    *("disabled", "path", "shape", "no_target", "model", "no_usable_prefill", "incompatible", "short", "cached"),
    *("prefill_busy", "decode_idle", "cost"),
)
"""Why a prompt stays here (decision/guards.py, cost.py); tests/unit/bench holds these against the code."""
SENT_REASONS = ("on", "long", "cost", "decode_busy")
ENGINE_STATUSES = frozenset({200, 429, 500, 503}) | PREFILL_STATUS_RELAYED
"""What vLLM's API server answers with; a status beyond these adds a series for each reason that it meets."""


def slopes(costs: Mapping[int, Spread]) -> dict[int, float]:
    """Cost per unit of size between each size and the next smaller one that was measured, from the medians."""
    sizes = sorted(costs)
    return {
        large: (costs[large].median - costs[small].median) / (large - small)
        for small, large in itertools.pairwise(sizes)
    }


@dataclass(frozen=True)
class Step:
    """One rate that `streams` open answers were held at."""

    streams: int
    rate_hz: int
    chunks_per_second: float
    cpu_us: float
    core_share: float
    added_p99_us: float
    waited_share: float
    """Part of the time that proxy or rig could have run while their core ran something else."""
    trouble: str = ""

    @property
    def why_not(self) -> str:
        """Why it did not hold, or ""."""
        why = self._why_not
        return f"{why} ({BUSY})" if why and self.waited_share > WAITED else why

    @property
    def _why_not(self) -> str:
        if self.trouble:
            return self.trouble
        if self.core_share > FULL:
            return "the core is full"
        if self.chunks_per_second < DELIVERED * self.streams * self.rate_hz:
            return "not every chunk came through in time"
        if self.added_p99_us > GAP_LIMIT_US:
            return f"p99 {self.added_p99_us / 1000:,.0f} ms later"
        return ""


def last_that_held(steps: Iterable[Step]) -> Step | None:
    """Of steps in rising order the last before the first that did not hold; None if not even the first did."""
    held = None
    for step in steps:
        if step.why_not:
            break
        held = step
    return held


def most_series() -> dict[str, int]:
    """How many series the two families that grow can have: requests by label sets, and those by endpoint.

    An upper bound of products: refusals have their row's status, everything else may meet each of the engine's.
    """
    recomputed = {row.reason for row in ROWS if row.then in (Then.NEXT, Then.POLICY)} | {"no_usable_prefill"}
    refused = {row.reason for row in ROWS if row.then is not Then.CLOSE} | {"not_allowed", "bad_target"}
    answered = len(KEPT_REASONS) + len(SENT_REASONS) + len(recomputed)
    apis = len(APIS) + 1  # and "other"
    return {
        "requests": apis * (answered * (len(ENGINE_STATUSES) + 1) + len(refused)) + len(refused),
        "endpoints": 3 * (MAX_ENDPOINTS + MAX_DISCOVERED),
    }


# -- Markdown ---------------------------------------------------------------------------------------------------

Samples = Sequence[Mapping[str, Any]]

_INTRODUCTION = """# How cost grows

Written by `python -m e2e.bench.growth --write`; do not edit. Taken {started}, revision {revision}: {rounds}
alternating rounds, niceness {niceness}.

**Load average {load_start:.1f} at the start and {load_end:.1f} at the end, on {cores} cores**: what else
ran took its part of caches and of the clock, and of the delays above all.

{machine}
The sidecar had core {proxy_core}, stub engines and load core {rig_core}. {versions}.

Each number is the median of the rounds with the least and the greatest; a slope is taken between the medians of
two neighbours. CPU is that of all the proxy's threads.
"""


def over_rounds(samples: Samples, key: str) -> Spread | None:
    """Median, least and greatest of one number over the rounds that have it."""
    return spread([float(sample[key]) for sample in samples if sample.get(key) is not None])


def text(found: Spread | None, digits: int = 1, scale: float = 1.0) -> str:
    """A cell; `scale` multiplies."""
    if found is None:
        return "-"
    return Spread(found.median * scale, found.low * scale, found.high * scale).text(digits)


def _bytes(size: int) -> str:
    return f"{size // 1_000_000} MB" if size >= 1_000_000 else f"{size // 1000} KB"


def body_lines(bodies: Mapping[str, Mapping[int, Samples]]) -> list[str]:
    """`bodies[proxy][bytes]`: samples with `cpu_us`."""
    costs = {
        name: {size: found for size, samples in sizes.items() if (found := over_rounds(samples, "cpu_us"))}
        for name, sizes in bodies.items()
    }
    rises = {name: slopes(found) for name, found in costs.items()}
    head = ["body"]
    for name in bodies:
        head += [f"{name}, µs", "µs more per KB"]
    rows = []
    for size in sorted({size for sizes in bodies.values() for size in sizes}):
        row = [_bytes(size)]
        for name in bodies:
            rise = rises[name].get(size)
            row += [text(costs[name].get(size), 0), "-" if rise is None else f"{rise * 1000:.2f}"]
        rows.append(row)
    return [
        "## Body size",
        "",
        "CPU per request. `sidecar` sends each body twice (prefill, decode) and takes it once; `sidecar-local`",
        "(`--disagg off`) and nginx relay it once: nginx is the limit.",
        "",
        *table(head, rows),
    ]


_NEEDED = ("rss_mb", "descriptors")


def stream_lines(steps: Sequence[Sequence[Step]], pod: Samples) -> list[str]:
    """`steps`: of each round, in rising order for each number of streams; `pod`: 2,000 streams of 10 a second.
    A window with errors has no numbers, only its reason."""
    shapes = list(dict.fromkeys((step.streams, step.rate_hz) for one in steps for step in one))
    rows = []
    for streams, rate_hz in shapes:
        found = [step for one in steps for step in one if (step.streams, step.rate_hz) == (streams, rate_hz)]
        whole = [step for step in found if not step.trouble]
        held = sum(not step.why_not for step in found)
        reasons = dict.fromkeys(step.why_not for step in found if step.why_not)
        rows.append(
            [
                f"{streams:,}",
                str(rate_hz),
                text(spread([step.chunks_per_second for step in whole]), 0),
                text(spread([step.cpu_us for step in whole])),
                text(spread([step.core_share for step in whole]), 0, 100) + " %",
                text(spread([step.added_p99_us for step in whole]), 2, 0.001),
                text(spread([step.waited_share for step in found]), 0, 100) + " %",
                f"{held} of {len(found)}" + (f": {'; '.join(reasons)}" if reasons else ""),
            ]
        )
    head = [
        "streams",
        "chunks/s each",
        "chunks/s",
        "CPU µs/chunk",
        "share of the core",
        "added p99, ms",
        "waited",
        "held",
    ]
    most = max((streams for streams, _ in shapes), default=0)
    lasts = [last_that_held(step for step in one if step.streams == most) for one in steps]
    held_at = spread([step.chunks_per_second for step in lasts if step])
    reached = [f"{text(held_at, 0)} chunks a second"] if held_at else []
    if None in lasts:
        reached.append(f"in {lasts.count(None)} of {len(lasts)} rounds not even the first step held")
        if any(step.waited_share > WAITED for one in steps for step in one):
            reached.append(BUSY)
    needs = [text(over_rounds(pod, "core_share"), 2), *(text(over_rounds(pod, key), 0) for key in _NEEDED)]
    return [
        "## Streams",
        "",
        f"The rate of the {most:,} streams rises until a step has twice not held: the core is full (beyond",
        f"{FULL:.0%}), fewer than {DELIVERED:.0%} of the chunks come through, or the p99 of their delay is more",
        f"than {GAP_LIMIT_US / 1000:g} ms above the median of the same engine without a proxy. *Waited*: how much",
        "of the time sidecar or stubs could have run while their core ran something else. Chunks then come in",
        "heaps, late and each the cheaper. What a core sustains is the last step that held in a round.",
        "",
        *table(head, rows),
        f"**What one core sustains:** {'; '.join(reached)}.",
        "",
        f"**A pod with 2,000 streams of 10 tokens a second** needs {needs[0]} of a core, {needs[1]} MB of",
        f"memory and {needs[2]} descriptors.",
        "",
    ]


@dataclass(frozen=True)
class Pauses:
    """What the process did nothing but tidy its memory for."""

    cause: str
    count: int
    seconds: float
    """All of them together."""


def pause_lines(pauses: Sequence[Pauses], window_s: float) -> list[str]:
    """`pauses`: of a process to which 2,000 streams came, and stayed for `window_s`."""
    rows = [
        [one.cause, str(one.count), f"{one.seconds / one.count * 1000:.1f}"] for one in pauses if one.count
    ] or [["none", "0", "-"]]
    return [
        "### Pauses",
        "",
        "Times at which no token is relayed because the process tidies its memory, while 2,000 streams begin",
        f"and for {window_s:.0f} s of them (`pd_sidecar_pause_seconds`).",
        "",
        *table(["cause", "times", "mean, ms"], rows),
    ]


def endpoint_lines(known: Mapping[int, Samples], choices: Mapping[int, Samples]) -> list[str]:
    """`known[endpoints]`: samples of a sidecar that knows so many; `choices[endpoints]`: of the choice alone."""
    rows = []
    for count in sorted(choices):
        one, idle = choices[count], known.get(count, ())
        rows.append(
            [
                str(count),
                *(text(over_rounds(one, key)) for key in ("plain_us", "conversation_us", "busy_us")),
                text(over_rounds(idle, "cpu_share"), 2, 100) + " %",
                text(over_rounds(idle, "rss_mb")),
                text(over_rounds(idle, "descriptors"), 0),
                text(over_rounds(idle, "series"), 0),
                text(over_rounds(idle, "scrape_cpu_ms"), 2),
                text(over_rounds(idle, "scrape_kb"), 0),
            ]
        )
    head = ["endpoints", "choice, µs", "choice for a conversation, µs", "how much waits, all busy, µs"]
    head += ["CPU when idle", "RSS, MB", "descriptors", "series", "CPU of a scrape, ms", "scrape, KB"]
    lines = [
        "## Endpoints",
        "",
        "So many prefill endpoints from `--discovery file:`, each with a side channel that answers, no request,",
        "`--warm-up off`. The choice is timed alone. A scrape is OpenMetrics, Prometheus' first choice.",
        "",
        *table(head, rows),
    ]
    rises = []
    for label, samples, key, unit, scale in (
        ("a choice", choices, "plain_us", "µs", 1.0),
        ("a choice for a conversation", choices, "conversation_us", "µs", 1.0),
        ("what waits, all busy", choices, "busy_us", "µs", 1.0),
        ("CPU when idle", known, "cpu_share", "‰ of a core", 1000.0),
        ("RSS", known, "rss_mb", "KB", 1000.0),
        ("descriptors", known, "descriptors", "", 1.0),
        ("a scrape", known, "scrape_cpu_ms", "µs", 1000.0),
        ("its size", known, "scrape_kb", "bytes", 1000.0),
    ):
        costs = {count: found for count, rounds in samples.items() if (found := over_rounds(rounds, key))}
        rises.append([label, unit, *(f"{rise * scale:.3f}" for _, rise in sorted(slopes(costs).items()))])
    counts = sorted(choices)
    spans = [f"{small} to {large}" for small, large in itertools.pairwise(counts)]
    return [*lines, "More for each further endpoint:", "", *table(["", "unit", *spans], rises)]


def series_lines(scrapes: Mapping[int, Samples]) -> list[str]:
    """`scrapes[series]`: what writing out so many takes."""
    rows = [
        [
            f"{count:,}",
            text(over_rounds(samples, "cpu_ms"), 2),
            text(over_rounds(samples, "turn_ms"), 2),
            text(over_rounds(samples, "kb"), 0),
        ]
        for count, samples in sorted(scrapes.items())
    ]
    most = most_series()
    costs = {count: found for count, samples in scrapes.items() if (found := over_rounds(samples, "cpu_ms"))}
    rises = [rise * 1000 for rise in slopes(costs).values()]
    told = f" Between neighbours {min(rises):.1f} to {max(rises):.1f} µs for each series." if rises else ""
    return [
        "## Label sets",
        "",
        "An observer filled with so many series and written out as OpenMetrics. Its longest turn is what a request",
        f"may have to wait for.{told}",
        "",
        *table(["series", "CPU of a scrape, ms", "longest turn, ms", "scrape, KB"], rows),
        "What clients send is no label value. The families that grow, and their bounds by the tables of the code:",
        "",
        f"- `requests_total`: at most {most['requests']:,} series, of {len(APIS) + 1} APIs, the reasons of guards,",
        f"  rules and failure table, and the {len(ENGINE_STATUSES)} statuses that vLLM answers with or none. Any",
        "  other status of an engine adds one for each reason that it meets.",
        f"- `breaker_state`, `prefill_inflight` and `prefill_blocked`: at most {most['endpoints']:,}, three for",
        f"  each of {MAX_DISCOVERED:,} discovered endpoints and {MAX_ENDPOINTS} that headers brought; three more",
        "  for each `--prefill`.",
        "",
    ]


def markdown(described: Mapping[str, Any], parts: Iterable[list[str]]) -> str:
    """The whole report: the introduction, which `described` fills, and the parts' lines."""
    lines = [_INTRODUCTION.format_map(described)]
    for part in parts:
        lines += part
    return "\n".join(lines)
