"""The warm-up on real engines: they have met when the first user's request comes."""

from __future__ import annotations

from e2e.asking import Questions, eventually
from e2e.pair import Pair, idle


def test_the_first_request_shakes_no_hands(pair: Pair) -> None:
    pair.decode.restart()
    questions = Questions(pair.decode)
    sidecar = pair.serve("--warm-up", "on", "--warm-up-timeout", "60")
    metrics = sidecar.metrics()
    assert metrics("warmups_total", outcome="warm") == 1
    assert metrics("requests_total") == 0, "the warm-up is nobody's request"
    shaken = metrics("nixl_handshakes_total")
    assert shaken >= 1
    pulled = pair.pulled_tokens()
    assert questions.next().ask(sidecar).decision.startswith("remote")
    assert pair.pulled_tokens() > pulled
    assert sidecar.metrics()("nixl_handshakes_total") == shaken

    pair.prefill.restart()  # another engine at the same address: met again, in the background
    eventually(lambda: sidecar.metrics()("warmups_total", outcome="warm") == 2, 60.0)
    shaken = sidecar.metrics()("nixl_handshakes_total")
    assert questions.next().ask(sidecar).decision.startswith("remote")
    assert sidecar.metrics()("nixl_handshakes_total") == shaken
    idle(sidecar)
