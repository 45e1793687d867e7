"""A decode pod that ends as the chart has it: the engine gets SIGTERM first, finishes what it has begun, and the
sidecar carries it to the clients; then the sidecar gets its own. (docs/kubernetes.md, "Ending pods")"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from e2e.conftest import APIS, Api, ask, eventually, local_text, prompt_for, request_body, text_of, together
from e2e.engines import Engine, Rig
from tests.integration.sidecar import Sidecar

TOKENS = 100
"""Half a second or more of an answer."""


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
    got: list[tuple[Api, str]] = []
    bodies = [
        (api, request_body(api, prompt_for(api, 100), TOKENS, stream=streamed))
        for api in APIS
        for streamed in (True, False)
    ]

    def answer(api: Api, body: dict[str, object]) -> None:
        got.append((api, text_of(ask(sidecar, api, body))))

    threads = [threading.Thread(target=answer, args=one, daemon=True) for one in bodies]
    for thread in threads:
        thread.start()
    eventually(lambda: ending.metrics().total("vllm:num_requests_running") == len(bodies))
    assert not got, "the answers were over too soon to say anything"
    ending.terminate()
    for thread in threads:
        thread.join(60)
    wanted = together([partial(local, staying, *one) for one in bodies])
    assert sorted(got, key=str) == sorted(wanted, key=str)
    eventually(lambda: not ending.alive())
    eventually(lambda: sidecar.admin("GET", "/readyz")[0] == 503)
    sidecar.signal(signal.SIGTERM)
    assert sidecar.exit_code(10) == 0, "nothing is open: the drain is over at once"


def local(engine: Engine, api: Api, body: dict[str, object]) -> tuple[Api, str]:
    return api, local_text(engine, api, body)
