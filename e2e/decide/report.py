"""The report in Markdown and its pictures, from numbers. It must not know how anything was measured."""

from __future__ import annotations

from collections import Counter
from typing import Any

from e2e import machine
from e2e.decide import numbers
from e2e.decide.numbers import GAP, TTFT
from e2e.decide.trace import KINDS
from e2e.decide.ways import LEAST_TOKENS, WAYS
from e2e.plots import dots
from e2e.rounds import Spread, or_dash, table

_INTRODUCTION = """# Decide: mixed load on real engines

Written by `{command}`; do not edit. Taken {started}, revision {revision}.

{machine}
On {layout}. Load average at the start {load:.1f}, at the end {load_at_end:.1f}.
{versions}; model {model}, {dtype}; one prefill and one decode engine of vLLM, KV moved by NIXL
({ucx_tls}, blocks of {block_size} tokens). No GPU and no RDMA: ratios are the point, not milliseconds.

About 31 requests in 20 s, other ones in each of {rounds} rounds and the same by every way of a round: chats of
40 to 160 tokens, documents of 1,000 to 1,800, conversations of three turns whose later ones bring 6 to 40 new
tokens to a prefix that the decode engine holds, and bursts of five chats at once. Prompts are token ids, answers 48
to 96 tokens.

Numbers are percentiles over all requests and all gaps between tokens of all rounds together; in brackets the least
and the greatest of single rounds (of ratios: within a round). Ways alternate within a round.
"""
_THRESHOLD = f"""`--min-remote-tokens` is set to {LEAST_TOKENS} here as
[operations.md](../operations.md#tuning) says: to what the decode engine computes in about one of its steps. The
rules of others get the same number for their thresholds, by the same reasoning, and besides what they come with;
their other numbers are as published (`e2e/decide/rules.py` names the sources). Dynamo's rule knows exactly what
decode holds, as it requires KV events; llm-d's knows which prompts were sent there. A request that a rule keeps
local goes straight to the decode engine, without the sidecar's share.
"""
_PERCENTILES = ((TTFT, 50), (TTFT, 90), (TTFT, 99), (GAP, 50), (GAP, 99), (GAP, 99.9), (GAP, 100))


