"""Two engines that can never transfer KV, because they compute in different types.

A decode engine finds that out anew with each request, after the prompt has been computed by the other; the sidecar
compares the engines before it sends anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from e2e.conftest import (
    LEASE_S,
    Pair,
    Questions,
    eventually,
    idle,
    mended,
    together,
)
from e2e.engines import Rig


@pytest.fixture(scope="module")
def other_rig() -> Iterator[Rig]:
    """A decode engine that computes in another type than the shared prefill engine: another compatibility hash."""
    with Rig("tiny", prefill=0, decode=1, lease_seconds=LEASE_S, decode_flags=["--dtype", "bfloat16"]) as rig:
        yield rig


@pytest.fixture
def mismatched(rig: Rig, other_rig: Rig) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield mended(Pair(rig.prefill[0], other_rig.decode[0], stack))


def test_a_mismatched_pair_prefills_nothing(mismatched: Pair) -> None:
    pair = mismatched
    questions = Questions(pair.decode)
    tap = pair.tap(pair.prefill)
    sidecar = pair.serve(prefill=tap.address)
    eventually(lambda: sidecar.metrics()("prefill_blocked", prefill=tap.address, reason="incompatible") == 1)
    assert "dtype" in sidecar.log
    answers = together([lambda: questions.next().ask(sidecar)] * 12)
    assert {answer.decision for answer in answers} == {"local; reason=incompatible"}
    assert tap.seen == []
    assert pair.pulled_tokens() == 0
    idle(sidecar)
