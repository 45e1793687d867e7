"""The table of how cost grows: slopes, the last step that held, the bounds, and that nothing is left out."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import sidecar.decision
from e2e.bench.slopes import (
    ENGINE_STATUSES,
    KEPT_REASONS,
    SENT_REASONS,
    Pauses,
    Step,
    body_lines,
    endpoint_lines,
    last_that_held,
    most_series,
    pause_lines,
    series_lines,
    slopes,
    stream_lines,
)
from e2e.rounds import Spread
from sidecar.exchange.failures import PREFILL_STATUS_RELAYED


def flat(value: float) -> Spread:
    return Spread(value, value, value)


def step(
    rate_hz: int,
    *,
    share: float = 0.5,
    late_us: float = 400.0,
    came: float = 1.0,
    waited: float = 0.0,
    trouble: str = "",
) -> Step:
    return Step(2000, rate_hz, 2000 * rate_hz * came, 18.0, share, late_us, waited, trouble)


def test_slopes_are_between_neighbours_by_size() -> None:
    assert slopes({100: flat(30.0), 1: flat(10.0), 11: Spread(20.0, 5.0, 90.0)}) == {
        11: pytest.approx(1.0),
        100: pytest.approx(10 / 89),
    }
    assert slopes({5: flat(1.0)}) == {}


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"share": 0.98}, "the core is full"),
        ({"late_us": 5001.0}, "p99 5 ms later"),
        ({"came": 0.96}, "not every chunk came through in time"),
        ({"trouble": "3 errors"}, "3 errors"),
        ({"late_us": 9000.0, "waited": 0.3}, "p99 9 ms later (the machine was busy)"),
    ],
)
def test_the_first_step_that_does_not_hold_ends_it(bad: dict[str, float], why: str) -> None:
    failing = step(18, **bad)  # type: ignore[arg-type]
    assert failing.why_not == why
    assert last_that_held([step(10), step(14), failing, step(22)]) == step(14)
    assert last_that_held([failing]) is None
    assert last_that_held([step(10, share=0.97, late_us=5000.0, came=0.97)]) is not None


def test_a_size_that_was_not_measured_has_a_dash_and_no_slope_of_its_own() -> None:
    bodies: dict[str, dict[int, list[dict[str, float | None]]]] = {
        "sidecar": {
            1000: [{"cpu_us": 100.0}, {"cpu_us": 120.0}],
            16_000: [{"cpu_us": None}],
            100_000: [{"cpu_us": 308.0}],
        }
    }
    rows = [line for line in body_lines(bodies) if line.startswith("| 1")]
    assert rows == [
        "| 1 KB | 110 (100 to 120) | - |",
        "| 16 KB | - | - |",
        "| 100 KB | 308 | 2.00 |",
    ]


def test_streams_say_what_held_and_what_a_pod_needs() -> None:
    rounds = [
        [step(10), step(14), step(18, share=0.99)],
        [step(10), step(14, late_us=9000.0)],
        [step(10, trouble="!")],
    ]
    lines = stream_lines(rounds, [{"core_share": 0.36, "rss_mb": 90.0, "descriptors": 4051}])
    text = "\n".join(lines)
    assert "| 2,000 | 14 | 28,000 | 18.0 | 50 % | 4.70 (0.40 to 9.00) | 0 % | 1 of 2: p99 9 ms later |" in lines
    assert "sustains:** 24,000 (20,000 to 28,000) chunks a second; in 1 of 3 rounds" in text
    assert "| 2,000 | 10 | 20,000 | 18.0 | 50 % | 0.40 | 0 % | 2 of 3: ! |" in lines
    assert "needs 0.36 of a core, 90 MB of\nmemory and 4,051 descriptors" in text


def test_no_step_held() -> None:
    for waited, told in ((0.0, "held."), (0.3, "held; the machine was busy.")):
        lines = stream_lines([[step(10, share=1.0, waited=waited)], [step(10)]], [])
        assert (
            f"**What one core sustains:** 20,000 chunks a second; in 1 of 2 rounds not even the first step {told}"
            in lines
        )


def test_pauses_that_there_were() -> None:
    lines = pause_lines([Pauses("generation_0", 4, 0.006), Pauses("generation_2", 0, 0.0)], 70.0)
    assert "| generation_0 | 4 | 1.5 |" in lines
    assert not any("generation_2" in line for line in lines)
    assert "| none | 0 | - |" in pause_lines([], 70.0)


def test_endpoints_and_series_have_slopes() -> None:
    known = {
        count: [
            {"cpu_share": count / 1000, "rss_mb": 50.0 + count / 100, "descriptors": 2 * count, "series": count}
        ]
        for count in (1, 11)
    }
    choices = {count: [{"plain_us": 2.0, "conversation_us": count / 10, "busy_us": 1.0}] for count in (1, 11)}
    lines = endpoint_lines(known, choices)
    assert "| 11 | 2.0 | 1.1 | 1.0 | 1.10 % | 50.1 | 22 | 11 | - | - |" in lines
    assert "| a choice for a conversation | µs | 0.100 |" in lines
    assert "| RSS | KB | 10.000 |" in lines
    scrapes = {count: [{"cpu_ms": count / 200, "turn_ms": 0.5, "kb": count / 10}] for count in (100, 300)}
    text = "\n".join(series_lines(scrapes))
    assert "| 300 | 1.50 | 0.50 | 30 |" in text
    assert "5.0 to 5.0 µs for each series" in text
    assert f"{most_series()['requests']:,} series" in text


def test_reasons_are_those_of_the_code() -> None:
    """Every reason that guards and rules give is counted in the bound of label sets, and no other."""
    kept: set[str] = set()
    sent: set[str] = set()
    either: set[str] = set()
    for path in Path(sidecar.decision.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "reason":
                either |= texts(node.value)
            elif isinstance(node, ast.Call):
                name, of = ast.unparse(node.func), [ast.unparse(argument) for argument in node.args[:1]]
                if name == "Decision" and of in (["Kind.LOCAL"], ["Kind.REMOTE"]):
                    (kept if of == ["Kind.LOCAL"] else sent).update(texts(node.args[1]))
                elif name == "_kept":
                    kept |= texts(node.args[1])
                elif name == "Verdict":
                    either |= {text for word in node.keywords if word.arg == "reason" for text in texts(word.value)}
    assert {"short", "shape", "no_target"} <= kept
    assert kept <= {*KEPT_REASONS}
    assert sent <= {*SENT_REASONS}
    assert kept | sent | either == {*KEPT_REASONS, *SENT_REASONS}
    assert ENGINE_STATUSES > PREFILL_STATUS_RELAYED


def texts(node: ast.expr) -> set[str]:
    """Those that an expression may be: a constant, or either side of a condition."""
    if isinstance(node, ast.IfExp):
        return texts(node.body) | texts(node.orelse)
    return {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()
