"""What `make docs` writes is what is committed."""

from pathlib import Path

import pytest

from docs import generate


@pytest.mark.parametrize("path", generate.outputs(), ids=lambda path: path.name)
def test_generated_files_are_current(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == generate.outputs()[path], "run `make docs`"
