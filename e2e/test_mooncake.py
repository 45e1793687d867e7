"""Mooncake on real engines, over TCP: KV moves, texts are those of decode alone, faults are survived."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.asking import COMPLETIONS, Questions, ask, local_text, prompt, request_body, text_of
from e2e.engines import HOST, Beside
from e2e.mooncake_wheel import mooncake_dirs
from e2e.named import Named
from e2e.pair import free, idle, paired
from e2e.rig import Rig
from sidecar.prefill.bootstrap import FRESH_S
from tests.ports import free_ports

UNFETCHED_S = 20
"""How long prefill holds blocks that nobody asks for, a minute less than decode waits; vLLM's default is 480."""
FETCHED_WITHIN_S = UNFETCHED_S - 5


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
def mooncake(mooncake_rig: Rig) -> Iterator[Named]:
    with paired(mooncake_rig.prefill[0], mooncake_rig.decode[0]) as pair:
        yield Named(
            pair,
            "mooncake",
            pair.pulled_tokens,
            # decode may wait a minute more for what a dead prefill was to send
            lambda: free(pair.prefill, within_s=UNFETCHED_S + 10),
            known_for_s=2 * FRESH_S,
        )


def test_fetched(mooncake: Named) -> None:
    mooncake.is_fetched()
    free(mooncake.pair.prefill, mooncake.pair.decode, within_s=FETCHED_WITHIN_S)


def test_a_prompt_that_fills_no_block(mooncake: Named) -> None:
    pair, sidecar = mooncake.pair, mooncake.serve()
    body = request_body(COMPLETIONS, "all work")
    answer = ask(sidecar, COMPLETIONS, body)
    assert answer.decision.startswith("remote")
    assert text_of(answer) == local_text(pair.decode, COMPLETIONS, body)
    free(pair.prefill, pair.decode, within_s=FETCHED_WITHIN_S)


def test_prefill_killed_and_back_as_another_engine(mooncake: Named) -> None:
    mooncake.is_recomputed_when_prefill_dies_between_the_legs()


def test_prefill_killed_while_decode_waits(mooncake: Named) -> None:
    mooncake.is_answered_when_prefill_dies_while_decode_waits()


def test_prefill_frozen_between_the_legs(mooncake: Named) -> None:
    mooncake.is_recomputed_when_prefill_freezes_between_the_legs()


def test_what_decode_alone_refuses_gives_its_blocks_back(mooncake: Named) -> None:
    """At once; a transfer that nobody asks for would hold them for minutes."""
    mooncake.at_rest()
    sidecar = mooncake.serve()
    assert ask(sidecar, COMPLETIONS, request_body(COMPLETIONS, prompt(300))).decision.startswith("remote")
    refused = ask(sidecar, COMPLETIONS, request_body(COMPLETIONS, prompt(300), 100_000))
    assert (refused.status, refused.decision.partition(";")[0]) == (400, "remote")
    free(mooncake.pair.prefill, within_s=UNFETCHED_S / 2)
    idle(sidecar)


def test_client_leaves_between_the_legs(mooncake: Named) -> None:
    """The blocks wait for their time to be over, nothing else does."""
    mooncake.is_given_back_when_the_client_leaves_between_the_legs()


def test_client_leaves_while_blocks_are_fetched(mooncake: Named) -> None:
    mooncake.is_given_back_when_the_client_leaves_while_it_is_fetched()


def test_no_bootstrap_server(mooncake: Named) -> None:
    """Decode is not asked to find out by itself."""
    questions = Questions(mooncake.pair.decode)
    sidecar = mooncake.serve("--mooncake-bootstrap-port", str(free_ports()))
    decision = questions.next().ask(sidecar).decision
    assert decision == "recompute; reason=handoff_side_channel_dead"
    assert "VLLM_MOONCAKE_BOOTSTRAP_PORT" in str(sidecar.decisions())
    idle(sidecar)
