"""Many at once, large, slow to be read, or all failing together: bounded memory, no hidden limit, a budget that
holds."""

from __future__ import annotations

import gzip
import json
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from tests.engine import Fault
from tests.integration.apis import CHAT, COMPLETIONS
from tests.integration.client import Client, chunked, request
from tests.integration.sidecar import AT_ONCE_S, BlackHole, Rig, Sidecar, chat, completion, eventually, quick
from tests.ports import free_ports

MIB = 1 << 20


@pytest.mark.parametrize("target", ["local", "remote"])
def test_512_streams_at_once(rigged: Callable[..., Rig], target: str) -> None:
    """Case 33: all of them reach the decode engine; none waits for another."""
    rig = rigged(decode={"seconds_per_token": 0.5})  # many streams, little work: the simulated engine's is Python's
    if target == "local":
        rig.target = ""
    count = 512
    with ExitStack() as stack:
        clients = [stack.enter_context(rig.sidecar.connect()) for _ in range(count)]
        for client in clients:
            body = completion(40, stream=True, max_tokens=500, ignore_eos=True)
            client.request("POST", COMPLETIONS, body, rig.headers())
        rig.decode.wait_for(lambda engine: engine.running == count, 60)
        assert rig.sidecar.metrics()("inflight", leg="decode") == count
        for client in clients:
            answer = client.head()
            assert answer.status == 200
            next(client.pieces(answer))
    rig.decode.wait_for(lambda engine: engine.running == 0)
    assert rig.sidecar.rss_mib < 150


def test_slow_reader_pauses_the_engine(rig: Rig) -> None:
    """Back-pressure: what the client does not read the engine does not send, and nothing is stored in between."""
    size = 60 * MIB
    rig.target = ""
    rig.decode.fault(Fault(pad_bytes=size, drip_bytes=65536), path=COMPLETIONS)
    before = rig.sidecar.rss_mib
    with rig.open(COMPLETIONS, completion()) as client:
        client.socket.settimeout(20)
        answer = client.head()
        (asked,) = rig.decoded()
        sent = -1
        while sent != asked.bytes_sent:
            sent = asked.bytes_sent
            time.sleep(0.3)
        assert 0 < sent < 30 * MIB, "socket buffers, and no more"
        assert rig.sidecar.rss_mib - before < 8
        # Others are served as if nothing were.
        assert rig.sidecar.ask("GET", "/v1/models").status == 200
        client.body(answer, "POST")
    assert len(answer.body) > size
    assert rig.sidecar.peak_rss_mib - before < 16


def test_slow_reader_of_many_answers(rig: Rig) -> None:
    """The same of answers that each end before the client's connection is full: what it asked for behind those
    that it has not read waits."""
    rig.target = ""
    count, size = 300, MIB // 5
    rig.decode.fault(Fault(pad_bytes=size), path=COMPLETIONS)
    before = rig.sidecar.rss_mib
    with rig.sidecar.connect() as client:
        client.socket.settimeout(20)
        for _ in range(count):
            client.request("POST", COMPLETIONS, completion())
        eventually(rig.decoded)
        asked = -1
        while asked != len(rig.decoded()):
            asked = len(rig.decoded())
            time.sleep(0.5)
        assert 0 < asked * size < 40 * MIB, "socket buffers, and no more"
        assert rig.sidecar.rss_mib - before < 8
        for _ in range(count):
            assert len(client.answer("POST").body) > size
    assert rig.sidecar.peak_rss_mib - before < 16


def test_many_requests_behind_one(rig: Rig) -> None:
    """Those that are refused end as soon as they begin, one after the other and not one within the other."""
    rig.target = ""
    count = 3000
    with rig.sidecar.connect() as client:
        refused = request("POST", COMPLETIONS, b"{")
        client.send(request("POST", COMPLETIONS, completion()) + refused * count)
        assert client.answer("POST").status == 200
        for _ in range(count):
            assert client.answer("POST").status == 400


def test_slow_reader_of_our_own_answers(rig: Rig) -> None:
    """Nor do refusals pile up here."""
    count = 60_000
    refused = request("POST", COMPLETIONS, b"{", [("x", "x" * 500)])
    before = rig.sidecar.rss_mib
    with rig.sidecar.connect() as client:
        client.socket.settimeout(20)
        sender = threading.Thread(target=client.send, args=(refused * count,))
        sender.start()
        sender.join(2)
        assert sender.is_alive(), "the sidecar reads no further"
        for _ in range(count):
            assert client.answer("POST").status == 400
        sender.join()
    assert rig.sidecar.peak_rss_mib - before < 8


