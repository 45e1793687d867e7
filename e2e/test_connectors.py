"""The other KV connectors on real engines: KV moves, texts are those of decode alone, faults are survived."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from e2e.asking import CHAT, COMPLETIONS, GENERATE, Asking, Questions, eventually
from e2e.pair import LEASE_S, Pair, idle, paired
from e2e.rig import Rig
from e2e.tap import Hold

if TYPE_CHECKING:
    from pathlib import Path

AT_ONCE = 6


# -- NIXL, the prefill engine writes ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def push_rig() -> Iterator[Rig]:
    with Rig("tiny", kv_connector="NixlPushConnector", lease_seconds=LEASE_S) as rig:
        yield rig


@pytest.fixture
def push(push_rig: Rig) -> Iterator[Pair]:
    with paired(push_rig.prefill[0], push_rig.decode[0]) as pair:
        yield pair


def test_pushed(push: Pair) -> None:
    """One at a time: without NIXL's progress thread, which the rig leaves out, a pushing worker has two threads in
    UCX at once under load, and ends with a segmentation fault now and then (vLLM 0.32, nixl 1.5.1)."""
    questions = Questions(push.decode)
    sidecar = push.serve("--kv-connector", "nixl-push")
    before = push.pulled_tokens()
    decisions = [questions.next().ask(sidecar).decision.partition("; prefill")[0] for _ in range(2 * AT_ONCE)]
    # Engines make request ids of their own for /v1/responses, and a push finds its way by them.
    assert {decision["api"] for decision in sidecar.decisions() if decision["decision"] == "local"} == {"responses"}
    assert decisions.count("remote") == 2 * AT_ONCE * 3 // 4
    assert push.pulled_tokens() - before > decisions.count("remote") * 100
    idle(sidecar)


def test_a_pull_sidecar_sends_nothing_to_push_engines(push: Pair) -> None:
    """It says which connector it should have been given."""
    questions = Questions(push.decode)
    sidecar = push.serve("--kv-connector", "nixlv2")
    assert questions.next().ask(sidecar).decision.startswith(("recompute; reason=handoff_invalid", "local"))
    assert "nixl-push" in str(sidecar.decisions())
    idle(sidecar)


def test_pushing_engine_killed(push: Pair) -> None:
    questions = Questions(push.decode, apis=(COMPLETIONS, CHAT, GENERATE))
    tap = push.tap(push.prefill)
    sidecar = push.serve(
        *("--kv-connector", "nixl-push", "--pull-timeout", "2", "--recompute-max-concurrent", "64"),
        prefill=tap.address,
    )
    assert questions.next().ask(sidecar).decision.startswith("remote")
    hold = Hold(tap, AT_ONCE)
    asking = Asking(sidecar, [questions.next() for _ in range(AT_ONCE)])
    hold.wait_for_all()
    push.prefill.kill()
    hold.release()
    assert {decision.partition(";")[0] for decision in asking.decisions()} == {"recompute"}
    assert push.decode.healthy()
    idle(sidecar)


# -- a store that both share -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store_rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder: Path = tmp_path_factory.mktemp("store")
    with Rig("tiny", kv_connector="ExampleConnector", connector_config={"shared_storage_path": str(folder)}) as rig:
        yield rig


@pytest.fixture
def store(store_rig: Rig) -> Iterator[Pair]:
    with paired(store_rig.prefill[0], store_rig.decode[0]) as pair:
        yield pair


def test_stored_and_found(store: Pair) -> None:
    questions = Questions(store.decode)
    sidecar = store.serve("--kv-connector", "shared-storage")
    before = store.pulled_tokens()
    for _ in range(8):
        assert questions.next().ask(sidecar).decision.startswith("remote")
    eventually(lambda: store.pulled_tokens() - before > 100)
    store.prefill.kill()
    assert questions.next().ask(sidecar).decision.startswith("recompute")
    idle(sidecar)
