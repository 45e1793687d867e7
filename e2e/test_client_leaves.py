"""The client closes its connection, at every stage of its request, twenty at a time and at random moments.

Neither engine keeps a block for it: the decode engine aborts what it was generating, the prefill engine is told
that its blocks will not be read, or was allowed to hand them over. Where nobody can tell it, the lease ends it.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import pytest

from e2e.asking import (
    APIS,
    COMPLETIONS,
    Questions,
    ask,
    eventually,
    prompt_for,
    request_body,
    together,
)
from e2e.door import Door, gone_between_the_legs
from e2e.engines import HOST
from e2e.pair import LEASE_S, SOONER_THAN_A_LEASE_S, Pair, free, idle
from e2e.tap import Hold
from tests.integration.client import Client

if TYPE_CHECKING:
    from tests.integration.sidecar import Sidecar

TIMES = 20
AGAIN_AND_AGAIN = 100


@pytest.fixture
def draw() -> random.Random:
    return random.Random(20)


def expired(pair: Pair) -> float:
    """Handoffs whose lease ran out. The number is published with the engine's next step, so there is one."""
    free(pair.prefill, within_s=LEASE_S + 15)
    ask(pair.prefill, COMPLETIONS, request_body(COMPLETIONS, prompt_for(COMPLETIONS, 8), 2))
    return pair.prefill.metrics().total("vllm:nixl_num_kv_expired_reqs_total")


def leave(sidecar: Sidecar, tokens: int, when: Callable[[Client], object], *, streamed: bool | None = None) -> None:
    """Sends a request of a random kind, and goes."""
    api = random.choice(APIS)
    streamed = random.choice((True, False)) if streamed is None else streamed
    body = request_body(api, prompt_for(api, tokens), 2000 if streamed else 8, stream=streamed)
    with Client((HOST, sidecar.port), timeout_s=60) as client:
        client.request("POST", api.path, body)
        when(client)


def left_during(sidecar: Sidecar) -> set[str]:
    """The stages in which clients left."""
    faults = [fault["reason"] for decision in sidecar.decisions() for fault in decision.get("faults", ())]
    return {reason.removesuffix("_client_left") for reason in faults if reason.endswith("_client_left")}


class Cue:
    """When all may leave, each at a moment of its own after that."""

    def __init__(self, draw: random.Random, within_s: float) -> None:
        self._draw, self._within_s = draw, within_s
        self._given = threading.Event()

    def give(self) -> None:
        self._given.set()

    def wait(self, _client: Client) -> None:
        assert self._given.wait(60)
        time.sleep(self._draw.uniform(0.0, self._within_s))


def test_while_its_prompt_is_prefilled(pair: Pair, draw: random.Random) -> None:
    sidecar = pair.serve()
    cue = Cue(draw, 1.0)
    cue.give()
    together([partial(leave, sidecar, 2000, cue.wait)] * TIMES)
    idle(sidecar)
    assert "prefill" in left_during(sidecar)
    assert sidecar.metrics()("prefill_attempts_total", outcome="client_left") > 0
    # One that was finished in the same instant holds its blocks for a lease: nobody knows its handoff.
    free(pair.prefill, pair.decode, within_s=LEASE_S + 15)


def test_between_the_legs(pair: Pair, draw: random.Random) -> None:
    """The decode engine takes no connection just then; once it does, it is asked to give the blocks back."""
    door = Door(pair.decode)
    pair.closing(door.close)
    tap = pair.tap(pair.prefill)
    sidecar = pair.serve("--engine-idle-timeout", "0.01", prefill=tap.address, decode_port=door.port)
    assert Questions(pair.decode).next().ask(sidecar).decision.startswith("remote")  # the engines know each other
    lost = expired(pair)
    hold = Hold(tap, TIMES)
    cue = Cue(draw, 0.3)

    def shut_and_go() -> None:
        hold.wait_for_all()
        door.shut()  # no idle connection is left by now
        hold.release()
        eventually(lambda: sidecar.metrics()("inflight", leg="decode") == TIMES, 4.0)
        cue.give()

    together([shut_and_go, *[partial(leave, sidecar, 200, cue.wait)] * TIMES])
    assert pair.prefill.kv_usage() > 0.0
    door.open()
    free(pair.prefill, pair.decode, within_s=SOONER_THAN_A_LEASE_S)
    idle(sidecar)
    assert left_during(sidecar) == {"handoff"}
    assert sidecar.metrics()("handoffs_total", outcome="released") == TIMES
    assert expired(pair) == lost


def test_between_the_legs_again_and_again(pair: Pair) -> None:
    """One at a time: each time the blocks are free long before the lease ends."""
    door = Door(pair.decode)
    pair.closing(door.close)
    sidecar = pair.serve("--engine-idle-timeout", "0.01", decode_port=door.port)
    assert Questions(pair.decode).next().ask(sidecar).decision.startswith("remote")
    lost = expired(pair)
    for _ in range(AGAIN_AND_AGAIN):
        gone_between_the_legs(sidecar, pair.prefill, door)
    idle(sidecar)
    assert sidecar.metrics()("handoffs_total", outcome="released") == AGAIN_AND_AGAIN
    assert expired(pair) == lost


def test_while_decode_pulls(pair: Pair, draw: random.Random) -> None:
    tap = pair.tap(pair.prefill)
    sidecar = pair.serve(prefill=tap.address)
    assert Questions(pair.decode).next().ask(sidecar).decision.startswith("remote")
    lost = expired(pair)
    hold = Hold(tap, TIMES)
    cue = Cue(draw, 0.3)

    def release() -> None:
        hold.wait_for_all()
        hold.release()
        cue.give()

    together([release, *[partial(leave, sidecar, 500, cue.wait)] * TIMES])
    free(pair.prefill, pair.decode, within_s=SOONER_THAN_A_LEASE_S)
    idle(sidecar)
    assert "pull" in left_during(sidecar)
    assert expired(pair) == lost


def test_while_decode_waits_for_a_frozen_peer(pair: Pair, draw: random.Random) -> None:
    tap = pair.tap(pair.prefill)
    sidecar = pair.serve("--pull-timeout", "2", prefill=tap.address)
    assert Questions(pair.decode).next().ask(sidecar).decision.startswith("remote")
    hold = Hold(tap, TIMES)
    cue = Cue(draw, 0.3)

    def freeze() -> None:
        hold.wait_for_all()
        pair.prefill.stop()
        hold.release()
        eventually(lambda: sidecar.metrics()("inflight", leg="decode") == TIMES)
        cue.give()

    together([freeze, *[partial(leave, sidecar, 200, cue.wait)] * TIMES])
    idle(sidecar)
    assert left_during(sidecar) == {"pull"}
    pair.prefill.cont()
    free(pair.prefill, pair.decode, within_s=LEASE_S + 15)


def test_in_mid_stream(pair: Pair, draw: random.Random) -> None:
    sidecar = pair.serve()
    lost = expired(pair)

    def read_a_little(client: Client) -> None:
        answer = client.head()
        assert answer.status == 200
        last = draw.randrange(30)
        for number, _ in enumerate(client.pieces(answer)):
            if number == last:
                return

    together([partial(leave, sidecar, 200, read_a_little, streamed=True)] * TIMES)
    free(pair.prefill, pair.decode, within_s=SOONER_THAN_A_LEASE_S)
    idle(sidecar)
    assert left_during(sidecar) == {"streaming"}
    assert expired(pair) == lost
