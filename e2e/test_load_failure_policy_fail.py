"""A decode engine that answers with an error when it cannot load KV, as vLLM does by default.

It says so late: a stream has its 200 by then and an error as its first event, a whole answer is a 500. The client
must see neither.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.asking import Asking, Questions, eventually
from e2e.pair import LEASE_S, Pair, idle, paired
from e2e.rig import Rig
from e2e.tap import Hold

AT_ONCE = 8
REASONS = {
    "pull_error_event",  # streamed
    "pull_reset",  # streamed by /v1/responses, which says that it begins, and then hangs up
    "pull_server_error",  # whole
}
FLAGS = ("--recompute-max-concurrent", "64", "--pull-timeout", "20")


@pytest.fixture(scope="module")
def strict_rig() -> Iterator[Rig]:
    with Rig("tiny", prefill=0, decode=1, lease_seconds=LEASE_S, load_failure_policy="fail") as rig:
        yield rig


@pytest.fixture
def pair(rig: Rig, strict_rig: Rig) -> Iterator[Pair]:
    with paired(rig.prefill[0], strict_rig.decode[0]) as pair:
        yield pair


def test_killed_in_mid_transfer(pair: Pair) -> None:
    """Both policies: the local text, or a status and no stream."""
    questions = Questions(pair.decode)
    tap = pair.tap(pair.prefill)
    sidecar = pair.serve(*FLAGS, prefill=tap.address)
    strict = pair.serve(*FLAGS, "--on-prefill-failure", "fail", prefill=tap.address)
    assert questions.next().ask(sidecar).decision.startswith("remote")  # the engines know each other
    hold = Hold(tap, 2 * AT_ONCE)
    recomputed = Asking(sidecar, [questions.next() for _ in range(AT_ONCE)])
    failed = Asking(strict, [questions.next() for _ in range(AT_ONCE)])
    hold.wait_for_all()
    pair.prefill.stop()
    hold.release()
    eventually(lambda: pair.waiting_for_kv() == 2 * AT_ONCE)
    pair.prefill.kill()
    assert set(recomputed.decisions()) == {f"recompute; reason={reason}" for reason in REASONS}
    by_reset = [decision["api"] for decision in sidecar.decisions() if decision["reason"] == "pull_reset"]
    assert set(by_reset) == {"responses"}
    answers = failed.answers()
    assert {(answer.status, answer.reason_code) for answer in answers} == {(502, reason) for reason in REASONS}
    idle(sidecar)
    idle(strict)


def test_without_the_relay_too(pair: Pair) -> None:
    """Nothing is known of the side channel then, so the engine is asked to pull from an engine that is dead."""
    questions = Questions(pair.decode)
    tap = pair.tap(pair.prefill)
    sidecar = pair.serve(*FLAGS, "--nixl-relay", "off", prefill=tap.address)
    assert questions.next().ask(sidecar).decision.startswith("remote")
    hold = Hold(tap, AT_ONCE)
    asking = Asking(sidecar, [questions.next() for _ in range(AT_ONCE)])
    hold.wait_for_all()
    pair.prefill.kill()
    hold.release()
    assert {decision.partition(";")[0] for decision in asking.decisions()} == {"recompute"}
    idle(sidecar)
