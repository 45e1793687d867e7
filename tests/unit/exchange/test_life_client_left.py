"""The client leaves, play by play: at every stage, and what is closed or let to its first byte then."""

import pytest

from sidecar.exchange.commands import CLOSE, PEEK, RELAY, TO_FIRST_BYTE, WAIT, Check, Prefill
from tests.unit.exchange.playbook import (
    LOCAL,
    World,
    connected,
    decoded,
    fault,
    handed_over,
    left,
    prefilled,
    pulling,
    recomputing,
    sent,
    start,
)


def _stages() -> dict[str, tuple[object, object]]:
    return {
        "before anything": (lambda w: w.remote(), CLOSE),
        "prefill": (lambda w: w.remote() >> start << Prefill(w.a), CLOSE),
        "second prefill": (
            lambda w: w.remote() >> start << Prefill(w.a) >> fault("reset") << Prefill(w.b),
            CLOSE,
        ),
        "check": (lambda w: w.remote() >> start << Prefill(w.a) >> prefilled() << Check, WAIT),
        "handoff": (handed_over, CLOSE),
        "pull": (pulling, TO_FIRST_BYTE),
        "pull, peeking": (lambda w: pulling(w) >> decoded(stream=True) << PEEK, TO_FIRST_BYTE),
        "recompute": (recomputing, CLOSE),
        "recompute, sent": (lambda w: recomputing(w) >> connected << None >> sent << None, CLOSE),
        "streaming": (lambda w: pulling(w) >> decoded() << RELAY, CLOSE),
        "local": (lambda w: w.local() >> start << LOCAL >> connected << None >> sent << None, CLOSE),
    }


@pytest.mark.parametrize("stage", _stages())
@pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "fail"])
def test_client_leaves(stage: str, recompute: bool) -> None:
    world = World(recompute=recompute or "recompute" in stage)
    play, expected = _stages()[stage]
    play = play(world)
    failures = [endpoint.breaker._failures for endpoint in world.endpoints]
    assert play >> left << expected
    assert [endpoint.breaker._failures for endpoint in world.endpoints] == failures, "nobody is to blame for it"
    assert play.exchange.faults[-1].row.fault == "client_left"


@pytest.mark.parametrize("stage", _stages())
def test_request_that_ends_without_a_word_gives_everything_back(stage: str) -> None:
    """An exception, a drain: `close` alone."""
    assert _stages()[stage][0](World())


def test_prefill_that_is_closed_is_counted_as_left(world: World) -> None:
    assert world.remote() >> start << Prefill(world.a)
    assert world.outcomes == ["client_left"]
