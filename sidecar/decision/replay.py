"""What other rules would have made of decisions that were recorded: `pd-sidecar replay`. No I/O.

Records are those of `/decisions`, from decisions of the cost rule: they hold the inputs and what both ways were
thought to cost, and no prompt. A rule that others published sees the same inputs, and is priced alike.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sidecar.decision.cost import price_share

Record = Mapping[str, Any]
Rule = Callable[[Record], bool]
"""Whether the prompt goes remote."""


class BadRule(ValueError):
    """No rule has this name, or its number is none."""


def _uncached(record: Record) -> tuple[int, int]:
    inputs = record["inputs"]
    return inputs["tokens"], inputs["tokens"] - inputs["cached"]


def _static(least: float) -> Rule:
    return lambda record: _uncached(record)[1] >= least


def _dynamo(least: float) -> Rule:
    """Local if little is new, absolutely and as a share, or the prefill side is busy (published: 2048, 0.7)."""

    def rule(record: Record) -> bool:
        tokens, new = _uncached(record)
        is_short = new < least and new / max(tokens, 1) < 0.7
        return not is_short and not record["inputs"]["prefill_ahead"] > 8 * least

    return rule


def _cost(weight: float) -> Rule:
    """Ours, with this `--stall-weight`."""

    def rule(record: Record) -> bool:
        inputs, predicted = record["inputs"], record["predicted"]
        stall_s = predicted["stall_seconds"]
        share = price_share(inputs.get("long_gaps_used", 1.0), stall_s / max(inputs["streams"], 1.0))
        return bool(predicted["local_seconds"] + weight * share * stall_s > predicted["remote_seconds"])

    return rule


RULES: dict[str, tuple[Callable[[float], Rule], float]] = {
    "static": (_static, 256),
    "dynamo": (_dynamo, 2048),
    "llm-d": (_static, 128),
    "cost": (_cost, 30.0),
}
"""Name -> how the rule is made of its number, and the usual number."""


def make_rule(text: str) -> Rule:
    """`local`, `remote`, `recorded`, or a name of `RULES` with or without `:NUMBER`. Raises `BadRule`."""
    if text == "local":
        return lambda _record: False
    if text == "remote":
        return lambda _record: True
    if text == "recorded":
        return lambda record: record["decided"] == "remote"
    name, colon, number = text.partition(":")
    if name not in RULES:
        raise BadRule(f"{text!r} is no rule; there are recorded, local, remote, {', '.join(RULES)} (with :NUMBER)")
    make, usual = RULES[name]
    try:
        return make(float(number) if colon else usual)
    except ValueError:
        raise BadRule(f"{text!r}: {number!r} is no number") from None


def priced(records: Iterable[Record]) -> list[Record]:
    """Those that can be judged: decided by the cost rule, with both ways priced."""
    return [one for one in records if "inputs" in one and one.get("predicted", {}).get("remote_seconds")]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rule would have done with the records."""

    rule: str
    remote: int
    changed: int
    """Decisions unlike the recorded ones."""
    wait_seconds: float
    """Mean predicted time to first token."""
    worst_wait_seconds: float
    """Its 99th percentile."""
    stall_seconds: float
    """What running streams lose, summed over all records."""


def judge(name: str, records: list[Record]) -> Outcome:
    """Raises `BadRule`."""
    rule = make_rule(name)
    ways = [rule(record) for record in records]
    waits = sorted(
        record["predicted"]["remote_seconds" if remote else "local_seconds"]
        for record, remote in zip(records, ways, strict=True)
    )
    stalls = [
        record["predicted"]["stall_seconds"] for record, remote in zip(records, ways, strict=True) if not remote
    ]
    recorded = [record["decided"] == "remote" for record in records]
    changed = sum(was is not now for was, now in zip(recorded, ways, strict=True))
    worst = waits[min(len(waits) - 1, int(len(waits) * 0.99))] if waits else 0.0
    return Outcome(name, sum(ways), changed, sum(waits) / max(len(waits), 1), worst, sum(stalls))


def table(outcomes: Iterable[Outcome], records: int, skipped: int) -> str:
    """For people."""
    lines = [f"{records} decisions of the cost rule" + (f", {skipped} others left out" if skipped else ""), ""]
    if not records:
        return (
            lines[0]
            + ": nothing to judge. The rule decides with --disagg auto, on prompts of --min-remote-tokens and\n"
            "more, once it has seen a few streamed answers by each way.\n"
        )
    lines += [
        f"{'rule':<16} {'remote':>7} {'changed':>8} {'mean TTFT':>10} {'p99 TTFT':>9} {'streams lose':>13}",
    ]
    lines += [
        f"{one.rule:<16} {one.remote:>7} {one.changed:>8} {one.wait_seconds:>8.3f} s "
        f"{one.worst_wait_seconds:>7.3f} s {one.stall_seconds:>11.3f} s"
        for one in outcomes
    ]
    return "\n".join(lines) + "\n"
