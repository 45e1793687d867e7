"""Results as SVG, written by hand: no plotting library for a few pictures.

It must not know how anything was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from e2e.rounds import Spread

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 900, 300, 30, 64, 40
_LANE = 13  # height of one proxy in a row, pixels
_GAP = 12  # between rows
# Okabe and Ito's palette: told apart also without full colour vision.
_COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#000000", "#E69F00", "#999999")


def _ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, ... that lie within."""
    found = []
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        found += [tick for step in (1, 2, 5) if low <= (tick := step * 10.0**power) <= high]
    return found


def dots(title: str, unit: str, rows: Sequence[tuple[str, dict[str, Spread]]], names: list[str]) -> str | None:
    """One row per label, one mark per name at its median on a logarithmic axis, a line from the least round to the
    greatest. None where nothing was measured; what is not above 0 has no place on the axis."""
    shown = [(label, [(names.index(name), one) for name, one in row.items() if one.low > 0]) for label, row in rows]
    shown = [(label, found) for label, found in shown if found]
    if not shown:
        return None
    every = [spread for _, found in shown for _, spread in found]
    low, high = min(spread.low for spread in every) / 1.15, max(spread.high for spread in every) * 1.15

    def x(value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * math.log(value / low) / math.log(high / low)

    row_height = _LANE * len(names) + _GAP
    height = _TOP + row_height * len(shown) + _BOTTOM
    bottom = height - _BOTTOM
    out = _frame(title, height)
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
    for number, (label, found) in enumerate(shown):
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


_ROW = 12  # height of one stream in a timeline, pixels


def timeline(title: str, lanes: Sequence[tuple[str, list[list[float]], list[float]]]) -> str | None:
    """One lane for each (label, streams, arrivals), times in ms: a stroke for each token of a stream, so that a
    pause is a blank, and a triangle for each arrival. None where there is no token."""
    end = max((at for _, streams, _ in lanes for stream in streams for at in stream), default=0.0)
    if end <= 0:
        return None

    def x(at: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * at / end

    heights = [_ROW * (len(streams) + 1) + _GAP for _, streams, _ in lanes]
    height = _TOP + sum(heights) + _BOTTOM
    out = _frame(title, height)
    bottom = height - _BOTTOM
    for second in range(int(end / 1000) + 1):
        at_x = x(second * 1000)
        out.append(f'<path d="M{at_x:.1f} {_TOP}V{bottom}" stroke="#ddd"/>')
        out.append(f'<text x="{at_x:.1f}" y="{bottom + 16}" text-anchor="middle">{second} s</text>')
    top = float(_TOP)
    for number, (label, streams, arrivals) in enumerate(lanes):
        colour = _COLOURS[number % len(_COLOURS)]
        middle = top + _ROW + _ROW * len(streams) / 2
        out.append(f'<text x="{_LEFT - 10}" y="{middle + 4:.1f}" text-anchor="end">{escape(label)}</text>')
        for at in arrivals:
            out.append(f'<path d="M{x(at):.1f} {top + _ROW:.1f}l-5 -8h10z" fill="#000"/>')
        for row, stream in enumerate(streams):
            y = top + _ROW * (row + 1) + 1
            strokes = "".join(f"M{x(at):.1f} {y:.1f}v{_ROW - 3}" for at in stream if at >= 0)
            out.append(f'<path d="{strokes}" stroke="{colour}"/>')
        top += heights[number]
    return "\n".join([*out, "</svg>", ""])


def _frame(title: str, height: float) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}"',
        f' width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="12" y="22" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]


_CURVE = 110  # height of one curve, pixels


def curves(title: str, lines: Sequence[tuple[str, list[tuple[float, float]]]], unit: str) -> str | None:
    """One curve above the other, each (label, points) on its own scale from 0, over the same time."""
    end = max((x for _, points in lines for x, _ in points), default=0.0)
    if end <= 0:
        return None
    height = _TOP + (_CURVE + _GAP) * len(lines) + _BOTTOM
    out = _frame(title, height)
    bottom = height - _BOTTOM
    step = next(step for step in (0.1, 0.5, 1, 5, 10, 30, 60, 600) if end / step <= 12 or step == 600)
    for number in range(int(end / step) + 1):
        at_x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * number * step / end
        out.append(f'<path d="M{at_x:.1f} {_TOP}V{bottom}" stroke="#ddd"/>')
        out.append(f'<text x="{at_x:.1f}" y="{bottom + 16}" text-anchor="middle">{number * step:g}</text>')
    out.append(
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{height - 6}" text-anchor="middle">{escape(unit)}</text>'
    )
    for number, (label, points) in enumerate(lines):
        top = _TOP + (_CURVE + _GAP) * number
        most = max((y for _, y in points), default=0.0) * 1.1 or 1.0
        path = " ".join(
            f"{_LEFT + (_WIDTH - _LEFT - _RIGHT) * x / end:.1f},{top + _CURVE * (1 - y / most):.1f}"
            for x, y in points
        )
        out.append(f'<text x="{_LEFT - 10}" y="{top + _CURVE / 2:.1f}" text-anchor="end">{escape(label)}</text>')
        out.append(f'<text x="{_LEFT - 10}" y="{top + 10}" text-anchor="end" fill="#666">{most:,.3g}</text>')
        out.append(f'<path d="M{_LEFT} {top + _CURVE}H{_WIDTH - _RIGHT}" stroke="#999"/>')
        colour = _COLOURS[number % len(_COLOURS)]
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    return "\n".join([*out, "</svg>", ""])
