"""The table of the replaced sidecar's behaviours: every row says same, different or not there, and names tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import sidecar

ROOT = Path(sidecar.__file__).parent.parent
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| area |")
]


def test_every_area_is_there() -> None:
    areas = {row[0] for row in ROWS}
    assert {"headers", "paths", "allow-lists", "caps", "retries", "ranks", "ports", "manifest"} <= areas


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}: {row[1]}"[:60])
def test_rows(row: list[str]) -> None:
    assert len(row) == 4
    verdict = re.match(r"same|different: .{20,}|not there", row[2])
    assert verdict, "a behaviour is the same, different with a reason, or not there"
    names = re.findall(r"`([^`]+)::(test_\w+)`", row[3])
    assert names, "a row without a test is a claim"
    assert len(names) == row[3].count("`") / 2
    for path, name in names:
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), (
            f"{path}::{name}"
        )
