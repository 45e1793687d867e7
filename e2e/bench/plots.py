"""Results as SVG, written by hand: no plotting library for two pictures.

One row per case, one mark per proxy at its median on a logarithmic axis, a line from the least round to the
greatest. It must not know how anything was measured.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from e2e.bench.report import Spread, series

if TYPE_CHECKING:
    from e2e.bench.measure import Result

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 900, 300, 30, 64, 40
_LANE = 13  # height of one proxy in a row, pixels
_GAP = 12  # between rows
# Okabe and Ito's palette: told apart also without full colour vision.
_COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#000000", "#E69F00")


def _ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, ... that lie within."""
    found = []
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        found += [tick for step in (1, 2, 5) if low <= (tick := step * 10.0**power) <= high]
    return found


def plot(title: str, unit: str, results: list[Result], names: list[str], metric: str) -> str | None:
    """An SVG of `metric` for every case, or None where nothing was measured."""
    rows: list[tuple[str, list[tuple[int, Spread]]]] = []
    for result in results:
        found = [(index, spread) for index, name in enumerate(names) if (spread := series(result, name, metric))]
        found = [(index, spread) for index, spread in found if spread.low > 0]
        if found:
            rows.append((result.case.title, found))
    if not rows:
        return None
    every = [spread for _, found in rows for _, spread in found]
    low, high = min(spread.low for spread in every) / 1.15, max(spread.high for spread in every) * 1.15

    def x(value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * math.log(value / low) / math.log(high / low)

    row_height = _LANE * len(names) + _GAP
    height = _TOP + row_height * len(rows) + _BOTTOM
    bottom = height - _BOTTOM
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}"',
        f' width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="12" y="22" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]
    at = 12.0
    for index, name in enumerate(names):
        out.append(f'<circle cx="{at + 4}" cy="40" r="4" fill="{_COLOURS[index % len(_COLOURS)]}"/>')
        out.append(f'<text x="{at + 13}" y="44">{escape(name)}</text>')
        at += 34 + 7.2 * len(name)
    for tick in _ticks(low, high):
        out.append(f'<path d="M{x(tick):.1f} {_TOP}V{bottom}" stroke="#ddd"/>')
        out.append(f'<text x="{x(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{tick:,g}</text>')
    out.append(
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{height - 6}" text-anchor="middle">{escape(unit)}</text>'
    )
    for number, (label, found) in enumerate(rows):
        top = _TOP + number * row_height + _GAP / 2
        middle = top + _LANE * len(names) / 2
        out.append(f'<text x="{_LEFT - 10}" y="{middle + 4:.1f}" text-anchor="end">{escape(label)}</text>')
        out.append(f'<path d="M12 {top - _GAP / 2:.1f}H{_WIDTH - _RIGHT}" stroke="#bbb"/>')
        for index, spread in found:
            y = top + _LANE * (index + 0.5)
            colour = _COLOURS[index % len(_COLOURS)]
            out.append(
                f'<path d="M{x(spread.low):.1f} {y:.1f}H{x(spread.high):.1f}" stroke="{colour}" stroke-width="2"/>'
            )
            out.append(f'<circle cx="{x(spread.median):.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
    return "\n".join([*out, "</svg>", ""])


def all_plots(results: dict[str, Result], names: list[str]) -> dict[str, str]:
    """File name to SVG."""
    wanted = (
        ("cpu-per-request.svg", "Proxy CPU per request", "µs of CPU per request", "closed", "cpu_us"),
        ("cpu-per-chunk.svg", "Proxy CPU per streamed chunk", "µs of CPU per chunk", "stream", "cpu_us"),
        ("memory.svg", "Resident memory after the load", "MB", "memory", "rss_mb"),
    )
    found = {}
    for file, title, unit, kind, metric in wanted:
        chosen = [result for result in results.values() if result.case.kind == kind]
        if svg := plot(title, unit, chosen, names, metric):
            found[file] = svg
    return found
