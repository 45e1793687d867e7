"""The report in Markdown and its pictures, from numbers. It must not know how anything was measured."""

from __future__ import annotations

from collections import Counter
from typing import Any

from e2e import machine
from e2e.latency import numbers
from e2e.latency.numbers import Targets
from e2e.latency.scenarios import MODES, SCENARIOS, STREAM
from e2e.plots import dots, timeline
from e2e.rounds import Spread, or_dash, spread, table

_INTRODUCTION = """# Latency: what disaggregation buys, and what the sidecar costs

Written by `{command}`; do not edit. Taken {started}, revision {revision}.

{machine}
On {layout}. Load average at the start {load:.1f}.
{versions}; model {model}, {dtype}; one prefill and one decode engine of vLLM, KV moved by NIXL
({ucx_tls}, blocks of {block_size} tokens).

Each number is the median of the rounds with the least and the greatest in brackets. Ways alternate within a round,
and a ratio is taken within a round. TTFT is from the request to its first token, at the client; a gap is the time
between one token and the next (ITL); a request is good (goodput) if its TTFT is at most {ttft_target:,.0f} ms and
99 % of its gaps at most {itl_target:,.0f} ms.
"""
_RIG_NOTE = """Two things to know before comparing these milliseconds with another machine's. There is no GPU:
prefill and decode compute on one core each, which is what makes the pauses long, and the ratios are the point.
And there is no RDMA: the KV is copied by the same cores that compute, so that a remote TTFT holds a copying which
a fabric would not.
"""
_LOAD = {True: "the load of `vllm bench serve`", False: "our own load"}
LATE_MS = 5.0
"""From here on it is said that what was measured has that much of the load's own in it."""
_PARTS = (
    ("ttft", "TTFT"),
    ("waiting", "prefill: waiting"),
    ("prefill", "prefill: compute"),
    ("transfer", "transfer (NIXL)"),
    ("start", "decode start"),
    ("sidecar", "sidecar"),
    ("rest", "client and sockets"),
)
_PARTS_NOTE = """Means over the requests, in ms. Compute is the prefill engine's own figure (request_prefill_time),
transfer is NIXL's (nixl_xfer_time); waiting and decode start are what the sidecar waited for either engine besides:
HTTP, tokenising, and the step that the engine is in when a request comes. Without NIXL's progress thread, which
would take a whole core, a prefill engine moves KV between its steps: a transfer waits for the prompts behind it.
"""


def document(
    described: dict[str, Any], settings: dict[str, Any], results: dict[str, Any], absent: dict[str, str]
) -> dict[str, Any]:
    """What the JSON file holds: everything that the Markdown is made from, and the verdicts."""
    targets = Targets(**settings["targets"])
    return {
        "machine": described,
        "settings": settings,
        "absent": absent,
        "verdicts": [
            {
                "what": verdict.what,
                "limit": verdict.limit,
                "unit": verdict.unit,
                "measured": verdict.measured and vars(verdict.measured),
                "values": verdict.values,
                "holds": verdict.holds,
                "trouble": verdict.trouble,
            }
            for verdict in numbers.verdicts(results, targets)
        ],
        "scenarios": results,
    }


def markdown(document: dict[str, Any], plots: list[str]) -> str:
    """The whole report; `plots` are the files that it shows."""
    described, settings, results = document["machine"], document["settings"], document["scenarios"]
    targets = Targets(**settings["targets"])
    lines = [
        _INTRODUCTION.format(
            **{key: settings[key] for key in ("command", "started", "layout", "model", "dtype")},
            **{key: settings[key] for key in ("ucx_tls", "block_size")},
            revision=described["revision"],
            machine=machine.sentence(described),
            versions=machine.versions(described),
            load=described["load_average_at_start"],
            ttft_target=targets.ttft_ms,
            itl_target=targets.itl_ms,
        )
    ]
    lines += [_RIG_NOTE] if settings["tamed"] else []
    lines += _verdicts(results, targets)
    lines += [line for file in plots for line in (f"![]({file})", "")]
    used = [name for name in MODES if any(name in _modes(result) for result in results.values())]
    lines += ["## Ways", "", *table(["way", "what it is"], [[name, MODES[name].title] for name in used])]
    if document["absent"]:
        lines += ["Not measured:", ""] + [f"- {name}: {why}" for name, why in document["absent"].items()] + [""]
    for name, result in results.items():
        lines += _scenario(name, result, targets)
    return "\n".join(lines)


