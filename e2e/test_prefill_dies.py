"""The prefill engine is killed, at every moment of a request, and comes back.

A client gets the text that its own engine would have given, or (where the operator wants no recompute) an error
that cannot be taken for an answer; nobody waits longer than the deadlines of the stages; and the engine that comes
back on the same address is used again. Restarts are dear, so both policies meet each kill side by side.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import pytest

from e2e.asking import Asking, Questions, eventually, together
from e2e.pair import LEASE_S, Pair, idle, paired
from e2e.rig import Rig
from e2e.tap import Hold

if TYPE_CHECKING:
    from tests.integration.client import Answer
    from tests.integration.sidecar import Sidecar

AT_ONCE = 10
PLENTY = ("--recompute-max-concurrent", "64")
FAIL = ("--on-prefill-failure", "fail")
DEADLINE_S = 30.0
"""Far above what each stage allows below, far beneath a hang."""


def comes_back(pair: Pair, sidecar: Sidecar, questions: Questions) -> None:
    """After a restart on the same address remote prefills work again, and no request fails meanwhile."""
    pair.prefill.restart()

    def remote() -> bool:
        return questions.next().ask(sidecar).decision.startswith("remote")

    eventually(remote, DEADLINE_S)
    before = pair.pulled_tokens()
    assert remote()
    assert pair.pulled_tokens() > before
    idle(sidecar)


def test_before_the_prefill(pair: Pair) -> None:
    questions = Questions(pair.decode)
    sidecar, strict = pair.serve(*PLENTY), pair.serve(*FAIL)
    for one in (sidecar, strict):
        assert questions.next().ask(one).decision.startswith("remote")
    pair.prefill.kill()

    decisions = [
        decision for _ in range(4) for decision in Asking(sidecar, [questions.next()]).decisions(DEADLINE_S)
    ]
    assert set(decisions) <= {
        "recompute; reason=prefill_refused",
        "recompute; reason=prefill_reset",  # on a connection from before
        "local; reason=no_usable_prefill",
    }
    first, second = (Asking(strict, [questions.next()]).answers(DEADLINE_S)[0] for _ in range(2))
    assert (first.status, first.reason_code) in (
        (502, "prefill_refused"),
        (502, "prefill_reset"),
        (503, "prefill_none_usable"),
    )
    assert (second.status, second.reason_code) == (503, "prefill_none_usable")
    assert second.header("retry-after")
    idle(strict)
    comes_back(pair, sidecar, questions)


def test_while_it_computes_the_prompts(pair: Pair) -> None:
    questions = Questions(pair.decode, tokens=6000)
    sidecar = pair.serve(*PLENTY)
    asking = Asking(sidecar, [questions.next() for _ in range(4)])
    eventually(lambda: pair.prefill.metrics().total("vllm:num_requests_running") >= 1)
    pair.prefill.kill()
    assert "recompute; reason=prefill_reset" in asking.decisions(DEADLINE_S)
    idle(sidecar)


def test_between_the_legs(pair: Pair) -> None:
    questions = Questions(pair.decode)
    tap = pair.tap(pair.prefill)
    sidecar = pair.serve(*PLENTY, prefill=tap.address)
    hold = Hold(tap, AT_ONCE)
    asking = Asking(sidecar, [questions.next() for _ in range(AT_ONCE)])
    hold.wait_for_all()
    pair.prefill.kill()
    hold.release()
    asking.decisions(DEADLINE_S)
    idle(sidecar)


def test_in_mid_transfer(pair: Pair) -> None:
    """Frozen first, so that the reads are surely under way when it is killed."""
    questions = Questions(pair.decode, tokens=2000)
    tap = pair.tap(pair.prefill)
    sidecar = pair.serve(*PLENTY, prefill=tap.address)
    assert questions.next().ask(sidecar).decision.startswith("remote")  # the engines know each other
    hold = Hold(tap, AT_ONCE)
    asking = Asking(sidecar, [questions.next() for _ in range(AT_ONCE)])
    hold.wait_for_all()
    pair.prefill.stop()
    hold.release()
    eventually(lambda: pair.waiting_for_kv() == AT_ONCE)
    pair.prefill.kill()
    asking.decisions(DEADLINE_S)
    idle(sidecar)


def test_under_twenty_streams_of_each_policy(pair: Pair) -> None:
    """They ask one question after the other, so the kill meets all stages at once."""
    questions = Questions(pair.decode)
    sidecar, strict = pair.serve(*PLENTY), pair.serve(*FAIL)
    stop = threading.Event()

    def stream(one: Sidecar) -> list[Answer]:
        answers = []
        while not stop.is_set():
            asking = Asking(one, [questions.next(streamed=True)])
            answers += asking.answers(DEADLINE_S)
            if answers[-1].status != 200:
                stop.wait(0.2)  # as a client would that was told to retry
        return answers

    def kill() -> list[Answer]:
        try:
            for one in (sidecar, strict):
                eventually(lambda one=one: one.metrics()("requests_total", decision="remote") >= 20)
            pair.prefill.kill()
            eventually(lambda: sidecar.metrics()("requests_total", decision="recompute") >= 1)
            eventually(lambda: strict.metrics()("requests_total", decision="refused") >= 1)
            time.sleep(1.0)
        finally:
            stop.set()
        return []

    streams = [partial(stream, one) for one in (sidecar, strict) for _ in range(20)]
    _, *answers = together([kill, *streams])
    recomputed = {answer.status for client in answers[:20] for answer in client}
    failed = {answer.status for client in answers[20:] for answer in client}
    assert recomputed == {200}
    assert 200 in failed
    assert failed <= {200, 502, 503, 504}
    idle(strict)
    idle(sidecar)
    comes_back(pair, sidecar, questions)


def test_replaced_while_nobody_asks(pair: Pair) -> None:
    """Stale connections, an old engine id, old metadata: no request may notice."""
    questions = Questions(pair.decode)
    sidecar = pair.serve()
    assert questions.next().ask(sidecar).decision.startswith("remote")
    comes_back(pair, sidecar, questions)
    assert sidecar.metrics()("fallbacks_total") == 0


@pytest.fixture
def second(rig: Rig) -> Iterator[Pair]:
    """Another prefill engine for the shared decode engine."""
    with (
        Rig("tiny", prefill=1, decode=0, lease_seconds=LEASE_S) as other,
        paired(other.prefill[0], rig.decode[0]) as pair,
    ):
        yield pair


def test_another_prefill_engine_takes_over(pair: Pair, second: Pair) -> None:
    questions = Questions(pair.decode)
    sidecar = pair.serve("--prefill", second.prefill.address)
    both = {f"remote; prefill={engine.address}" for engine in (pair.prefill, second.prefill)}
    assert set(Asking(sidecar, [questions.next() for _ in range(8)]).decisions()) == both
    second.prefill.kill()
    for _ in range(3):
        asking = Asking(sidecar, [questions.next() for _ in range(8)])
        assert set(asking.decisions(DEADLINE_S)) == {f"remote; prefill={pair.prefill.address}"}
    assert sidecar.metrics()("fallbacks_total") == 0
    idle(sidecar)
