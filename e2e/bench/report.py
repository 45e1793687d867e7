"""Samples to numbers with their spread, ratios within rounds, targets, and the Markdown that shows them.

It must not know how anything was measured. Nothing is left out: a proxy that failed has a row that says so.
"""

from __future__ import annotations

from typing import Any

from e2e import machine
from e2e.bench.cases import TARGETS, Case, Target
from e2e.bench.measure import DIRECT, Result
from e2e.bench.proxies import SPECS
from e2e.rounds import Spread, or_dash, spread, table

Round = dict[str, dict[str, Any]]
_REFERENCES = ("vllm-router", "nginx", "baseline")

_INTRODUCTION = """# Benchmark

Written by `make bench`; do not edit. Taken {started}, revision {revision}, {mode} mode: {rounds} alternating rounds
of {window_s:g} s each, niceness {niceness}.

{machine}
The proxy had core {proxy_core}, stub engines and load core {rig_core}; load average at the start {load:.1f}.
{versions}.

Each number is the median of the rounds with the least and the greatest. A ratio is taken within a round;
shown is the median of the rounds' ratios. CPU is that of all the proxy's processes and threads. A P/D request
is three messages through a P/D router (client, prefill, decode) and one through nginx and Envoy, which relay
to the decode stub alone: they are the limit, not competitors. Added latency is the percentile through the
proxy less the median of calling the same stubs directly on one connection; with many connections in a closed
loop it is mostly queueing, the inverse of throughput.
"""


def value(case: Case, samples: Round, name: str, metric: str) -> float | None:
    """One number of one proxy in one round.

    Added latency is a percentile through the proxy less the *median* of calling the same engines directly on one
    connection (both for a P/D router, decode alone for a relay): the direct p99 is only the rig's own noise.
    """
    sample = samples.get(name)
    if sample is None:
        return None
    if metric.startswith("added_"):
        direct = samples.get(DIRECT)
        if direct is None:
            return None
        one_leg = case.kind == "closed" and SPECS[name].legs == 1
        base = direct["one_leg_p50_us"] if one_leg else direct["p50_us"]
        return float(sample[metric.removeprefix("added_")] - base)
    if metric == "errors":
        return float(sample["errors"] + sample["hung"] + sample["streams_missing"])
    found = sample.get(metric)
    return None if found is None else float(found)


def series(result: Result, name: str, metric: str) -> Spread | None:
    """A metric over the rounds."""
    values = [value(result.case, samples, name, metric) for samples in result.rounds]
    return spread([number for number in values if number is not None])


def ratio(result: Result, name: str, against: str, metric: str) -> Spread | None:
    """A metric over the rounds, each divided by the other proxy's in the *same* round."""
    quotients = []
    for samples in result.rounds:
        top, bottom = value(result.case, samples, name, metric), value(result.case, samples, against, metric)
        if top is not None and bottom is not None and bottom > 0:
            quotients.append(top / bottom)
    return spread(quotients)


def judge(target: Target, results: dict[str, Result]) -> dict[str, Any]:
    """A target with what was measured; `met` is None where nothing was."""
    result = results.get(target.case)
    measured = None
    if result is not None:
        if target.against:
            measured = ratio(result, target.proxy, target.against, target.metric)
        else:
            measured = series(result, target.proxy, target.metric)
    return {
        "stage": target.stage,
        "case": target.case,
        "metric": target.metric,
        "proxy": target.proxy,
        "against": target.against,
        "limit": target.limit,
        "measured": measured and {"median": measured.median, "low": measured.low, "high": measured.high},
        # One round with an error is an error; a median would hide it.
        "met": measured and (measured.high if target.metric == "errors" else measured.median) <= target.limit,
    }


_WORDS = {
    "cpu_us": "proxy CPU",
    "added_p50_us": "added p50, µs",
    "added_p99_us": "added p99, µs",
    "rss_mb": "RSS, MB",
    "peak_bodies": "peak memory, bodies",
    "errors": "errors",
}


