"""The prefill engine is well and answers, but its side channel is dead: nothing can be pulled from it.

A decode engine finds that out by itself, after 5 s for each request; the sidecar knows before.
"""

from __future__ import annotations

import time

from e2e.asking import Questions
from e2e.pair import Pair, idle
from e2e.side_channel import wound
from sidecar.prefill.warmup import PROMPT_TOKENS

HANDSHAKE_TIMEOUT_S = 5.0
"""Of a decode engine (vLLM 0.32, nixl/base_worker.py), for each rank."""


def test_a_dead_listener_costs_no_time(pair: Pair) -> None:
    questions = Questions(pair.decode)
    local_s = timed(questions, pair.decode)
    pair.prefill.restart()  # the decode engine has not shaken hands with it yet
    wound(pair.prefill)
    pair.closing(pair.prefill.kill)  # it is beyond mending
    assert pair.prefill.healthy()
    tap = pair.tap(pair.prefill)

    # The reason: what it costs without the relay.
    without = pair.serve("--nixl-relay", "off", prefill=tap.address)
    assert timed(questions, without) > HANDSHAKE_TIMEOUT_S - 0.1
    tap.seen.clear()

    sidecar = pair.serve(prefill=tap.address)
    for pause_s in (0.0, 1.5, 0.0):  # longer than a breaker's first
        assert timed(questions, sidecar) < local_s + HANDSHAKE_TIMEOUT_S / 2
        time.sleep(pause_s)
    decisions = [decision["reason"] for decision in reversed(sidecar.decisions())]
    assert decisions == ["handoff_side_channel_dead", *["no_usable_prefill"] * 2]
    # Nothing is paid for twice once it is known. (A few token ids now and then ask where the side channel is.)
    prompts = [one for one in tap.seen if one.json.get("prompt") != [1] * PROMPT_TOKENS]
    assert len(prompts) == 1
    assert sidecar.metrics()("fallbacks_total", reason="side_channel_dead") == 1
    idle(sidecar)


def timed(questions: Questions, where: object) -> float:
    question = questions.next()
    began = time.monotonic()
    question.ask(where)  # type: ignore[arg-type]
    return time.monotonic() - began
