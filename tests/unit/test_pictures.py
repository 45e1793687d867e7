"""The documentation's pictures show what was measured, where the dashboard has it, and hide nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from e2e.pictures import panels, terminal
from e2e.pictures.panels import Series, named, picture, shown, steps

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "charts" / "pd-sidecar" / "files" / "dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
SPAN = (1_000.0, 1_060.0)


def texts(svg: str) -> list[str]:
    return [one.text or "" for one in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def answers(points: list[tuple[float, float]]) -> dict[int, list[Series]]:
    return {panel["id"]: [Series(f"series of {panel['id']}", points)] for panel in PANELS}


def test_every_panel_is_there_with_its_series() -> None:
    said = texts(picture(DASHBOARD, answers([(1_000.0, 0.5), (1_030.0, 2.0)]), SPAN))
    for panel in PANELS:
        assert any(panel["title"].startswith(text.rstrip("…")) for text in said)
        assert panel["type"] == "stat" or f"series of {panel['id']}" in said


def test_what_was_not_answered_is_said() -> None:
    assert texts(picture(DASHBOARD, {}, SPAN)).count("No data") == len(PANELS)


def test_rows_may_be_chosen() -> None:
    said = texts(picture(DASHBOARD, {}, SPAN, ["What fails"]))
    assert "What fails" in said
    assert "Does it pay?" not in said


def test_gaps_stay_gaps() -> None:
    points = [(1_000.0, 1.0), (1_002.0, 1.0), (1_004.0, math.nan), (1_006.0, 1.0), (1_008.0, 1.0), (1_020.0, 1.0)]
    path = "".join(panels._strokes(points, lambda point: f"{point[0]:.0f} "))
    assert [stroke.rpartition("L")[2].strip() for stroke in path.split("h0.1M")][1:] == [
        "1002 M1006",
        "1008 M1020",
        "1020",
    ]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.25, "percentunit", "25 %"),
        (0.0321, "s", "32.1 ms"),
        (0.000_05, "s", "50 µs"),
        (2.5, "s", "2.5 s"),
        (86_400.0, "s", "24 h"),
        (50 * 2**20, "bytes", "50 MiB"),
        (1_500.0, "none", "1,500"),
        (1.25, "reqps", "1.25 req/s"),
    ],
)
def test_units(value: float, unit: str, text: str) -> None:
    assert shown(value, unit) == text


@pytest.mark.parametrize("most", [0.0, 0.013, 0.99, 1.0, 7.3, 1_234.0])
def test_axes_hold_the_greatest_value(most: float) -> None:
    values = steps(most)
    assert values[0] == 0
    assert values[-1] >= most
    assert 2 <= len(values) <= 6


def test_names_of_series() -> None:
    assert named("{{stage}}: {{ reason }}", {"stage": "pull", "reason": "reset"}) == "pull: reset"


def test_a_frame_of_top_is_what_the_terminal_shows() -> None:
    """Nobody is at that address, which top says too."""
    lines = terminal.frame("http://127.0.0.1:9", 1.5, columns=80, lines=10)
    assert "127.0.0.1:9" in lines[0]
    assert lines[-1] == "asked again every second; q ends"
    said = texts(terminal.picture(lines, "top <1>"))
    assert said[0] == "top <1>"
    assert said[1] == lines[0]
