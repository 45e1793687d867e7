"""The threat model's table: every row names tests, and they exist."""

from __future__ import annotations

import pytest

from tests.unit.tables import check_tests_exist, rows

ROWS = rows("docs/trust.md", "who")


def test_every_party_is_there() -> None:
    assert {row[0] for row in ROWS} == {"client", "prefill pod", "neighbour pod"}
    assert all(len(row) == 4 for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}: {row[1]}"[:60])
def test_named_tests_exist(row: list[str]) -> None:
    check_tests_exist(row[3])
