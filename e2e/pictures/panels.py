"""The chart's dashboard as SVG: its panels, where and with the units that its JSON says, drawn from what Prometheus
has answered. For machines without Grafana, so no picture of Grafana.

Must not know how anything was measured, nor which panels there are.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

Panel = dict[str, Any]
Point = tuple[float, float]

COLUMN, ROW, MARGIN = 64, 24, 8
"""Pixels of a unit of the grid, and between panels."""
HEAD, TICKS, LINE, LEFT = 26, 18, 14, 58
"""Pixels: a panel's title, its times, a line of its legend, its values."""
LEGEND_LINES = 4
WIDTH_OF_A_CHARACTER = 6.1
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
"""Okabe and Ito's: told apart also without full colour vision."""


@dataclass(frozen=True)
class Series:
    """What a panel's query brought: a name for the legend, and (Unix time, value)."""

    name: str
    points: list[Point]


def named(template: str, labels: dict[str, str]) -> str:
    """`legendFormat` with a series' labels."""
    return re.sub(r"{{\s*(\w+)\s*}}", lambda found: labels.get(found.group(1), ""), template)


def shown(value: float, unit: str) -> str:
    """A value in its unit, as short as Grafana has it."""
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if unit == "bytes":
        return f"{value / 2**20:.3g} MiB"
    if unit == "s":
        for factor, name in ((1e6, "µs"), (1e3, "ms")):
            if 0 < abs(value) < 1e3 / factor:
                return f"{value * factor:.3g} {name}"
        return (
            f"{value:.3g} s"
            if value < 120
            else f"{value / 3600:.3g} h"
            if value > 7200
            else f"{value / 60:.3g} min"
        )
    number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return number + (" req/s" if unit == "reqps" else "")


def steps(most: float) -> list[float]:
    """About four round values from 0 up to at least `most`."""
    if most <= 0:
        return [0.0, 1.0]
    magnitude = 10.0 ** math.floor(math.log10(most / 3))
    step = next(magnitude * factor for factor in (1, 2, 5, 10, 20) if magnitude * factor * 4 >= most)
    return [step * number for number in range(math.ceil(most / step - 1e-9) + 1)]


def picture(dashboard: Panel, answers: dict[int, list[Series]], span: Point, rows: Iterable[str] = ()) -> str:
    """`answers` by panel id; `span` of time, Unix seconds. `rows`: only those with these titles; all by default."""
    wanted = set(rows)
    panels, top, shift, keeps = [], 0, 0, not wanted
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            keeps = not wanted or panel["title"] in wanted
            shift = top - panel["gridPos"]["y"]
        if keeps:
            placed = {**panel["gridPos"], "y": panel["gridPos"]["y"] + shift}
            panels.append({**panel, "gridPos": placed})
            top = max(top, placed["y"] + placed["h"])
    width, height = 24 * COLUMN + MARGIN, top * ROW + MARGIN
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"',
        ' font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#f4f5f5"/>',
    ]
    for panel in panels:
        where = panel["gridPos"]
        box = (
            where["x"] * COLUMN + MARGIN,
            where["y"] * ROW + MARGIN,
            where["w"] * COLUMN - MARGIN,
            where["h"] * ROW - MARGIN,
        )
        out += list(_panel(panel, box, answers.get(panel["id"], []), span))
    return "\n".join([*out, "</svg>", ""])


Box = tuple[float, float, float, float]
"""x, y, width, height."""


def _panel(panel: Panel, box: Box, series: Sequence[Series], span: Point) -> Iterable[str]:
    x, y, width, height = box
    if panel["type"] == "row":
        yield f'<text x="{x}" y="{y + 12}" font-size="14" font-weight="bold">{escape(panel["title"])}</text>'
        return
    unit = panel["fieldConfig"]["defaults"]["unit"]
    yield f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="#fff" stroke="#ddd" rx="2"/>'
    yield _text(x + 8, y + 17, _fits(panel["title"], width - 12), 'font-weight="bold" fill="#333"')
    if not any(one.points for one in series):
        yield _text(x + width / 2, y + height / 2, "No data", 'text-anchor="middle" fill="#888"')
    elif panel["type"] == "stat":
        last = next(one for one in series if one.points).points[-1][1]
        style = 'text-anchor="middle" font-size="36" fill="#0072B2"'
        yield _text(x + width / 2, y + height / 2 + 14, shown(last, unit), style)
    else:
        yield from _lines(box, series, unit, span)


