"""A decode pod that ends as the chart has it: the engine gets SIGTERM first, finishes what it has begun, and the
sidecar carries it to the clients; then the sidecar gets its own. (docs/kubernetes.md, "Ending pods")"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from e2e.asking import UnderWay, eventually
from e2e.rig import Rig
from tests.integration.sidecar import Sidecar


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig("tiny", prefill=0, decode=2, decode_flags=["--shutdown-timeout=45"]) as rig:
        yield rig


@pytest.fixture
def sidecar(rig: Rig) -> Iterator[Sidecar]:
    sidecar = Sidecar("--model-server-port", str(rig.decode[0].port), "--drain-timeout", "60")
    try:
        yield sidecar
        sidecar.check_log()
    finally:
        sidecar.kill()


def test_the_engine_first_then_the_sidecar(rig: Rig, sidecar: Sidecar) -> None:
    ending, staying = rig.decode
    under_way = UnderWay(sidecar)
    under_way.wait(ending)
    ending.terminate()
    under_way.check(staying)
    eventually(lambda: not ending.alive())
    eventually(lambda: sidecar.admin("GET", "/readyz")[0] == 503)
    sidecar.signal(signal.SIGTERM)
    assert sidecar.exit_code(10) == 0, "nothing is open: the drain is over at once"
