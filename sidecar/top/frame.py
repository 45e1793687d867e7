"""One frame of `pd-sidecar top` as lines of text. Knows numbers, not terminals."""

import time
from collections.abc import Sequence

from sidecar.top.sample import Change, Sample

BREAKERS = ("closed", "half open", "OPEN")
ROWS = 12
"""Of a table that may be long."""

Row = tuple[str, ...]


def frame(url: str, change: Change) -> list[str]:
    """What happened since the earlier sample, and how things are at the later one."""
    now = change.later
    lines = [_headline(url, now), _span(change), ""]
    lines += _table(("decision", "reason", "requests/s", "since start"), _decisions(change)) or ["no request yet"]
    lines += ["", *_table(("time to first byte", "p50", "p99", "answers"), _ttft(change))]
    lines += ["", _in_flight(now), ""]
    lines += _table(("prefill endpoint", "breaker", "blocked", "in flight"), _endpoints(now)) or [
        "no prefill endpoint is known"
    ]
    fallbacks = _fallbacks(change)
    lines += ["", *(_table(("fallback", "reason", "/s", "since start"), fallbacks) or ["no fallbacks"])]
    return [_printable(line) for line in lines]


def _headline(url: str, now: Sample) -> str:
    version = next((dict(has).get("version", "") for has in now.values.get("build_info", {})), "")
    ready = f"NOT READY: {now.problem}" if now.problem else "ready"
    effective = "effective" if now.gauge("effective") else "NOT EFFECTIVE: remote prefills bring no KV"
    return f"pd-sidecar {version} at {url}   disagg {now.mode}   {ready}   {effective}"


def _span(change: Change) -> str:
    now = change.later
    clock = time.strftime("%H:%M:%S", time.localtime(now.at))
    since_start = change.earlier.at <= now.started_at
    requests = sum(change.counts("requests_total").values())
    over = "since its start" if since_start else f"over the last {_duration(change.seconds)}"
    return f"{clock}   up {_duration(now.at - now.started_at)}   {requests / change.seconds:.1f} requests/s {over}"


def _decisions(change: Change) -> list[Row]:
    grown = change.counts("requests_total", "decision", "reason")
    totals = change.later.by("requests_total", "decision", "reason")
    rows = sorted(totals, key=lambda key: (-grown[key], -totals[key], key))
    return [(*key, f"{grown[key] / change.seconds:.1f}", f"{totals[key]:.0f}") for key in rows]


def _ttft(change: Change) -> list[Row]:
    counts = change.counts("ttft_seconds_count", "decision")
    rows: list[Row] = []
    for (decision,), count in sorted(counts.items()):
        p50, p99 = change.quantiles("ttft_seconds", decision, (0.5, 0.99))
        rows.append((decision, _seconds(p50), _seconds(p99), f"{count:.0f}"))
    return rows or [("none", "-", "-", "0")]


def _in_flight(now: Sample) -> str:
    decode, prefill = now.gauge("inflight", leg="decode"), now.gauge("inflight", leg="prefill")
    return (
        f"in flight: {decode:.0f} at decode, {prefill:.0f} at prefill, "
        f"{now.gauge('recompute_inflight'):.0f} recomputes, {now.gauge('inflight', leg='release'):.0f} releases"
    )


def _endpoints(now: Sample) -> list[Row]:
    blocked = {key[0]: key[1] for key in now.by("prefill_blocked", "prefill", "reason")}
    busy = now.by("prefill_inflight", "prefill")
    states = now.by("breaker_state", "prefill")
    rows = sorted(states, key=lambda key: (not blocked.get(key[0]), -states[key], -busy.get(key, 0.0), key))
    return [
        (label, BREAKERS[int(states[label,])], blocked.get(label, ""), f"{busy.get((label,), 0.0):.0f}")
        for (label,) in rows
    ]


def _fallbacks(change: Change) -> list[Row]:
    grown = change.counts("fallbacks_total", "stage", "reason")
    totals = change.later.by("fallbacks_total", "stage", "reason")
    rows = sorted(totals, key=lambda key: (-grown[key], -totals[key], key))
    return [(*key, f"{grown[key] / change.seconds:.1f}", f"{totals[key]:.0f}") for key in rows]


# -- text ----------------------------------------------------------------------------------------------------


def _table(head: Row, rows: Sequence[Row]) -> list[str]:
    """Columns as wide as they must be, numbers to the right. [] without rows."""
    if not rows:
        return []
    shown = [head, *rows[:ROWS]]
    widths = [max(len(row[column]) for row in shown) for column in range(len(head))]
    numbers = [column for column in range(1, len(head)) if head[column] not in ("reason", "breaker", "blocked")]
    lines = [
        "  ".join(
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in shown
    ]
    if len(rows) > ROWS:
        lines.append(f"... and {len(rows) - ROWS} more")
    return lines


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = int(seconds) // 60
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _printable(line: str) -> str:
    """What comes over the network steers no terminal."""
    return "".join(char if char.isprintable() else "?" for char in line)
