"""TLS on every leg over real sockets: what a client sees is what it sees without."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.engine import Fault
from tests.integration.apis import CHAT, COMPLETIONS
from tests.integration.sidecar import AT_ONCE_S, CANARY, chat, close_idle, completion, eventually
from tests.integration.tls import CA, HOST, MIB, PAIR, Rigs, all_tls

WEBSOCKET = [("Sec-WebSocket-Version", "13"), ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ==")]


def test_split_with_tls_on_every_leg(tls_rig: Rigs, tmp_path: Path) -> None:
    rig = all_tls(tls_rig, tmp_path)
    body = chat(stream=True)
    with rig.open(CHAT, body) as client:
        assert client.socket.selected_alpn_protocol() == "http/1.1"
        assert client.socket.version() == "TLSv1.3"
        answer = client.answer("POST")
    assert answer.status == 200
    assert answer.decision == f"remote; prefill={rig.prefill.address}"
    assert len(rig.prefilled()) == len(rig.decoded()) == 1
    metrics = rig.sidecar.metrics()
    assert metrics("handoffs_total", outcome="used") == 1
    assert metrics("tls_handshakes_total", outcome="ok") == 1
    assert metrics("tls_certificate_not_after_seconds") == PAIR.certificate.not_valid_after_utc.timestamp()


def test_a_token_is_one_write_that_comes_at_once(tls_rig: Rigs, tmp_path: Path) -> None:
    """The way past the parser for whole chunks holds for decrypted bytes too."""
    rig = all_tls(tls_rig, tmp_path, seconds_per_token=0.2)
    with rig.open(COMPLETIONS, completion(40, stream=True, max_tokens=8, ignore_eos=True)) as client:
        answer = client.head()
        times = [time.monotonic() for _ in client.pieces(answer)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert sum(gap > 0.02 for gap in gaps) >= 6, "the tokens came in heaps"
    assert answer.events[-1] == b"[DONE]"


def test_64_mib_body(tls_rig: Rigs, tmp_path: Path) -> None:
    """It goes out in slices: others are served meanwhile, and it is not held twice more for its encryption."""
    rig = all_tls(tls_rig, tmp_path, "--max-body-bytes", str(80 * MIB))
    rig.target = ""
    rig.decode.fault(Fault(status=200), path=COMPLETIONS)
    body = json.dumps({"model": "sim", "prompt": CANARY + "x" * (64 * MIB), "max_tokens": 1}).encode()
    rig.sidecar.forget_peak()
    before = rig.sidecar.rss_mib
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(rig.post, COMPLETIONS, body)
        slowest = 0.0
        while not asked.done():
            began = time.monotonic()
            assert rig.sidecar.admin("GET", "/livez")[0] == 200
            slowest = max(slowest, time.monotonic() - began)
        assert asked.result().status == 200
    (received,) = rig.decoded()
    assert received.body == body
    assert rig.sidecar.peak_rss_mib - before < 2 * 64
    assert slowest < AT_ONCE_S


def test_200_streams(tls_rig: Rigs, tmp_path: Path) -> None:
    rig = all_tls(tls_rig, tmp_path, seconds_per_token=0.5)
    rig.target = ""
    count = 200
    with ExitStack() as stack:
        clients = [stack.enter_context(rig.sidecar.connect()) for _ in range(count)]
        for client in clients:
            body = completion(40, stream=True, max_tokens=500, ignore_eos=True)
            client.request("POST", COMPLETIONS, body, rig.headers())
        rig.decode.wait_for(lambda engine: engine.running == count, 60)
        for client in clients:
            answer = client.head()
            assert answer.status == 200
            next(client.pieces(answer))
    rig.decode.wait_for(lambda engine: engine.running == 0)
    eventually(lambda: not rig.sidecar.in_flight())
    assert rig.sidecar.rss_mib < 150


def test_slow_reader_pauses_the_engine(tls_rig: Rigs, tmp_path: Path) -> None:
    """Back-pressure through both encryptions."""
    rig = all_tls(tls_rig, tmp_path)
    rig.target = ""
    size = 60 * MIB
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
        assert rig.sidecar.rss_mib - before < 10
        client.body(answer, "POST")
    assert len(answer.body) > size


@pytest.mark.parametrize("goodbye", [True, False], ids=["close_notify", "reset"])
def test_client_that_leaves_ends_the_work(tls_rig: Rigs, tmp_path: Path, goodbye: bool) -> None:
    """Also one that says goodbye and reads nothing of what is buffered for it."""
    rig = all_tls(tls_rig, tmp_path)
    rig.target = ""
    rig.decode.fault(Fault(pad_bytes=60 * MIB, drip_bytes=65536), path=COMPLETIONS)
    with rig.open(COMPLETIONS, completion()) as client:
        client.head()
        time.sleep(0.3)
        if goodbye:
            client.socket.settimeout(0.2)
            with contextlib.suppress(OSError):
                client.socket.unwrap()
        else:
            client.close()
        eventually(lambda: rig.decoded()[0].client_gone)


def test_websocket_through_tls(tls_rig: Rigs, tmp_path: Path) -> None:
    rig = all_tls(tls_rig, tmp_path)
    with rig.sidecar.connect() as client:
        client.request(
            "GET",
            "/v1/realtime",
            None,
            [("Connection", "Upgrade"), ("Upgrade", "websocket"), *WEBSOCKET],
        )
        assert client.head().status == 101
    eventually(lambda: rig.decode.connections_open <= 1)


@pytest.mark.parametrize("cut", [True, False], ids=["cut", "ended"])
def test_answer_without_a_stated_end(tls_rig: Rigs, tmp_path: Path, cut: bool) -> None:
    """Its end is that of the connection: without the engine's goodbye anyone may have cut it."""
    stub = _TlsStub(PAIR.server_context(tmp_path / "engines"), goodbye=not cut)
    with stub:
        rig = tls_rig(
            "--enable-tls",
            "decoder",
            "--tls-ca",
            str(CA.write(tmp_path / "ca.crt")),
            "--model-server-port",
            str(stub.port),
        )
        with rig.sidecar.connect() as client:
            client.request("GET", "/v1/models", None)
            client.head()
            assert client.exactly(10) == b"half of it"
            client.socket.suppress_ragged_eofs = False  # type: ignore[attr-defined]
            with pytest.raises((ConnectionResetError, ssl.SSLEOFError)) if cut else contextlib.nullcontext():
                assert client.socket.recv(1) == b""
            client.close()
        eventually(lambda: not rig.sidecar.in_flight())
        assert ("streaming_reset" in rig.sidecar.log) is cut


