"""Mooncake on real engines, over TCP: KV moves, texts are those of decode alone, faults are survived."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from e2e.conftest import (
    COMPLETIONS,
    MESSAGES,
    Asking,
    Hold,
    Pair,
    Questions,
    ask,
    eventually,
    free,
    idle,
    local_text,
    mended,
    prompt,
    request_body,
    text_of,
)
from e2e.engines import HOST, Beside, Rig
from e2e.mooncake_wheel import mooncake_dirs
from tests.integration.client import Client
from tests.ports import free_ports

if TYPE_CHECKING:
    from tests.integration.sidecar import Sidecar

AT_ONCE = 6
UNFETCHED_S = 20
"""How long prefill holds blocks that nobody asks for, a minute less than decode waits; vLLM's default is 480."""


@pytest.fixture(scope="module")
def mooncake_rig() -> Iterator[Rig]:
    packages, *libraries = mooncake_dirs()
    with Rig(
        "tiny",
        kv_connector="MooncakeConnector",
        connector_config={"mooncake_protocol": "tcp"},
        extra_env={"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(UNFETCHED_S), "VLLM_HOST_IP": HOST},
        beside=Beside((packages,), tuple(libraries)),
    ) as rig:
        yield rig


@pytest.fixture
def mooncake(mooncake_rig: Rig) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield mended(Pair(mooncake_rig.prefill[0], mooncake_rig.decode[0], stack))


def serve(pair: Pair, *flags: str, **options: Any) -> Sidecar:
    return pair.serve("--kv-connector", "mooncake", "--pull-timeout", "3", *flags, **options)


def test_fetched(mooncake: Pair) -> None:
    questions = Questions(mooncake.decode)
    sidecar = serve(mooncake)
    before = mooncake.pulled_tokens()
    count = 8
    for _ in range(count):
        assert questions.next().ask(sidecar).decision.startswith("remote")
    body = request_body(MESSAGES, prompt(300))
    answer = ask(sidecar, MESSAGES, body)
    assert answer.decision.startswith("remote")
    assert text_of(answer) == local_text(mooncake.decode, MESSAGES, body)
    eventually(lambda: mooncake.pulled_tokens() - before > (count + 1) * 200)
    together = Asking(sidecar, [questions.next() for _ in range(AT_ONCE)])
    assert {decision.partition(";")[0] for decision in together.decisions()} == {"remote"}
    idle(sidecar)
    free(mooncake.prefill, mooncake.decode, within_s=15)


def test_a_prompt_that_fills_no_block(mooncake: Pair) -> None:
    sidecar = serve(mooncake)
    body = request_body(COMPLETIONS, "all work")
    answer = ask(sidecar, COMPLETIONS, body)
    assert answer.decision.startswith("remote")
    assert text_of(answer) == local_text(mooncake.decode, COMPLETIONS, body)
    free(mooncake.prefill, mooncake.decode, within_s=15)


def test_prefill_killed_and_back_as_another_engine(mooncake: Pair) -> None:
    questions = Questions(mooncake.decode)
    tap = mooncake.tap(mooncake.prefill)
    sidecar = serve(mooncake, "--recompute-max-concurrent", "64", prefill=tap.address)
    assert questions.next().ask(sidecar).decision.startswith("remote")
    time.sleep(1)  # what was known of its engine is old by now
    hold = Hold(tap, AT_ONCE)
    asking = Asking(sidecar, [questions.next() for _ in range(AT_ONCE)])
    hold.wait_for_all()
    mooncake.prefill.kill()
    hold.release()
    assert {decision.partition(";")[0] for decision in asking.decisions(within_s=15)} == {"recompute"}
    assert "handoff_side_channel_dead" in str(sidecar.decisions())
    tap.honest()
    mooncake.prefill.restart()
    before = mooncake.pulled_tokens()

    def fetches_again() -> bool:
        questions.next().ask(sidecar)
        return mooncake.pulled_tokens() > before

    eventually(fetches_again, 60)
    idle(sidecar)


def test_prefill_killed_while_decode_waits(mooncake: Pair) -> None:
    questions = Questions(mooncake.decode, tokens=2000)
    sidecar = serve(mooncake, "--recompute-max-concurrent", "64")
    questions.next().ask(sidecar)
    asking = Asking(sidecar, [questions.next() for _ in range(AT_ONCE)])
    eventually(lambda: sidecar.metrics()("inflight", leg="decode"))
    mooncake.prefill.kill()
    asking.decisions(within_s=25)
    assert mooncake.decode.healthy()
    idle(sidecar)


def test_prefill_frozen_between_the_legs(mooncake: Pair) -> None:
    questions = Questions(mooncake.decode)
    tap = mooncake.tap(mooncake.prefill)
    sidecar = serve(mooncake, "--recompute-max-concurrent", "64", prefill=tap.address)
    hold = Hold(tap, AT_ONCE)
    asking = Asking(sidecar, [questions.next() for _ in range(AT_ONCE)])
    hold.wait_for_all()
    mooncake.prefill.stop()
    hold.release()
    assert {decision.partition(";")[0] for decision in asking.decisions(within_s=15)} == {"recompute"}
    mooncake.prefill.cont()
    idle(sidecar)


def test_what_decode_alone_refuses_gives_its_blocks_back(mooncake: Pair) -> None:
    """At once; a transfer that nobody asks for would hold them for minutes."""
    free(mooncake.prefill, within_s=UNFETCHED_S + 10)
    sidecar = serve(mooncake)
    assert ask(sidecar, COMPLETIONS, request_body(COMPLETIONS, prompt(300))).decision.startswith("remote")
    refused = ask(sidecar, COMPLETIONS, request_body(COMPLETIONS, prompt(300), 100_000))
    assert (refused.status, refused.decision.partition(";")[0]) == (400, "remote")
    free(mooncake.prefill, within_s=UNFETCHED_S / 2)
    idle(sidecar)


def test_client_leaves_between_the_legs(mooncake: Pair) -> None:
    """Before prefill's answer has come through: its blocks wait for their time to be over, nothing else does."""
    tap = mooncake.tap(mooncake.prefill)
    sidecar = serve(mooncake, prefill=tap.address)
    hold = Hold(tap, 1)
    with Client((HOST, sidecar.port)) as client:
        client.request("POST", COMPLETIONS.path, request_body(COMPLETIONS, prompt(300)))
        hold.wait_for_all()
    idle(sidecar)
    hold.release()
    free(mooncake.prefill, within_s=UNFETCHED_S + 10)


def test_client_leaves_while_blocks_are_fetched(mooncake: Pair) -> None:
    questions = Questions(mooncake.decode)
    sidecar = serve(mooncake)
    for delay_s in (0.0, 0.05, 0.1, 0.2):
        with Client((HOST, sidecar.port)) as client:
            client.request("POST", COMPLETIONS.path, request_body(COMPLETIONS, prompt(1500), 200))
            eventually(lambda: sidecar.metrics()("inflight", leg="decode"))
            time.sleep(delay_s)
    idle(sidecar)
    free(mooncake.prefill, within_s=UNFETCHED_S + 10)
    assert questions.next().ask(sidecar).decision.startswith("remote")


def test_no_bootstrap_server(mooncake: Pair) -> None:
    """Decode is not asked to find out by itself."""
    questions = Questions(mooncake.decode)
    sidecar = serve(mooncake, "--mooncake-bootstrap-port", str(free_ports()))
    decision = questions.next().ask(sidecar).decision
    assert decision == "recompute; reason=handoff_side_channel_dead"
    assert "VLLM_MOONCAKE_BOOTSTRAP_PORT" in str(sidecar.decisions())
    idle(sidecar)
