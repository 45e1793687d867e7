"""The prefill engine is killed, at every moment of a request, and comes back.

A client gets the text that its own engine would have given, or (where the operator wants no recompute) an error
that cannot be taken for an answer; nobody waits longer than the deadlines of the stages; and the engine that comes
back on the same address is used again.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from e2e.conftest import (
    HOST,
    Asking,
    Hold,
    Pair,
    Questions,
    eventually,
    idle,
    together,
)

if TYPE_CHECKING:
    from tests.integration.client import Answer
    from tests.integration.sidecar import Sidecar

AT_ONCE = 10
PLENTY = ("--recompute-max-concurrent", "64")
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
    sidecar = pair.serve(*PLENTY)
    assert questions.next().ask(sidecar).decision.startswith("remote")
    pair.prefill.kill()
    for _ in range(4):
        began = time.monotonic()
        decision = questions.next().ask(sidecar).decision
        assert decision in (
            "recompute; reason=prefill_refused",
            "recompute; reason=prefill_reset",
            "local; reason=no_usable_prefill",
        )
        assert time.monotonic() - began < DEADLINE_S
    comes_back(pair, sidecar, questions)


def test_before_the_prefill_where_nothing_is_recomputed(pair: Pair) -> None:
    questions = Questions(pair.decode)
    sidecar = pair.serve("--on-prefill-failure", "fail")
    pair.prefill.kill()
    first = questions.next().ask_for_better_or_worse(sidecar)
    assert first.status in (502, 503)
    assert first.reason_code in ("prefill_refused", "prefill_none_usable")
    second = questions.next().ask_for_better_or_worse(sidecar)
    assert (second.status, second.reason_code) == (503, "prefill_none_usable")
    assert second.header("retry-after")
    idle(sidecar)


def test_while_it_computes_the_prompts(pair: Pair) -> None:
    questions = Questions(pair.decode, tokens=6000)
    sidecar = pair.serve(*PLENTY)
    asking = Asking(sidecar, [questions.next() for _ in range(4)])
    eventually(lambda: pair.prefill.metrics().total("vllm:num_requests_running") >= 1)
    pair.prefill.kill()
    decisions = asking.decisions(DEADLINE_S)
    assert "recompute; reason=prefill_reset" in decisions, decisions
    idle(sidecar)
    comes_back(pair, sidecar, questions)


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
    tap.honest()
    comes_back(pair, sidecar, questions)


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
    tap.honest()
    comes_back(pair, sidecar, questions)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_under_twenty_streams(pair: Pair, policy: str) -> None:
    """They ask one question after the other, so the kill meets all stages at once."""
    questions = Questions(pair.decode)
    sidecar = pair.serve("--on-prefill-failure", policy, *PLENTY)
    stop = threading.Event()

    def stream() -> list[Answer]:
        answers = []
        while not stop.is_set():
            began = time.monotonic()
            answers.append(questions.next(streamed=True).ask_for_better_or_worse(sidecar, DEADLINE_S))
            assert time.monotonic() - began < DEADLINE_S
            if answers[-1].status != 200:
                stop.wait(0.2)  # as a client would that was told to retry
        return answers

    def kill() -> None:
        eventually(lambda: sidecar.metrics()("requests_total", decision="remote") >= 20)
        pair.prefill.kill()
        wanted = {"recompute": "recompute", "fail": "refused"}[policy]
        eventually(lambda: sidecar.metrics()("requests_total", decision=wanted) >= 1)
        time.sleep(1.0)
        stop.set()

    def kill_and_stop() -> list[Answer]:
        try:
            kill()
        finally:
            stop.set()
        return []

    answers = [answer for client in together([kill_and_stop, *[stream] * 20]) for answer in client]
    statuses = {answer.status for answer in answers}
    assert statuses <= ({200} if policy == "recompute" else {200, 502, 503, 504})
    assert 200 in statuses
    idle(sidecar)
    if policy == "recompute":
        comes_back(pair, sidecar, questions)


def test_replaced_while_nobody_asks(pair: Pair) -> None:
    """Stale connections, an old engine id, old metadata: the very next request must not notice."""
    questions = Questions(pair.decode)
    sidecar = pair.serve()
    assert questions.next().ask(sidecar).decision.startswith("remote")
    pair.prefill.restart()
    time.sleep(1.5)  # the side channel is tried again within a second
    for _ in range(3):
        before = pair.pulled_tokens()
        assert questions.next().ask(sidecar).decision == f"remote; prefill={HOST}:{pair.prefill.port}"
        assert pair.pulled_tokens() > before
    idle(sidecar)
