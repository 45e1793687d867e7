"""What the soak says of its samples."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from e2e import soak
from e2e.soak import Sample, Soaked
from tests.unit.latency.test_report import MACHINE

REST = Sample(at_s=0, sent=100, rss_mib=40, descriptors=20, threads=3, tasks=12, inflight=0)


def soaked(rise_mib_per_hour: float = 0.0, **after: int) -> Soaked:
    samples = [
        replace(REST, at_s=at * 60.0, rss_mib=40 + rise_mib_per_hour * at / 60, descriptors=90, tasks=30 + at % 2)
        for at in range(60)
    ]
    return Soaked(3600, 1, 1200, samples, REST, replace(REST, **after), Counter({"200 remote": 10, "cut": 1}))


def test_the_slope_of_a_line_is_found_in_noise() -> None:
    line = soak.fit([(x, 3 * x + (-1) ** x) for x in range(100)])
    assert line.slope == pytest.approx(3, abs=0.01)
    assert line.error == pytest.approx(0.0035, rel=0.02)  # 1 / sqrt(sum of squares of x)
    assert [line.rises_by(limit) for limit in (2.9, 3.0)] == [True, False]
    for few in ([], [(1, 5)], [(1, 5), (2, 7)], [(1, 5), (1, 6), (1, 7)]):
        assert soak.fit(few) == soak.Line(0, 0)


@pytest.mark.parametrize(("rise", "word"), [(0.9, "flat"), (1.1, "**RISES**"), (-5.0, "flat")])
def test_memory_may_rise_by_a_mebibyte_an_hour(rise: float, word: str) -> None:
    assert soak.lines_per_hour(soaked(rise).samples)["rss_mib"].slope == pytest.approx(rise)
    assert [row[-1] for row in soak.verdicts(soaked(rise))] == [word, "flat", "flat"]


def test_what_stays_open_is_a_problem() -> None:
    assert soak.problems(soaked()) == []
    assert soak.problems(soaked(descriptors=19, tasks=11)) == []
    assert soak.problems(soaked(descriptors=21, inflight=1)) == [
        "descriptors: 20 before, 21 after",
        "inflight: 0 before, 1 after",
    ]
    assert soak.problems(Soaked(1, 1)) == ["it did not come to rest"]


def test_the_report_says_so() -> None:
    good = soak.markdown(soaked(), MACHINE, "today")
    assert "Every answer was one that the failure table allows" in good
    assert "| RSS, MiB | 40.0 → 40.0 | +0.00 ± 0.00 (limit 1) | flat |" in good
    assert "![](soak.svg)" in good
    assert "with those of 20 minutes before it, which are not measured" in good
    real = soak.markdown(soaked(), MACHINE, "today", real=True)
    assert "`python -m e2e.soak --real --minutes 60 --seed 1 --write`" in real
    assert "![](soak-real.svg)" in real
    bad = soak.markdown(soaked(2, tasks=13), MACHINE, "today")
    assert "**RISES**" in bad
    assert "- tasks: 12 before, 13 after" in bad


def test_all_of_it_can_be_kept() -> None:
    kept = json.loads(soak.as_json(soaked(), MACHINE))
    assert kept["seen"] == {"200 remote": 10, "cut": 1}
    assert len(kept["samples"]) == 60
    assert kept["before"]["rss_mib"] == 40
    assert kept["machine"] == MACHINE


def test_the_curves_are_a_drawing() -> None:
    svg = soak.plot(soaked())
    assert svg is not None
    assert len(ElementTree.fromstring(svg).findall("{*}polyline")) == 4
    assert soak.plot(Soaked(1, 1)) is None