def test_slow_reader_of_a_stream_that_leaves(rig: Rig) -> None:
    """A paused engine is let go as well when its client leaves."""
    rig.target = ""
    rig.decode.fault(Fault(pad_bytes=60 * MIB, drip_bytes=65536), path=COMPLETIONS)
    with rig.open(COMPLETIONS, completion()) as client:
        client.head()
        time.sleep(0.3)
    eventually(lambda: rig.decoded()[0].client_gone)


def test_slow_engine_pauses_a_streamed_request_body(rig: Rig) -> None:
    """The other way round."""
    rig.decode.fault(Fault(status=200), path="/v1/audio")
    size = 60 * MIB
    with rig.sidecar.connect() as client:
        client.request("POST", "/v1/audio", b"", [("Content-Type", "audio/wav"), ("Content-Length", str(size))])
        eventually(rig.decoded)
        rig.decode.freeze()
        before = rig.sidecar.rss_mib
        client.socket.settimeout(0.5)
        sent = 0
        with suppress(TimeoutError):
            while sent < size:
                client.send(bytes(MIB))
                sent += MIB
        assert sent < 30 * MIB
        assert rig.sidecar.rss_mib - before < 8
        rig.decode.thaw()


def test_huge_answers(rig: Rig) -> None:
    """Whole, in order, and without being held."""
    rig.target = ""
    size = 40 * MIB
    rig.decode.fault(Fault(pad_bytes=size), path=COMPLETIONS)
    before = rig.sidecar.rss_mib
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: rig.post(COMPLETIONS, completion()), range(2)))
    for answer in answers:
        padding = answer.body.partition(b'"padding":"')[2]
        assert padding == b"x" * size + b'"}'
    assert rig.sidecar.peak_rss_mib - before < 24


def test_streamed_body_for_an_engine_that_takes_no_connection() -> None:
    """What is streamed waits in the client's socket until somebody is there to have it."""
    with BlackHole() as hole:
        sidecar = Sidecar("--model-server-port", str(hole.port), ready="/livez")
        try:
            before = sidecar.rss_mib
            with sidecar.connect() as client:
                headers = [("Content-Type", "audio/wav"), ("Transfer-Encoding", "chunked")]
                client.request("POST", "/v1/audio", b"", headers)
                client.socket.settimeout(1)
                piece = chunked(bytes(MIB)).removesuffix(b"0\r\n\r\n")
                sent = 0
                with suppress(TimeoutError):
                    while sent < 100 * MIB:
                        client.send(piece)
                        sent += MIB
                assert sent < 30 * MIB, "socket buffers, and no more"
                client.socket.settimeout(20)
                assert client.answer("POST").status == 503
            assert sidecar.peak_rss_mib - before < 8
        finally:
            sidecar.stop()


def large(size: int) -> bytes:
    """A request of about so many bytes whose prompt is short: engines need not compute it."""
    return json.dumps(completion(user="u" * size)).encode()


@pytest.mark.parametrize(
    ("ours", "framing", "bodies"),
    [
        pytest.param({}, "length", 1.5, id="as it came"),
        pytest.param({}, "chunks", 1.5, id="in chunks"),
        pytest.param({}, "gzip", 1.5, id="compressed"),
        pytest.param({"kv_transfer_params": {}}, "length", 2.5, id="cleaned"),
    ],
)
def test_peak_memory_of_a_large_request(rig: Rig, ours: dict[str, Any], framing: str, bodies: float) -> None:
    """64 MB beside a short prompt, split: not three bodies at the worst moment, and given back afterwards."""
    size = 64 * MIB - 4096
    body = json.dumps(completion(user="u" * size, **ours)).encode()
    assert rig.chat().status == 200
    before = rig.sidecar.rss_mib
    rig.sidecar.forget_peak()
    with Client(rig.sidecar.address, timeout_s=60) as client:
        headers = list(rig.headers())
        if framing == "chunks":
            headers.append(("Transfer-Encoding", "chunked"))
            body = chunked(*(body[at : at + 65536] for at in range(0, len(body), 65536)))
        elif framing == "gzip":
            headers.append(("Content-Encoding", "gzip"))
            body = gzip.compress(body)
        client.request("POST", COMPLETIONS, body, headers)
        answer = client.answer("POST")
    assert answer.status == 200
    assert answer.decision.startswith("remote")
    assert rig.sidecar.peak_rss_mib - before < bodies * 64
    assert len(rig.decoded()[-1].body) > size
    eventually(lambda: rig.sidecar.rss_mib - before < 24)


