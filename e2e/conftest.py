"""What most end-to-end tests share: one pair of real engines, and a sidecar between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

# Their asserts are as talkative as those of the tests.
pytest.register_assert_rewrite("e2e.asking", "e2e.pair")

from e2e.pair import LEASE_S, Pair, idle, paired  # noqa: E402
from e2e.rig import Rig  # noqa: E402

if TYPE_CHECKING:
    from tests.integration.sidecar import Sidecar


@pytest.fixture(scope="session")
def rig() -> Iterator[Rig]:
    """The engines of most tests. A start takes seconds, so they are shared, and mended by `pair`."""
    with Rig("tiny", prefill=1, decode=1, lease_seconds=LEASE_S) as rig:
        yield rig


@pytest.fixture
def pair(rig: Rig) -> Iterator[Pair]:
    """The shared engines, both healthy, whatever the test before did to them."""
    with paired(rig.prefill[0], rig.decode[0]) as pair:
        yield pair


@pytest.fixture(scope="module")
def sidecar(rig: Rig) -> Iterator[Sidecar]:
    """One for all tests of a file, between the shared engines."""
    with paired(rig.prefill[0], rig.decode[0]) as pair:
        sidecar = pair.serve()
        yield sidecar
        idle(sidecar)