def _lines(box: Box, series: Sequence[Series], unit: str, span: Point) -> Iterable[str]:
    x, y, width, height = box
    listed = [one for one in series if one.points]
    legend = _legend(listed, width - 16)
    left, right = x + LEFT, x + width - 10
    top, bottom = y + HEAD + 6, y + height - TICKS - LINE * len(legend) - 6
    finite = [value for one in listed for _, value in one.points if math.isfinite(value)]
    step_of = 2.0**20 if unit == "bytes" else 1.0
    values = [value * step_of for value in steps(max(finite, default=0.0) / step_of)]
    begin, end = span

    def place(point: Point) -> str:
        at, value = point
        across = left + (right - left) * (at - begin) / (end - begin)
        return f"{across:.1f} {bottom - (bottom - top) * value / values[-1]:.1f}"

    for value in values:
        level = bottom - (bottom - top) * value / values[-1]
        yield f'<path d="M{left} {level:.1f}H{right}" stroke="#eee"/>'
        yield _text(left - 5, level + 4, shown(value, unit), 'text-anchor="end" fill="#666"')
    step = next(step for step in (10, 30, 60, 120, 300, 900) if (end - begin) / step <= (right - left) / 60)
    for at in range(math.ceil(begin / step) * step, math.floor(end) + 1, step):
        across = left + (right - left) * (at - begin) / (end - begin)
        if across < left + 20:
            continue  # it would stand on the lowest value
        yield f'<path d="M{across:.1f} {top}V{bottom}" stroke="#eee"/>'
        said = time.strftime("%H:%M:%S", time.gmtime(at))
        yield _text(across, bottom + 13, said, 'text-anchor="middle" fill="#666"')
    for one, colour in zip(listed, itertools.cycle(COLOURS), strict=False):
        path = "".join(_strokes(one.points, place))
        yield f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
    for number, entries in enumerate(legend):
        level = y + height - LINE * (len(legend) - number) + 6
        for across, place_in, name in entries:
            colour = COLOURS[place_in % len(COLOURS)]
            at = x + 10 + across
            yield f'<path d="M{at:.1f} {level - 4}h12" stroke="{colour}" stroke-width="3"/>'
            yield _text(at + 16, level, name, 'fill="#333"')


def _strokes(points: Sequence[Point], place: Any) -> Iterable[str]:
    """A gap where there is no number, or no answer for a while."""
    usual = min((b[0] - a[0] for a, b in itertools.pairwise(points)), default=0.0)
    pen_up, last = True, 0.0
    for point in points:
        if not math.isfinite(point[1]):
            pen_up = True
            continue
        is_first = pen_up or point[0] - last > 1.5 * usual
        yield ("M" if is_first else "L") + place(point)
        if is_first:
            yield "h0.1"  # a single point is seen too
            yield "M" + place(point)
        pen_up, last = False, point[0]


def _legend(series: Sequence[Series], width: float) -> list[list[tuple[float, int, str]]]:
    """Lines of (offset, number of the series, name); what does not fit is counted."""
    lines: list[list[tuple[float, int, str]]] = [[]]
    across = 0.0
    for number, one in enumerate(series):
        name = _fits(one.name, width - 20)
        needed = 30 + len(name) * WIDTH_OF_A_CHARACTER
        if lines[-1] and across + needed > width:
            if len(lines) == LEGEND_LINES:
                lines[-1].append((across, number, f"+{len(series) - number}"))
                break
            lines.append([])
            across = 0.0
        lines[-1].append((across, number, name))
        across += needed
    return [line for line in lines if line]


def _fits(text: str, width: float) -> str:
    most = max(int(width / WIDTH_OF_A_CHARACTER), 1)
    return text if len(text) <= most else text[: most - 1] + "…"


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
