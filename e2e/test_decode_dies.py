"""The decode engine is killed while answers are under way, stays away, and comes back.

Its clients hear of it in every case: an error event where a stream had begun, an error status where nothing had. A
broken answer never looks like a whole one.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

from e2e.asking import APIS, CHAT, Api, Asking, Questions, ask, eventually, prompt_for, reason_of_cut, request_body
from e2e.engines import HOST
from e2e.pair import LEASE_S, Pair, idle
from e2e.tap import Hold
from tests.integration.client import Client, Cut

ENDLESS = 4000
"""Tokens: more than any engine generates before it is killed."""


class Stream(threading.Thread):
    """Reads a stream to its end, whatever that is."""

    def __init__(self, port: int, api: Api) -> None:
        super().__init__(daemon=True)
        self.api = api
        self.begun = threading.Event()
        self.end: Cut | Exception | None = None
        self._client = Client((HOST, port), timeout_s=60)
        self._body = request_body(api, prompt_for(api, 100), ENDLESS, stream=True)
        self.start()

    def run(self) -> None:
        with self._client as client:
            client.request("POST", self.api.path, self._body)
            answer = client.head()
            try:
                for number, _ in enumerate(client.pieces(answer)):
                    if number == 5:
                        self.begun.set()
            except Cut as cut:
                self.end = cut
            except Exception as error:
                self.end = error


def test_in_mid_answer_and_between_the_legs(pair: Pair) -> None:
    questions = Questions(pair.decode)
    tap = pair.tap(pair.prefill)
    sidecar = pair.serve(prefill=tap.address)
    streams = [Stream(sidecar.port, api) for api in APIS]
    for stream in streams:
        assert stream.begun.wait(30), stream.api
    body = request_body(CHAT, prompt_for(CHAT, 100), ENDLESS)
    with ThreadPoolExecutor(3) as pool:
        whole = [pool.submit(ask, sidecar, CHAT, body) for _ in range(3)]
        eventually(lambda: pair.decode.metrics().total("vllm:num_requests_running") == len(APIS) + 3)
        hold = Hold(tap, 2)
        between = Asking(sidecar, [questions.next(), questions.next(streamed=True)])
        hold.wait_for_all()
        pair.decode.kill()
        hold.release()

    for stream in streams:
        stream.join(30)
        assert isinstance(stream.end, Cut), (stream.api, stream.end)
        assert reason_of_cut(stream.end) == "streaming_reset", stream.api
    for waiting in whole:
        answer = waiting.result()
        # 502: it broke off. 503: the local try that follows a broken pull found nobody.
        assert answer.status in (502, 503), answer.body
        assert answer.reason_code in ("decode_reset", "decode_refused", "pull_reset"), answer.body
    for answer in between.answers():
        # decode_refused: a connection that outlived the engine for a moment took the handoff along, and then the
        # local try found nobody.
        assert (answer.status, answer.reason_code) in ((503, "handoff_refused"), (503, "decode_refused"))
        assert answer.header("retry-after")
    idle(sidecar)
    # Nobody could give the blocks back: they go with their lease.
    eventually(lambda: pair.prefill.kv_usage() == 0.0, LEASE_S + 20)


def test_away_and_back_again(pair: Pair) -> None:
    questions = Questions(pair.decode)
    sidecar = pair.serve()
    assert questions.next().ask(sidecar).decision.startswith("remote")
    pair.decode.kill()
    for method, path in (("POST", CHAT.path), ("POST", "/v1/embeddings"), ("GET", "/v1/models")):
        answer = sidecar.ask(method, path, request_body(CHAT, "hello") if method == "POST" else None)
        assert answer.status == 503, answer.body
        assert answer.header("retry-after")
        error = json.loads(answer.body)["error"]
        assert error["stage"] in ("handoff", "decode")
        assert error["reason"].endswith("_refused")
    sidecar.wait_until("/readyz", 503)
    pair.decode.restart()
    sidecar.wait_until("/readyz", 200)
    for _ in range(2):
        before = pair.pulled_tokens()
        assert questions.next().ask(sidecar).decision.startswith("remote")
        assert pair.pulled_tokens() > before
    idle(sidecar)
