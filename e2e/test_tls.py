"""TLS as real engines speak it: uvicorn's own, on every leg of a request, for probes and for the warm-up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.asking import Asking, Questions, eventually
from e2e.pair import LEASE_S, Pair, idle, paired
from e2e.rig import Rig
from tests.certificates import Authority

CA = Authority()
PAIR = CA.issue("localhost", "127.0.0.1")
AT_ONCE = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = PAIR.write(tmp_path_factory.mktemp("tls"))
    CA.write(folder / "ca.crt")
    return folder


@pytest.fixture(scope="module")
def tls_rig(folder: Path) -> Iterator[Rig]:
    flags = ["--ssl-certfile", str(folder / "tls.crt"), "--ssl-keyfile", str(folder / "tls.key")]
    with Rig("tiny", lease_seconds=LEASE_S, extra_flags=flags, tls=CA.client_context()) as rig:
        yield rig


@pytest.fixture
def pair(tls_rig: Rig) -> Iterator[Pair]:
    with paired(tls_rig.prefill[0], tls_rig.decode[0]) as pair:
        yield pair


def test_same_text_over_tls(pair: Pair, folder: Path) -> None:
    """Every API, streamed and whole: the right text, and its KV pulled."""
    questions = Questions(pair.decode)
    sidecar = pair.serve(
        *("--secure-serving", "on", "--cert-path", str(folder), "--warm-up", "on"),
        *("--enable-tls", "prefiller,decoder", "--tls-ca", str(folder / "ca.crt")),
        *("--recompute-max-concurrent", str(AT_ONCE)),
    )
    sidecar.tls = CA.client_context()
    eventually(lambda: "warm-up: warm" in sidecar.log)
    before = pair.pulled_tokens()
    asking = Asking(sidecar, [questions.next() for _ in range(AT_ONCE)])
    assert set(asking.decisions()) == {f"remote; prefill={pair.prefill.address}"}
    assert pair.pulled_tokens() - before > AT_ONCE * 100
    idle(sidecar)