def _verdicts(results: dict[str, Any], targets: Targets) -> list[str]:
    rows = []
    for verdict in numbers.verdicts(results, targets):
        unit = f" {verdict.unit}" if verdict.unit else ""
        of = f"{verdict.values} {'request' if verdict.unit else 'round'}{'s' if verdict.values != 1 else ''}"
        found = f"{verdict.measured.text(2)}{unit}, {of}" if verdict.measured else "-"
        rows.append([verdict.what, f"≤ {verdict.limit:g}{unit}", found, verdict.word])
    lines = ["## What must be shown", "", *table(["what", "limit", "measured", ""], rows)]
    rounds = results.get("interference", {"rounds": []})["rounds"]
    if to_held := numbers.ratio(rounds, "remote", "held", "itl_p99", targets):
        busy = numbers.ratio(rounds, "elsewhere", "quiet", "itl_p99", targets)
        answers = numbers.ratio(rounds, "held", "quiet", "itl_p99", targets)
        lines += [
            "Against nothing arriving the streams pay for two things besides remote prefill. The three prompts",
            "are answered, and their answers are decoded in the streams' own steps, each with its 2,000 tokens to",
            f"attend to: that alone makes the p99 gap {or_dash(answers, 2)} times as long (`held` to `quiet`). And",
            "virtual cores may be threads of one core, and share caches and memory in any case: a busy neighbour",
            f"alone makes it {or_dash(busy, 2)} times as long (`elsewhere` to `quiet`). Prefilling remotely,",
            f"against the same answers with nothing to prefill, makes it {to_held.text(2)} times as long.",
            "",
        ]
    shares = numbers.overheads_ms(results)
    if shares:
        lines += [
            "The sidecar's own share is what `pd_sidecar_overhead_seconds` observes, for each remote request:",
            "the time to its first byte in which neither engine was waited for. Brackets: least and greatest.",
            "",
        ]
    return lines


def _modes(result: dict[str, Any]) -> list[str]:
    return [
        name for name in MODES if any(name in samples for samples in result["rounds"]) or name in result["failed"]
    ]


def _scenario(name: str, result: dict[str, Any], targets: Targets) -> list[str]:
    scenario, rounds, modes = SCENARIOS[name], result["rounds"], _modes(result)

    def cell(mode: str, metric: str, digits: int = 0) -> str:
        return or_dash(numbers.series(rounds, mode, metric, targets), digits)

    lines = [f"## {scenario.title}", ""]
    count = f"{len(rounds)} round{'s' if len(rounds) != 1 else ''}"
    lines += [f"`--scenario {name}`, {_LOAD[scenario.public]}, {count}.", ""]
    has_streams = any(
        request["kind"] == STREAM
        for samples in rounds
        for sample in samples.values()
        for request in sample["requests"]
    )
    whose = "of the streams" if has_streams else ""
    rows = [
        [
            mode,
            *(cell(mode, f"ttft_{at}") for at in ("p50", "p90", "p99")),
            *(cell(mode, f"itl_{at}") for at in ("p50", "p90", "p99", "max")),
            *(cell(mode, f"e2e_{at}") for at in ("p50", "p90", "p99")),
        ]
        for mode in modes
    ]
    head = ["way", *(f"TTFT {at}" for at in ("p50", "p90", "p99"))]
    head += [f"gap {at}" for at in ("p50", "p90", "p99", "max")] + [f"E2E {at}" for at in ("p50", "p90", "p99")]
    lines += [f"Milliseconds. Gaps are those {whose}." if whose else "Milliseconds.", "", *table(head, rows)]
    rows = []
    for mode in modes:
        goodput = numbers.series(rounds, mode, "goodput", targets)
        rows.append(
            [
                mode,
                or_dash(goodput and Spread(goodput.median * 100, goodput.low * 100, goodput.high * 100), 0),
                *(
                    cell(mode, metric)
                    for metric in ("tokens_computed", "tokens_cached", "tokens_pulled", "tokens_prefilled")
                ),
                or_dash(numbers.ratio(rounds, mode, "local", "itl_p99", targets), 2) if mode != "local" else "1",
                or_dash(numbers.ratio(rounds, mode, "local", "ttft_p50", targets), 2) if mode != "local" else "1",
                _remarks(result, mode),
            ]
        )
    head = ["way", "goodput, %", "computed by decode", "cached", "pulled", "computed by prefill"]
    lines += ["Prompt tokens, and ratios to `local`.", ""]
    lines += table([*head, "p99 gap to local", "p50 TTFT to local", "remarks"], rows)
    lines += _parts(rounds, modes)
    return lines