def document(described: dict[str, Any], settings: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """What the JSON file holds: everything that the Markdown is made from, and the verdicts."""
    rounds = result["rounds"]
    return {
        "machine": described,
        "settings": settings,
        "verdicts": [
            {
                "what": verdict.what,
                "limit": verdict.limit,
                "measured": verdict.measured and vars(verdict.measured),
                "holds": verdict.holds,
                "trouble": verdict.trouble,
            }
            for verdict in numbers.verdicts(rounds)
        ],
        "result": result,
    }


def markdown(document: dict[str, Any], plots: list[str]) -> str:
    """The whole report; `plots` are the files that it shows."""
    described, settings, result = document["machine"], document["settings"], document["result"]
    rounds = result["rounds"]
    ways = [name for name in WAYS if any(name in samples for samples in rounds) or name in result["failed"]]
    keys = ("command", "started", "layout", "model", "dtype", "ucx_tls", "block_size", "load_at_end")
    lines = [
        _INTRODUCTION.format(
            **{key: settings[key] for key in keys},
            rounds=len(rounds),
            revision=described["revision"],
            machine=machine.sentence(described),
            versions=machine.versions(described),
            load=described["load_average_at_start"],
        )
    ]
    rows = [
        [verdict.what, f"≤ {verdict.limit:g}", or_dash(verdict.measured, 2), verdict.word]
        for verdict in numbers.verdicts(rounds)
    ]
    lines += ["## What must be shown", "", *table(["what", "limit", "measured", ""], rows)]
    lines += _others(rounds, ways)
    lines += [line for file in plots for line in (f"![]({file})", "")]
    lines += ["## Ways", "", *table(["way", "what it is"], [[name, WAYS[name].title] for name in ways]), _THRESHOLD]
    lines += ["## All requests", "", "Milliseconds.", "", *_times(rounds, ways), *_work(result, ways)]
    lines += _kinds(rounds, ways)
    return "\n".join(lines)


def _others(rounds: list[dict[str, Any]], ways: list[str]) -> list[str]:
    rows = []
    for name in ways:
        if name in ("auto", "remote"):
            continue
        cells = [
            f"{or_dash(measured, 2)} {numbers.word(measured)}"
            for _, _, measured in numbers.comparison(rounds, name)
        ]
        rows.append([name, str(sum(name in samples for samples in rounds)), *cells])
    head = [f"p{percent} {numbers.TITLES[name]}" for name, percent in numbers.COMPARED]
    return [
        f"`auto` to the others, less is better; within {numbers.EQUAL:.0%} they are called equal.",
        "",
        *table(["auto ÷", "rounds", *head], rows),
    ]


def _times(rounds: list[dict[str, Any]], ways: list[str]) -> list[str]:
    head = ["way"]
    for name, percent in _PERCENTILES:
        head.append(f"{'gap' if name == GAP else 'TTFT'} {'max' if percent == 100 else f'p{percent:g}'}")
    rows = [
        [way, *(or_dash(numbers.pooled(rounds, way, name, percent), 0) for name, percent in _PERCENTILES)]
        for way in ways
    ]
    return table(head, rows)


def _work(result: dict[str, Any], ways: list[str]) -> list[str]:
    rounds = result["rounds"]
    rows = []
    for way in ways:
        samples = [samples[way] for samples in rounds if way in samples]
        requests = [request for sample in samples for request in sample["requests"]]
        share = numbers.local_share(rounds, way)
        reasons = Counter(request["decision"].partition("; prefill")[0] for request in requests)
        notes = [sample["trouble"] for sample in samples if sample["trouble"]][:1]
        notes += [result["failed"][way]] if way in result["failed"] else []
        if way == "auto":
            notes.append(", ".join(f"{count} {reason}" for reason, count in reasons.most_common()))
        count = max(len(samples), 1)
        rows.append(
            [
                way,
                "-" if share is None else f"{share:.0%}",
                f"{sum(sample['decode_tokens']['local_compute'] for sample in samples) / count:,.0f}",
                f"{sum(sample['decode_tokens']['local_cache_hit'] for sample in samples) / count:,.0f}",
                f"{sum(sample['prefill_tokens'] for sample in samples) / count:,.0f}",
                "; ".join(notes).replace("|", "/").replace("\n", " ")[:300],
            ]
        )
    head = ["way", "stayed local", "computed by decode", "cached there", "computed by prefill", "remarks"]
    return ["Prompt tokens by round.", "", *table(head, rows)]


def _kinds(rounds: list[dict[str, Any]], ways: list[str]) -> list[str]:
    lines = ["## By kind", "", "TTFT in milliseconds, and the share that stayed local.", ""]
    rows = []
    for way in ways:
        cells = []
        for kind in KINDS:
            share = numbers.local_share(rounds, way, kind)
            at = [numbers.pooled(rounds, way, TTFT, percent, kind) for percent in (50, 99)]
            cells.append(f"{_median(at[0])} / {_median(at[1])}, {'-' if share is None else f'{share:.0%}'}")
        rows.append([way, *cells])
    return [*lines, *table(["way", *(f"{kind}: p50 / p99, local" for kind in KINDS)], rows)]


def _median(found: Spread | None) -> str:
    return "-" if found is None else f"{found.median:,.0f}"


def plots(document: dict[str, Any]) -> dict[str, str]:
    """File name to SVG."""
    rounds = document["result"]["rounds"]
    names = [name for name in WAYS if any(name in samples for samples in rounds)]
    found = {}
    wanted: list[tuple[str, str, list[tuple[str, str, float, str]]]] = [
        (
            "ttft.svg",
            "Time to the first token",
            [
                *((f"all, p{percent}", TTFT, percent, "") for percent in (50, 90, 99)),
                *((f"{kind}, p50", TTFT, 50, kind) for kind in KINDS),
            ],
        ),
        (
            "gaps.svg",
            "Gaps between tokens",
            [
                (f"p{percent:g}" if percent < 100 else "longest", GAP, percent, "")
                for percent in (50, 99, 99.9, 100)
            ],
        ),
    ]
    for file, title, rows in wanted:
        drawn = [
            (
                label,
                {way: one for way in names if (one := numbers.pooled(rounds, way, name, percent, kind))},
            )
            for label, name, percent, kind in rows
        ]
        if svg := dots(title, "ms", drawn, names):
            found[file] = svg
    return found
