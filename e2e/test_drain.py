"""SIGTERM while real answers are under way: they are all completed, and the sidecar ends with 0."""

from __future__ import annotations

import signal
import socket
import threading
from functools import partial

from e2e.conftest import (
    APIS,
    HOST,
    Api,
    Pair,
    ask,
    eventually,
    local_text,
    prompt_for,
    request_body,
    text_of,
    together,
)

TOKENS = 100
"""Half a second or more of an answer."""


def test_open_answers_are_completed(pair: Pair) -> None:
    sidecar = pair.serve()
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
    eventually(lambda: pair.decode.metrics().total("vllm:num_requests_running") == len(bodies))
    assert not got, "the answers were over too soon to say anything"
    sidecar.signal(signal.SIGTERM)
    eventually(lambda: not listens(sidecar.port))
    for thread in threads:
        thread.join(60)
    assert sidecar.exit_code() == 0
    wanted = together([partial(local, pair, *one) for one in bodies])
    assert sorted(got, key=str) == sorted(wanted, key=str)


def local(pair: Pair, api: Api, body: dict[str, object]) -> tuple[Api, str]:
    return api, local_text(pair.decode, api, body)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0