def test_a_body_that_stops_costs_what_has_come_of_it(rig: Rig) -> None:
    """Not what it said it would be: many clients can say that."""
    size = 64 * MIB - 4096
    before = rig.sidecar.rss_mib
    with ExitStack() as stack:
        for _ in range(4):
            client = stack.enter_context(Client(rig.sidecar.address))
            client.send(request("POST", COMPLETIONS, b"", [("Content-Length", str(size))]))
            client.send(bytes(10 * MIB))
        eventually(lambda: rig.sidecar.rss_mib - before > 38)
        assert rig.sidecar.rss_mib - before < 60


def test_nobody_waits_for_a_large_compressed_body(rig: Rig) -> None:
    """Of 60 MB, in 60 KB: who comes a moment later is served first."""
    packed = gzip.compress(large(60 * MIB))
    with Client(rig.sidecar.address, timeout_s=60) as patient, Client(rig.sidecar.address) as other:
        rig.sidecar.signal(signal.SIGSTOP)  # however long this process is kept from asking
        patient.request("POST", COMPLETIONS, packed, [("Content-Encoding", "gzip")])
        other.request("POST", COMPLETIONS, completion())
        rig.sidecar.signal(signal.SIGCONT)
        assert other.answer("POST").status == 200
        assert patient.answer("POST").status == 200
    first, last = (len(one.body) for one in rig.decoded())
    assert first < MIB < last


def test_client_that_leaves_while_its_body_is_inflated(rig: Rig) -> None:
    packed = gzip.compress(large(60 * MIB))
    with Client(rig.sidecar.address) as client:
        client.request("POST", COMPLETIONS, packed, [("Content-Encoding", "gzip")])
    assert rig.post(COMPLETIONS, completion()).status == 200
    eventually(lambda: rig.sidecar.metrics()("tasks") < 100)
    assert len(rig.decoded()) == 1


def test_memory_is_given_back(rig: Rig) -> None:
    """Large bodies one after the other cost no more than one."""
    sizes = [random.Random(5).randrange(1 * MIB, 4 * MIB) for _ in range(16)]
    for size in sizes[:4]:
        rig.post(COMPLETIONS, large(size))
    before = rig.sidecar.rss_mib
    for size in sizes[4:]:
        assert rig.post(COMPLETIONS, large(size)).status == 200
    assert rig.sidecar.rss_mib - before < 16


def test_fallback_storm(rigged: Callable[..., Rig]) -> None:
    """Case 30: the prefill side is gone and every prompt lands here: the budget holds, the rest is told when to
    come back, and the stream that runs keeps its pace."""
    rig = rigged(*quick(), decode={"seconds_per_token": 0.01, "prefill_seconds_per_1k_tokens": 1.0})
    body = completion(40, stream=True, max_tokens=1000, ignore_eos=True, echo=True)
    with rig.open(COMPLETIONS, body) as running:
        answer = running.head()
        pieces = running.pieces(answer)
        next(pieces)
        rig.target = f"127.0.0.1:{free_ports()}"
        most = 0
        stop = threading.Event()

        def watch() -> None:
            nonlocal most
            while not stop.is_set():
                most = max(most, rig.decode.running)
                time.sleep(0.002)

        watcher = threading.Thread(target=watch)
        watcher.start()
        with ThreadPoolExecutor(40) as pool:
            answers = list(pool.map(lambda _: rig.post(COMPLETIONS, completion(200, max_tokens=1)), range(40)))
        gaps = []
        last = time.monotonic()
        for _ in range(20):
            next(pieces)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
        stop.set()
        watcher.join()
    statuses = [answer.status for answer in answers]
    assert set(statuses) == {200, 503}
    assert most <= 1 + 1
    for answer in answers:
        if answer.status == 503:
            assert answer.reason_code == "decode_over_budget"
            assert answer.header("retry-after") == "1"
    assert max(gaps) < AT_ONCE_S


