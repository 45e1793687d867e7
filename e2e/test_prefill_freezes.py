"""The prefill engine is stopped with SIGSTOP: its sockets stay open, it answers nothing, and it may come back.

A decode engine that waits for the KV of a frozen engine waits for ever (vLLM has no transfer timeout), so the
deadlines of the sidecar are all that ends it: `--prefill-timeout` before the handoff, `--pull-timeout` after it.
"""

from __future__ import annotations

import time

from e2e.asking import Asking, Questions, eventually
from e2e.pair import Pair, idle
from e2e.tap import Hold

PREFILL_TIMEOUT_S = 2.0
PULL_TIMEOUT_S = 2.0
COMPUTE_S = 15.0
"""What recomputing a few short prompts takes on a machine that is busy; alone it takes a tenth of a second."""
FLAGS = (
    *("--prefill-timeout", f"{PREFILL_TIMEOUT_S}"),
    *("--pull-timeout", f"{PULL_TIMEOUT_S}"),
    *("--recompute-max-concurrent", "64"),
)
FAIL = ("--on-prefill-failure", "fail")


def test_before_the_prefill(pair: Pair) -> None:
    questions = Questions(pair.decode)
    long = ("--prefill-timeout", "300")  # what answers no probe is not waited for that long
    sidecar, strict = pair.serve(*FLAGS, *long), pair.serve(*FLAGS, *long, *FAIL)
    assert questions.next().ask(sidecar).decision.startswith("remote")
    pair.prefill.stop()
    asking = Asking(sidecar, [questions.next() for _ in range(4)])
    (answer,) = Asking(strict, [questions.next()]).answers(PULL_TIMEOUT_S + COMPUTE_S)
    assert (answer.status, answer.reason_code) == (504, "prefill_peer_silent")
    assert "recompute; reason=prefill_peer_silent" in asking.decisions(PULL_TIMEOUT_S + COMPUTE_S)
    pair.prefill.cont()
    eventually(lambda: questions.next().ask(sidecar).decision.startswith("remote"))
    idle(sidecar)
    idle(strict)


def test_while_decode_waits_for_its_kv(pair: Pair) -> None:
    questions = Questions(pair.decode)
    tap = pair.tap(pair.prefill)
    sidecar = pair.serve(*FLAGS, prefill=tap.address)
    strict = pair.serve(*FLAGS, *FAIL, prefill=tap.address)
    assert questions.next().ask(sidecar).decision.startswith("remote")  # the engines know each other
    hold = Hold(tap, 8)
    recomputed = Asking(sidecar, [questions.next() for _ in range(4)])
    failed = Asking(strict, [questions.next() for _ in range(4)])
    hold.wait_for_all()
    pair.prefill.stop()
    hold.release()
    assert set(recomputed.decisions(PULL_TIMEOUT_S + COMPUTE_S)) == {"recompute; reason=pull_peer_silent"}
    answers = failed.answers(PULL_TIMEOUT_S + COMPUTE_S)
    assert {(answer.status, answer.reason_code) for answer in answers} == {(504, "pull_peer_silent")}
    # The decode engine is as good as new, though the reads that it began are still under way.
    began = time.monotonic()
    questions.next().ask(pair.decode)
    assert time.monotonic() - began < COMPUTE_S
    pair.prefill.cont()
    eventually(lambda: questions.next().ask(sidecar).decision.startswith("remote"), 30.0)
    idle(sidecar)
    idle(strict)
    for engine in (pair.decode, pair.prefill):
        eventually(lambda engine=engine: engine.kv_usage() == 0.0)
