"""Percentiles over all rounds, verdicts, and the report that is made of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest

from e2e.decide import numbers, report
from e2e.decide.__main__ import main
from e2e.decide.numbers import GAP, TTFT
from e2e.decide.trace import CHAT, DOCUMENT
from e2e.latency.publish import compact
from e2e.rounds import Spread
from tests.unit.latency.samples import request, sample
from tests.unit.latency.test_report import MACHINE
from tests.unit.latency.test_report import SETTINGS as LATENCY_SETTINGS

if TYPE_CHECKING:
    from pathlib import Path

REMOTE, LOCAL = "remote; prefill=10.0.0.5:8000", "local; reason=cached"
SETTINGS = {**LATENCY_SETTINGS, "load_at_end": 0.4}


def way(mode: str, gap_ms: float, *ttfts_ms: float, decision: str = REMOTE, **more: Any) -> dict[str, Any]:
    requests = [request(*[gap_ms] * 10, kind=CHAT, ttft_ms=ttft, decision=decision) for ttft in ttfts_ms]
    return sample(mode, *requests, **more)


def round_of(auto_gap_ms: float = 24.0, auto_ttft_ms: float = 80.0, trouble: str = "") -> dict[str, Any]:
    return {
        "remote": way("remote", 20.0, 100.0, 300.0),
        "auto": way("auto", auto_gap_ms, auto_ttft_ms, 290.0, decision=LOCAL, trouble=trouble),
        "llm-d-rule": way("llm-d-rule", 24.0, 160.0, 290.0),
    }


def test_percentiles_are_of_all_rounds_together() -> None:
    rounds = [{"auto": way("auto", 20, 100)}, {"auto": way("auto", 40, 300, 500)}, {"remote": way("remote", 1, 1)}]
    assert numbers.pooled(rounds, "auto", TTFT, 50) == Spread(300, 100, 400)
    assert numbers.pooled(rounds, "auto", GAP, 50) == Spread(40, 20, 40)
    assert numbers.pooled(rounds, "auto", TTFT, 50, DOCUMENT) is None
    assert numbers.pooled(rounds, "local", TTFT, 50) is None


def test_ratios_are_of_rounds_that_have_both() -> None:
    rounds = [round_of(24), round_of(30), {"auto": way("auto", 500, 1)}]
    measured = numbers.ratio(rounds, "auto", "remote", GAP, 99)
    assert measured == Spread(pytest.approx(1.5), pytest.approx(1.2), pytest.approx(1.5))
    assert numbers.ratio(rounds, "auto", "local", GAP, 99) is None


def test_what_is_kept_holds_and_what_is_not_does_not() -> None:
    assert [verdict.word for verdict in numbers.verdicts([round_of()])] == ["holds"] * 3
    gaps, p50, p99 = numbers.verdicts([round_of(auto_gap_ms=27, auto_ttft_ms=120)])
    assert [gaps.holds, p50.holds, p99.holds] == [False, False, True]
    assert not any(verdict.holds for verdict in numbers.verdicts([round_of(trouble="no token was pulled")]))
    assert {verdict.word for verdict in numbers.verdicts([])} == {"not measured"}


def test_better_and_worse_begin_beyond_the_noise() -> None:
    ratios = [0.94, 0.96, 1.04, 1.06]
    words = [numbers.word(Spread(one, one, one)) for one in ratios]
    assert words == ["better", "equal", "equal", "worse"]
    assert numbers.word(None) == "not measured"


def make(*rounds: dict[str, Any], failed: dict[str, str] | None = None) -> dict[str, Any]:
    return report.document(MACHINE, SETTINGS, {"rounds": list(rounds), "failed": failed or {}})


def rows(text: str, first: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith(f"| {first} |")
    ]


def test_the_report_says_what_holds_against_whom_and_what_failed() -> None:
    text = report.markdown(make(round_of(), round_of(), failed={"local": "ended | with 1"}), [])
    [promise] = rows(text, "p99 gap between tokens, auto ÷ always remote")
    assert promise[1:] == ["≤ 1.3", "1.20", "holds"]
    against = rows(text, "llm-d-rule")[0]
    assert against[1:] == ["2", "0.82 better", "1.00 equal", "1.00 equal"]
    assert any("ended / with 1" in cell for row in rows(text, "local") for cell in row)
    assert any("4 local; reason=cached" in cell for row in rows(text, "auto") for cell in row)
    [kinds] = [row for row in rows(text, "auto") if "100%" in row[1] and "/" in row[1]]
    assert kinds[1] == "185 / 290, 100%"


def test_plots_are_drawings_and_the_samples_make_the_same_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = make(round_of(), round_of(30))
    drawn = report.plots(document)
    assert set(drawn) == {"ttft.svg", "gaps.svg"}
    for svg in drawn.values():
        ElementTree.fromstring(svg)
    source = tmp_path / "decide.json"
    source.write_text(compact(document))
    assert json.loads(source.read_text()) == document
    assert main(["--from", str(source), "--output", str(tmp_path / "again")]) == 0
    again = (tmp_path / "again" / "decide.md").read_text()
    assert again == report.markdown(document, list(drawn))
    assert again.strip() in capsys.readouterr().out
