"""What `make docs` writes is what is committed."""

from pathlib import Path

import pytest

from docs import generate, states
from sidecar.exchange.failures import ROWS


@pytest.mark.parametrize("path", generate.outputs(), ids=lambda path: path.name)
def test_generated_files_are_current(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == generate.outputs()[path], "run `make docs`"


def test_every_fault_is_on_an_edge_of_the_diagram() -> None:
    edges = [line for line in states.diagram().splitlines() if "-->" in line]
    for row in ROWS:
        end = states.ENDS[row.then][0]
        (edge,) = [line for line in edges if line.strip().startswith(f"{row.stage} --> {end}: ")]
        assert row.fault in edge.replace("<br/>", " ").rpartition(": ")[2].split(", "), row.reason