class _TlsStub:
    """An engine whose answers have no length."""

    def __init__(self, context: ssl.SSLContext, *, goodbye: bool) -> None:
        self._context, self._goodbye = context, goodbye
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                plain, _ = self._listener.accept()
                with contextlib.suppress(OSError):
                    self._serve(plain)

    def _serve(self, plain: socket.socket) -> None:
        with self._context.wrap_socket(plain, server_side=True) as secure:
            request = secure.recv(65536)
            if request.startswith(b"GET /health"):
                secure.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                return
            secure.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nhalf of it")
            if self._goodbye:
                secure.settimeout(1)
                secure.unwrap()


def test_stale_connections_are_replaced(tls_rig: Rigs, tmp_path: Path) -> None:
    """An engine that ends its idle connections, at whatever moment: no request notices."""
    rig = all_tls(tls_rig, tmp_path)
    for number in range(60):
        assert rig.chat().decision.startswith("remote")
        for engine in (rig.prefill, rig.decode):
            close_idle(engine)
        time.sleep(0.0005 * (number % 5))
    metrics = rig.sidecar.metrics()
    assert metrics("handoffs_total", outcome="used") == metrics("prefill_attempts_total") == 60


def test_engine_that_ends_a_tunnel(tls_rig: Rigs, tmp_path: Path) -> None:
    """TLS knows no half-close: an engine that says it has no more ends the tunnel for the client too."""
    rig = all_tls(tls_rig, tmp_path)
    with rig.sidecar.connect() as client:
        upgrade = [("Connection", "Upgrade"), ("Upgrade", "websocket")]
        client.request("GET", "/v1/realtime", None, [*upgrade, *WEBSOCKET])
        assert client.head().status == 101
        connections = rig.decode.engine.server.connections
        rig.decode.call(lambda: [connection.transport.close() for connection in list(connections)])
        assert client.at_end()
    assert "returning true" not in rig.sidecar.log


def test_connections_leave_no_memory(tls_rig: Rigs, tmp_path: Path) -> None:
    """Each takes hundreds of kilobytes while it lasts: nothing may wait for the collector to be given back."""
    rig = all_tls(tls_rig, tmp_path)
    rig.target = ""

    def connect(times: int) -> None:
        for _ in range(times):
            assert rig.post(COMPLETIONS, completion(10, stream=True)).status == 200
            close_idle(rig.decode)

    connect(100)
    warm = rig.sidecar.rss_mib
    connect(500)
    assert rig.sidecar.rss_mib - warm < 4
