"""A sidecar that may open no more descriptors: it says so and what to change, and blames nobody for it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.engine import Fault, ThreadedEngine
from tests.integration.apis import COMPLETIONS
from tests.integration.sidecar import Rig, Sidecar, completion, eventually, quick
from tests.scarce import no_descriptors

if TYPE_CHECKING:
    from tests.integration.client import Answer, Client

KEEPS = (*quick(), "--engine-idle-timeout", "30")
"""What is idle stays: which connections must be made is for the test to say."""
SAID = r"out of file descriptors: raise the limit \(now \d+\)"


@contextmanager
def settled(sidecar: Sidecar) -> Iterator[None]:
    """`no_descriptors`, once what has just ended is closed."""
    time.sleep(0.3)
    with no_descriptors(sidecar.process.pid):
        yield


def ask(client: Client, rig: Rig) -> Answer:
    """On a connection that is there."""
    client.request("POST", COMPLETIONS, completion(), rig.headers())
    return client.answer("POST")


def check_innocent(rig: Rig) -> None:
    """Nothing is held against the prefill endpoint, and it serves the next request."""
    assert f"prefill endpoint {rig.prefill.address}" not in rig.sidecar.log
    assert rig.sidecar.metrics()("breaker_state", prefill=rig.prefill.address) == 0
    assert not rig.sidecar.metrics()("prefill_blocked", prefill=rig.prefill.address)
    answer = rig.post(COMPLETIONS, completion())
    assert (answer.status, answer.decision) == (200, f"remote; prefill={rig.prefill.address}")


def test_no_connection_to_prefill(rigged: Callable[..., Rig]) -> None:
    """Recomputed here, where a connection is there; said once in a while, not for each request."""
    rig = rigged(*KEEPS)
    target, rig.target = rig.target, ""
    with rig.sidecar.connect() as client:
        assert ask(client, rig).status == 200  # leaves a connection to the decode engine
        rig.target = target
        with settled(rig.sidecar):
            for _ in range(5):
                answer = ask(client, rig)
                assert (answer.status, answer.decision) == (200, "recompute; reason=prefill_none_usable")
    assert not rig.prefilled()
    lines = [line for line in rig.sidecar.log.splitlines() if "ERROR" in line and re.search(SAID, line)]
    assert len(lines) == 1
    check_innocent(rig)


def test_no_connection_to_decode(rigged: Callable[..., Rig]) -> None:
    rig = rigged(*quick(), "--engine-idle-timeout", "0.2")
    rig.target = ""
    with rig.sidecar.connect() as client:
        assert ask(client, rig).status == 200
        time.sleep(1.0)  # its connection to the engine is gone
        with settled(rig.sidecar):
            answer = ask(client, rig)
    assert (answer.status, answer.header("retry-after")) == (503, "2")
    assert answer.reason_code == "decode_unreachable"
    assert re.search(SAID, answer.json["error"]["message"])
    assert "engine is not there" not in rig.sidecar.log
    assert rig.sidecar.admin("GET", "/readyz")[0] == 200


def test_no_connection_to_the_side_channel(rigged: Callable[..., Rig]) -> None:
    """A handoff that cannot be checked is not passed on, and that says nothing about who it came from."""
    rig = rigged(*KEEPS, "--drain-timeout", "5")  # a process of its own: nothing is known of the side channel
    with rig.sidecar.connect() as client:
        rig.prefill.fault(Fault(status=500), path=COMPLETIONS)
        assert ask(client, rig).decision == "recompute; reason=prefill_server_error"  # leaves both connections
        rig.prefill.faults.clear()
        with settled(rig.sidecar):
            for _ in range(6):
                answer = ask(client, rig)
                assert (answer.status, answer.decision) == (200, "recompute; reason=handoff_unverifiable")
    assert "bring no KV" not in rig.sidecar.log
    eventually(lambda: rig.chat().decision.startswith("remote"))
    check_innocent(rig)


def test_a_peer_that_cannot_be_asked_is_not_silent(rigged: Callable[..., Rig]) -> None:
    """Nor is the decode engine's health anything that may be doubted then."""
    rig = rigged(*KEEPS)
    with rig.sidecar.connect() as client:
        assert ask(client, rig).status == 200
        rig.prefill.fault(Fault(delay_head_seconds=1.5), path=COMPLETIONS)
        rig.prefill.requests.clear()
        client.request("POST", COMPLETIONS, completion(), rig.headers())
        eventually(lambda: rig.prefilled())
        with no_descriptors(rig.sidecar.process.pid):
            answer = client.answer("POST")
    assert (answer.status, answer.decision) == (200, f"remote; prefill={rig.prefill.address}")
    check_innocent(rig)


def test_clients_that_cannot_be_accepted() -> None:
    """They are turned away, not left to wait; the operator reads why."""
    with ThreadedEngine() as decode:
        sidecar = Sidecar("--model-server-port", str(decode.port))
        with settled(sidecar):
            with sidecar.connect() as client:
                assert client.at_end()
            eventually(lambda: re.search(SAID, sidecar.log))
        assert sidecar.ask("POST", COMPLETIONS, completion()).status == 200
        sidecar.stop()
