"""The table of the replaced sidecar's behaviours: every row says same, different or not there, and names tests."""

from __future__ import annotations

import re

import pytest

from tests.unit.tables import check_tests_exist, rows

ROWS = rows("docs/conformance.md", "area")


def test_every_area_is_there() -> None:
    areas = {row[0] for row in ROWS}
    assert {"headers", "paths", "allow-lists", "caps", "retries", "ranks", "ports", "manifest"} <= areas


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}: {row[1]}"[:60])
def test_rows(row: list[str]) -> None:
    assert len(row) == 4
    verdict = re.match(r"same|different: .{20,}|not there", row[2])
    assert verdict, "a behaviour is the same, different with a reason, or not there"
    check_tests_exist(row[3])
