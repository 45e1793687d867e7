"""The warm-up: the engines of a new pair meet before a user's request has to make them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from sidecar.prefill.warmup import TRIAL_EVERY_S
from tests.engine import Fault, ThreadedEngine
from tests.integration.apis import COMPLETIONS
from tests.integration.sidecar import Sidecar, completion, eventually

Started = Callable[..., Sidecar]


@pytest.fixture
def prefill() -> Iterator[ThreadedEngine]:
    with ThreadedEngine() as engine:
        yield engine


@pytest.fixture
def decode() -> Iterator[ThreadedEngine]:
    with ThreadedEngine() as engine:
        yield engine


@pytest.fixture
def started(prefill: ThreadedEngine, decode: ThreadedEngine) -> Iterator[Started]:
    """A sidecar that knows where the side channels are."""
    with ExitStack() as stack:

        def start(*flags: str, ready: str = "/readyz", address: str = "") -> Sidecar:
            sidecar = Sidecar(
                *("--model-server-port", str(decode.port), "--disagg", "on", "--warm-up", "on"),
                *("--prefill", address or prefill.address),
                *("--prefill-side-channel-port", str(prefill.side_channel_port)),
                *("--local-side-channel", f"127.0.0.1:{decode.side_channel_port}"),
                *flags,
                ready=ready,
            )
            stack.callback(sidecar.stop)
            return sidecar

        yield start


def posts(engine: ThreadedEngine) -> int:
    return sum(1 for one in engine.requests if one.method == "POST")


def test_engines_have_met_when_the_sidecar_is_ready(
    started: Started, prefill: ThreadedEngine, decode: ThreadedEngine
) -> None:
    sidecar = started()
    assert (posts(prefill), posts(decode), decode.handshakes_tried) == (1, 1, 1)
    assert prefill.held_blocks == 0
    assert sidecar.metrics()("warmups_total", outcome="warm") == 1
    # The warm-up is nobody's request.
    assert sidecar.metrics()("requests_total") == 0
    assert sidecar.decisions() == []
    assert sidecar.ask("POST", COMPLETIONS, completion()).decision.startswith("remote")
    assert decode.handshakes_tried == 1


def test_endpoint_known_by_name(started: Started, prefill: ThreadedEngine) -> None:
    """Its handoffs name the address behind the name, as the connection does."""
    sidecar = started(address=f"localhost:{prefill.port}")
    assert sidecar.metrics()("warmups_total", outcome="warm") == 1


def test_once_for_each_engine(started: Started, prefill: ThreadedEngine, decode: ThreadedEngine) -> None:
    """Not again while it is the same engine; again when another comes up at its address."""
    sidecar = started()
    time.sleep(0.6)
    assert posts(prefill) == 1
    prefill.restart()
    eventually(lambda: sidecar.metrics()("warmups_total", outcome="warm") == 2, 10)
    assert decode.handshakes_tried == 2


@pytest.mark.parametrize("warm_up", ["on", "off"])
def test_engine_that_comes_back_with_another_side_channel_port(
    started: Started, prefill: ThreadedEngine, warm_up: str
) -> None:
    """No request is sent to an endpoint whose side channel is dead, so none could bring the new port."""
    sidecar = started("--warm-up", warm_up)
    assert sidecar.ask("POST", COMPLETIONS, completion()).decision.startswith("remote")
    port = prefill.port
    prefill.kill()
    eventually(lambda: sidecar.metrics()("prefill_blocked", reason="side_channel_dead") == 1, 10)
    with ThreadedEngine(port=port) as successor:
        assert successor.side_channel_port != prefill.side_channel_port
        eventually(
            lambda: sidecar.metrics()("prefill_blocked", reason="side_channel_dead") == 0, TRIAL_EVERY_S + 10
        )
        assert sidecar.ask("POST", COMPLETIONS, completion()).decision.startswith("remote")
        assert posts(successor) == 2


def test_off(started: Started, prefill: ThreadedEngine, decode: ThreadedEngine) -> None:
    started("--disagg", "off")
    time.sleep(0.5)
    assert posts(prefill) == posts(decode) == 0


@pytest.mark.parametrize(
    "fault",
    [
        Fault(silence=True),
        Fault(handoff=lambda params: {**params, "remote_port": 0}),
        Fault(status=200, body=b"\xff\x00"),
    ],
    ids=["silent", "bad handoff", "no JSON"],
)
def test_a_warm_up_that_fails_holds_nothing_up(
    started: Started, prefill: ThreadedEngine, decode: ThreadedEngine, fault: Fault
) -> None:
    """Case 37: prefill never matters for long. The log has a line, requests go on, the decode engine is safe."""
    prefill.fault(fault, path=COMPLETIONS)
    began = time.monotonic()
    sidecar = started("--warm-up-timeout", "1", "--prefill-timeout", "0.3")
    assert time.monotonic() - began < 8
    eventually(lambda: "warm-up" in sidecar.log)
    assert sidecar.ask("POST", COMPLETIONS, completion()).status == 200
    assert decode.alive


def test_decode_that_fails_a_warm_up(started: Started, prefill: ThreadedEngine, decode: ThreadedEngine) -> None:
    decode.faults.once(Fault(status=500), path=COMPLETIONS)
    sidecar = started()
    eventually(lambda: sidecar.metrics()("warmups_total", outcome="decode_failed") == 1)
    assert sidecar.ask("POST", COMPLETIONS, completion()).decision.startswith("remote")