def _remarks(result: dict[str, Any], mode: str) -> str:
    rounds = result["rounds"]
    notes = [result["failed"][mode]] if mode in result["failed"] else []
    troubles = [samples[mode]["trouble"] for samples in rounds if mode in samples and samples[mode]["trouble"]]
    if troubles:
        notes.append(f"{len(troubles)} of {len(rounds)} rounds: {troubles[0]}")
    late_ms = max((samples[mode]["late_ms"] for samples in rounds if mode in samples), default=0.0)
    if late_ms > LATE_MS:
        notes.append(f"the load itself was up to {late_ms:.0f} ms late (p99)")
    if mode in ("auto", "fallback"):
        decided = Counter(
            request["decision"].partition("; prefill")[0]
            for samples in rounds
            if mode in samples
            for request in samples[mode]["requests"]
        )
        notes.append(", ".join(f"{count} {word}" for word, count in decided.most_common()))
    return "; ".join(notes).replace("|", "/").replace("\n", " ")[:300]


def _split(parts: dict[str, float]) -> dict[str, float]:
    """A TTFT in parts that add up to it; of a router only what the engines say."""
    if "prefill_leg" not in parts or "decode_leg" not in parts:
        return parts
    return {
        **parts,
        "waiting": parts["prefill_leg"] - parts["prefill"],
        "start": parts["decode_leg"] - parts["transfer"],
        "rest": parts["ttft"] - parts["prefill_leg"] - parts["decode_leg"] - parts["sidecar"],
    }


def _parts(rounds: list[dict[str, Any]], modes: list[str]) -> list[str]:
    """What a remote TTFT is made of."""
    rows = []
    for mode in modes:
        parts = [samples[mode]["parts_ms"] for samples in rounds if mode in samples]
        if found := [_split(one) for one in parts if {"prefill", "transfer"} <= one.keys()]:
            values = [[one[key] for one in found if key in one] for key, _ in _PARTS]
            rows.append([mode, *(or_dash(spread(value), 1) for value in values)])
    if not rows:
        return []
    head = ["way", *(title for _, title in _PARTS)]
    return ["What the TTFT of remote requests is made of.", "", *table(head, rows), _PARTS_NOTE]


# ---------------------------------------------------------------- pictures

_TIMELINE = {
    "quiet": "nothing arriving",
    "elsewhere": "nothing arriving, prefill core busy",
    "local": "prefilled locally",
    "remote": "prefilled remotely",
    "fallback": "remotely, prefill engine killed",
    "vllm-router": "remotely, vllm-router",
}


def plots(document: dict[str, Any]) -> dict[str, str]:
    """File name to SVG."""
    results = document["scenarios"]
    targets = Targets(**document["settings"]["targets"])
    names = [name for name in MODES if any(name in _modes(result) for result in results.values())]
    found = {}
    if "interference" in results and (svg := _interference(results["interference"])):
        found["interference.svg"] = svg
    for file, title, metric in (
        ("itl-p99.svg", "99th percentile of the gaps between tokens", "itl_p99"),
        ("ttft-p50.svg", "Median time to the first token", "ttft_p50"),
    ):
        rows = [
            (
                name,
                {mode: one for mode in names if (one := numbers.series(result["rounds"], mode, metric, targets))},
            )
            for name, result in results.items()
        ]
        if svg := dots(title, "ms", rows, names):
            found[file] = svg
    return found


def _interference(result: dict[str, Any]) -> str | None:
    """The gaps of the streams over the window, of the first round that has every way."""
    modes = [mode for mode in _TIMELINE if mode in _modes(result)]
    for samples in result["rounds"]:
        if all(mode in samples for mode in modes):
            lanes = []
            for mode in modes:
                sample = samples[mode]
                lines = [request["token_ms"] for request in sample["requests"] if request["kind"] == STREAM]
                marks = [request["began_ms"] for request in sample["requests"] if request["kind"] != STREAM]
                lanes.append((_TIMELINE[mode], lines, marks))
            return timeline(
                "Each stroke is a token of one of four streams; at each triangle a prompt of 2,000 tokens arrives",
                lanes,
            )
    return None
