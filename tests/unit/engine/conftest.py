"""Engines for the simulator's own tests: small, and with everything that takes seconds shortened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.engine import ThreadedEngine

QUICK = {
    "num_blocks": 256,
    "handshake_timeout_seconds": 0.3,
    "death_seconds": 0.05,
    "kv_load_failure_policy": "recompute",
}

Start = Callable[..., ThreadedEngine]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts engines that end with the test."""
    with ExitStack() as stack:

        def started(**options: Any) -> ThreadedEngine:
            return stack.enter_context(ThreadedEngine(**{**QUICK, **options}))

        yield started


@pytest.fixture
def prefill(start: Start) -> ThreadedEngine:
    return start()


@pytest.fixture
def decode(start: Start) -> ThreadedEngine:
    return start()