def test_slow_prefill_does_not_hold_up_local_requests(rigged: Callable[..., Rig]) -> None:
    rig = rigged(prefill={"num_blocks": 4096})
    slow_may_end = threading.Event()
    rig.prefill.fault(Fault(hold=slow_may_end), path=COMPLETIONS)
    with ThreadPoolExecutor(20) as pool:
        slow = [pool.submit(rig.post, COMPLETIONS, completion()) for _ in range(20)]
        eventually(lambda: len(rig.prefilled()) == 20)
        assert rig.sidecar.ask("POST", COMPLETIONS, completion()).status == 200
        assert not any(future.done() for future in slow)
        slow_may_end.set()
        assert all(future.result().decision.startswith("remote") for future in slow)


def test_metrics_and_memory_stay_bounded_whatever_clients_send(rigged: Callable[..., Rig]) -> None:
    """Case 44: no label for a path, a method, a model, a header or an address that a client made up."""
    rig = rigged("--drain-timeout", "59")
    size = len(rig.sidecar.metrics().text)
    before = rig.sidecar.rss_mib
    with rig.sidecar.connect() as client:
        for number in range(1500):
            method = ("GET", "POST", "PUT", "DELETE")[number % 4]
            client.request(
                method, f"/v1/{number}?{number}", headers=[(f"X-{number}", "y"), ("Content-Length", "0")]
            )
            client.answer()
        for number in range(900):
            # Nobody is there: refused at once, and known as an endpoint from then on.
            target = f"127.1.{number // 200}.{number % 200 + 1}:9"
            body = completion(20, model=f"m{number}", **{f"field{number}": 1})
            headers = [("x-prefiller-host-port", target), ("x-request-id", f"id-{number}")]
            client.request("POST", COMPLETIONS, body, headers)
            client.answer("POST")
    metrics = rig.sidecar.metrics()
    assert len(metrics.labels("breaker_state")) <= 520
    assert len(metrics.labels("requests_total")) < 60
    assert len(metrics.labels("prefill_inflight")) <= 520
    assert len(metrics.text) < size + 520 * 150
    assert len(rig.sidecar.decisions()) == 256
    assert rig.sidecar.rss_mib - before < 20


def test_what_probes_are_told_cannot_harm(rigged: Callable[..., Rig]) -> None:
    """Case 35: nonsense where the sidecar looks in the background; requests are answered all the same."""
    rig = rigged(prefill={"num_blocks": 4096})
    for nonsense in (
        Fault(raw=b"\xff\xfe garbage"),
        Fault(status=200, body=b'vllm:cache_config_info{block_size="x",num_gpu_blocks="-1"} 1\n'),
        Fault(status=200, body=b"\xff\xfe\x00" * 100_000),
        Fault(reset="before_head"),
        Fault(cut_after_bytes=10),
    ):
        for path in ("/metrics", "/health"):
            rig.prefill.faults.once(nonsense, path=path)
            rig.decode.faults.once(nonsense, path=path)
        assert rig.post(CHAT, chat()).status == 200
    rig.sidecar.wait_until("/readyz")


def test_large_bodies_that_are_only_announced(rig: Rig) -> None:
    """Memory is for what has arrived: a stated length costs its sender nothing."""
    before = rig.sidecar.rss_mib
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: sidecar\r\nContent-Length: {60 * MIB}\r\n\r\n".encode()
    with ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(rig.sidecar.connect()).send(head + b'{"prompt":"')
        assert rig.post(COMPLETIONS, completion()).status == 200
        assert rig.sidecar.rss_mib - before < 20


def test_large_body_that_is_late(rigged: Callable[..., Rig]) -> None:
    """Once it has been answered with 408, what still comes of it is no request."""
    rig = rigged("--client-body-timeout", "0.5")
    body = json.dumps({**completion(), "user": "x" * MIB}).encode()
    with rig.sidecar.connect() as client:
        client.send(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: sidecar\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        client.send(body[: len(body) // 2])
        assert client.head().status == 408
        client.send(body[len(body) // 2 :])
        time.sleep(0.3)
    assert rig.sidecar.ask("GET", "/v1/models").status == 200
    assert rig.decoded()[0].target == "/v1/models"