def _remarks(result: Result, name: str) -> str:
    notes = []
    if name in result.failed:
        notes.append(result.failed[name].replace("|", "/").replace("\n", " ")[:160])
    troubles = [samples[name]["trouble"] for samples in result.rounds if samples.get(name, {}).get("trouble")]
    if troubles:
        notes.append(f"{len(troubles)} of {len(result.rounds)} rounds: {troubles[0]}")
    waited = [
        samples[name]["proxy_waited_s"] / samples[name]["wall_s"] for samples in result.rounds if name in samples
    ]
    if waited and max(waited) > 0.1:
        notes.append(f"waited for its core up to {max(waited):.0%} of the time")
    rig = [samples[name]["rig_cpu_s"] / samples[name]["wall_s"] for samples in result.rounds if name in samples]
    if rig and max(rig) > 0.9 and result.case.kind != "memory":
        notes.append("the rig was the limit")
    return "; ".join(notes)


def _references(names: list[str]) -> list[str]:
    return [name for name in _REFERENCES if name in names]


def _work_rows(result: Result, names: list[str], unit: str) -> tuple[list[str], list[list[str]]]:
    references = _references(names)
    head = ["proxy", f"CPU µs/{unit}", *(f"to {name}'s" for name in references)]
    head += [f"{unit}s/s", "added p50 µs", "added p90 µs", "added p99 µs", "remarks"]
    rows = [
        [
            name,
            or_dash(series(result, name, "cpu_us")),
            *(or_dash(ratio(result, name, other, "cpu_us"), 2) for other in references),
            or_dash(series(result, name, "per_second"), 0),
            *(or_dash(series(result, name, f"added_{at}_us"), 0) for at in ("p50", "p90", "p99")),
            _remarks(result, name),
        ]
        for name in names
    ]
    return head, rows


def _memory_rows(result: Result, names: list[str]) -> tuple[list[str], list[list[str]]]:
    references = _references(names)
    head = ["proxy", "RSS at start, MB", "RSS after, MB", *(f"to {name}'s" for name in references)]
    head += ["peak, MB", "peak above start, bodies", "remarks"]
    big = result.case.body_bytes > 1_000_000
    rows = [
        [
            name,
            or_dash(series(result, name, "rss_before_mb")),
            or_dash(series(result, name, "rss_mb")),
            *(or_dash(ratio(result, name, other, "rss_mb"), 2) for other in references),
            or_dash(series(result, name, "peak_mb")),
            or_dash(series(result, name, "peak_bodies"), 2) if big else "-",
            _remarks(result, name),
        ]
        for name in names
    ]
    return head, rows


def markdown(
    described: dict[str, Any], settings: dict[str, Any], results: dict[str, Result], absent: dict[str, str]
) -> str:
    """The whole report."""
    names = settings["proxies"]
    lines = [
        _INTRODUCTION.format(
            **settings,
            **{key: described[key] for key in ("revision", "proxy_core", "rig_core")},
            load=described["load_average_at_start"],
            machine=machine.sentence(described),
            versions=machine.versions(described),
        )
    ]
    lines += table(
        ["proxy", "messages per request", "how it is run"],
        [[name, "3" if SPECS[name].legs == 2 else "1", SPECS[name].remark] for name in names],
    )
    if absent:
        lines += ["Not measured:", ""] + [f"- {name}: {reason}" for name, reason in absent.items()] + [""]
    lines += ["## Targets", ""]
    rows = []
    for target in TARGETS:
        told = judge(target, results)
        found = told["measured"]
        digits = 2 if target.against else 1
        rows.append(
            [
                "first version" if target.stage == "first" else "goal",
                f"{_WORDS[target.metric]}, {target.case}" + (f", to {target.against}'s" if target.against else ""),
                f"≤ {target.limit:g}",
                Spread(found["median"], found["low"], found["high"]).text(digits) if found else "not measured",
                "-" if told["met"] is None else "met" if told["met"] else "**not met**",
            ]
        )
    lines += table(["stage", "what", "target", "measured", ""], rows)
    for result in results.values():
        lines += [f"## {result.case.title}", "", f"`--case {result.case.name}`", ""]
        if result.case.kind == "memory":
            lines += table(*_memory_rows(result, names))
        else:
            lines += table(*_work_rows(result, names, "chunk" if result.case.kind == "stream" else "request"))
            p50, p99 = (or_dash(series(result, DIRECT, metric)) for metric in ("p50_us", "p99_us"))
            lines += [f"Directly: p50 {p50} µs, p99 {p99} µs.", ""]
    return "\n".join(lines)
