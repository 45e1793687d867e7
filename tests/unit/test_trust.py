"""The threat model's table: every row names tests, and they exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import sidecar

ROOT = Path(sidecar.__file__).parent.parent
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "trust.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| who |")
]


def test_every_party_is_there() -> None:
    assert {row[0] for row in ROWS} == {"client", "prefill pod", "neighbour pod"}
    assert all(len(row) == 4 for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}: {row[1]}"[:60])
def test_named_tests_exist(row: list[str]) -> None:
    names = re.findall(r"`([^`]+)::(test_\w+)`", row[3])
    assert names, "a row without a test is a claim"
    assert len(names) == row[3].count("`") / 2
    for path, name in names:
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), (
            f"{path}::{name}"
        )
