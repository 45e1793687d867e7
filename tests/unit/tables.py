"""Tables of the documents that name tests: their rows, and whether those tests exist."""

from __future__ import annotations

import re
from pathlib import Path

import sidecar

ROOT = Path(sidecar.__file__).parent.parent


def rows(document: str, first_head: str) -> list[list[str]]:
    """Cells of all rows of the only table; `first_head` is over its first column."""
    lines = (ROOT / document).read_text(encoding="utf-8").splitlines()
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("| ") and not line.startswith(f"| {first_head} |")
    ]


def check_tests_exist(cell: str) -> None:
    """It names tests, `path::name` each, and nothing else in this manner."""
    names = re.findall(r"`([^`]+)::(test_\w+)`", cell)
    assert names, "a row without a test is a claim"
    assert len(names) == cell.count("`") / 2
    for path, name in names:
        text = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^def {name}\(", text, re.MULTILINE), f"{path}::{name}"
