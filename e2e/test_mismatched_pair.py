"""Two engines that can never transfer KV, or only a wrong one: they compute in different types, or their blocks
hold different numbers of tokens.

A decode engine finds out about the type anew with each request, after the prompt has been computed by the other; of
the block size it notices nothing and answers with other text. The sidecar compares the engines before it sends.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.asking import Questions, eventually, together
from e2e.pair import LEASE_S, Pair, idle, paired
from e2e.rig import Rig


@pytest.fixture(params=[("--dtype", "bfloat16"), ("--block-size", "64")], ids=" ".join)
def mismatched(rig: Rig, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A decode engine that does not fit the shared prefill engine."""
    with (
        Rig("tiny", prefill=0, decode=1, lease_seconds=LEASE_S, decode_flags=request.param) as other,
        paired(rig.prefill[0], other.decode[0]) as pair,
    ):
        yield pair


def test_nothing_is_prefilled_elsewhere(mismatched: Pair) -> None:
    pair = mismatched
    questions = Questions(pair.decode)
    tap = pair.tap(pair.prefill)
    sidecar = pair.serve(prefill=tap.address)
    eventually(lambda: sidecar.metrics()("prefill_blocked", prefill=tap.address, reason="incompatible") == 1)
    assert "dtype" in sidecar.log or "block" in sidecar.log  # what to change is said
    answers = together([lambda: questions.next().ask(sidecar)] * 12)
    assert {answer.decision for answer in answers} == {"local; reason=incompatible"}
    assert tap.seen == []
    assert pair.pulled_tokens() == 0
    idle(sidecar)
