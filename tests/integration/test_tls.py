"""TLS over real sockets: on the serving port and towards both engines, data plane and control plane."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import ssl
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.certificates import Authority
from tests.engine import Fault, ThreadedEngine
from tests.integration.apis import CHAT, COMPLETIONS
from tests.integration.client import Client, Cut
from tests.integration.sidecar import (
    AT_ONCE_S,
    CANARY,
    KEY,
    Rig,
    Sidecar,
    chat,
    close_idle,
    completion,
    eventually,
    quick,
)
from tests.ports import free_ports

MIB = 1 << 20
HOST = "127.0.0.1"
CA = Authority()
PAIR = CA.issue("localhost", HOST)

WEBSOCKET = [("Sec-WebSocket-Version", "13"), ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ==")]

Rigs = Callable[..., Rig]


@pytest.fixture
def tls_rig(tmp_path: Path) -> Iterator[Rigs]:
    """A rig of its own whose parts speak TLS: `serving`, `prefill` and `decode` say which."""
    with ExitStack() as stack:

        def make(
            *flags: str,
            serving: bool = True,
            prefill: ssl.SSLContext | None = None,
            decode: ssl.SSLContext | None = None,
            **decode_options: Any,
        ) -> Rig:
            to_engines = [
                flag
                for role, context in (("prefiller", prefill), ("decoder", decode))
                if context
                for flag in ("--enable-tls", role)
            ]
            if to_engines:
                to_engines += ["--tls-ca", str(CA.write(tmp_path / "ca.crt"))]
            to_clients = ["--secure-serving", "on", "--cert-path", str(PAIR.mount(tmp_path / "serving"))]
            engine = stack.enter_context(
                ThreadedEngine(tls=decode, port=free_ports(), side_channel_port=free_ports(), **decode_options)
            )
            other = stack.enter_context(ThreadedEngine(tls=prefill))
            sidecar = Sidecar(
                *("--disagg", "on", "--prefill-allow", "127.0.0.0/8", "--recompute-max-concurrent", "100"),
                *("--model-server-port", str(engine.port)),
                *("--local-side-channel", f"127.0.0.1:{engine.side_channel_port}"),
                *(to_clients if serving else ()),
                *to_engines,
                *flags,
            )
            stack.callback(sidecar.kill)
            stack.callback(sidecar.stop)
            if serving:
                sidecar.tls = CA.client_context()
            return Rig(sidecar, other, engine)

        yield make


def all_tls(tls_rig: Rigs, folder: Path, *flags: str, **options: Any) -> Rig:
    context = PAIR.server_context(folder / "engines")
    return tls_rig(*flags, prefill=context, decode=context, **options)


# -- everything encrypted --------------------------------------------------------------------------------------


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
            assert client.answer().body == b"half of it"
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


# -- the serving port ------------------------------------------------------------------------------------------


def test_plain_http_on_the_tls_port(tls_rig: Rigs) -> None:
    rig = tls_rig()
    with Client(rig.sidecar.address) as client:
        client.request("GET", "/v1/models", None)
        assert not client.rest().startswith(b"HTTP/")
    assert rig.sidecar.metrics()("tls_handshakes_total", outcome="plain_http") == 1
    assert "TLS handshake with a client failed: http request" in rig.sidecar.log
    assert rig.sidecar.ask("GET", "/v1/models").status == 200


def test_tls_on_a_plain_port(tls_rig: Rigs) -> None:
    rig = tls_rig(serving=False)
    with pytest.raises((ssl.SSLError, ConnectionError)):
        Client(rig.sidecar.address, tls=CA.client_context())
    assert rig.sidecar.ask("GET", "/v1/models").status == 200


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01"], ids=["nothing", "a beginning"])
def test_slow_handshake_ends_with_the_head_timeout(tls_rig: Rigs, sent: bytes) -> None:
    rig = tls_rig(*quick())
    with Client(rig.sidecar.address) as client:
        began = time.monotonic()
        client.send(sent)
        assert client.at_end()
        assert 0.4 < time.monotonic() - began < 0.6 + AT_ONCE_S
    assert rig.sidecar.ask("GET", "/v1/models").status == 200


def test_old_tls_is_refused(tls_rig: Rigs) -> None:
    rig = tls_rig()
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        Client(rig.sidecar.address, tls=old)
    assert rig.sidecar.metrics()("tls_handshakes_total", outcome="ok") == 0


def _ask_once(address: tuple[str, int], context: ssl.SSLContext) -> None:
    with Client(address, tls=context) as client:
        client.request("GET", "/v1/models", None)
        client.answer()  # a TLS 1.3 client hears that it was refused with its first read


def test_client_without_certificate_is_refused(tls_rig: Rigs, tmp_path: Path) -> None:
    """mTLS: no certificate and one of a foreign authority both end in the handshake; no request is read."""
    rig = tls_rig("--client-ca", str(CA.write(tmp_path / "clients.crt")))
    foreign = Authority()
    for number, pair in enumerate((None, foreign.issue("client"))):
        context = CA.client_context(pair, tmp_path / str(number))
        with pytest.raises((ssl.SSLError, ConnectionError, Cut)):
            _ask_once(rig.sidecar.address, context)
    metrics = rig.sidecar.metrics()
    assert metrics("tls_handshakes_total", outcome="no_certificate") == 1
    assert metrics("tls_handshakes_total", outcome="bad_certificate") == 1
    assert metrics("requests_total") == 0
    assert not rig.decoded()
    rig.sidecar.tls = CA.client_context(CA.issue("client"), tmp_path / "own")
    assert rig.sidecar.ask("GET", "/v1/models").status == 200


def _send_for_ever(client: Client) -> None:
    while True:
        client.send(bytes(1024))


def test_refusal_reaches_a_client_that_is_still_sending(tls_rig: Rigs) -> None:
    """What it sends is thrown away for a while, so that nothing resets the answer; but not for ever."""
    rig = tls_rig("--max-body-bytes", "4000000")
    with rig.sidecar.connect() as client:
        size = 8 * MIB
        client.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size)
        for _ in range(size // 65536):
            client.send(bytes(65536))
        assert client.answer("POST").status == 413
        client.socket.settimeout(5)
        with pytest.raises(OSError):
            _send_for_ever(client)


def test_rotation_under_load(tls_rig: Rigs, tmp_path: Path) -> None:
    """Case 41: kept connections go on, new ones get the new certificate, and no request fails."""
    rig = tls_rig()
    stop = threading.Event()
    failures: list[object] = []
    served = [0, 0, 0]

    def keep_asking(number: int) -> None:
        try:
            with rig.sidecar.connect() as client:
                while not stop.is_set():
                    client.request("GET", "/v1/models", None)
                    status = client.answer().status
                    if status != 200:
                        failures.append(status)
                    served[number] += 1
        except Exception as error:
            failures.append(error)

    def shown() -> int:
        with rig.sidecar.connect() as client:
            assert isinstance(client.socket, ssl.SSLSocket)
            certificate = client.socket.getpeercert()
            assert certificate is not None
            client.request("GET", "/v1/models", None)
            assert client.answer().status == 200
            return int(str(certificate["serialNumber"]), 16)

    threads = [threading.Thread(target=keep_asking, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        assert shown() == PAIR.serial
        data = (tmp_path / "serving" / "..data").readlink()
        newer = CA.issue("localhost", HOST)
        (tmp_path / "serving" / data / "tls.crt").write_bytes(newer.cert_pem)  # half of a pair
        eventually(lambda: "not taken over" in rig.sidecar.log)
        assert shown() == PAIR.serial
        newest = CA.issue("localhost", HOST)
        newest.mount(tmp_path / "serving")
        eventually(lambda: shown() == newest.serial)
        before = list(served)
        eventually(lambda: all(now > then + 3 for now, then in zip(served, before, strict=True)))
    finally:
        stop.set()
        for thread in threads:
            thread.join(10)
    assert not failures
    assert rig.sidecar.log.count("not taken over") == 1


def test_drain_does_not_wait_for_goodbyes(tls_rig: Rigs) -> None:
    """A client that holds an idle connection and never reads it holds nothing up."""
    rig = tls_rig()
    with rig.sidecar.connect() as client:
        client.request("GET", "/v1/models", None)
        assert client.answer().status == 200
        began = time.monotonic()
        rig.sidecar.stop()
        assert time.monotonic() - began < 5
    assert "cut off" not in rig.sidecar.log


# -- engines ---------------------------------------------------------------------------------------------------


def test_prefill_with_a_foreign_name_is_not_used(tls_rig: Rigs, tmp_path: Path) -> None:
    """Row `prefill_refused`: nothing was sent, so another endpoint or the policy takes over; the log says why."""
    wrong = CA.issue("other.example").server_context(tmp_path / "wrong")
    rig = tls_rig(prefill=wrong)
    answer = rig.chat()
    assert answer.status == 200
    assert answer.decision == "recompute; reason=prefill_refused"
    assert not rig.prefilled()
    eventually(lambda: "certificate not accepted: IP address mismatch" in rig.sidecar.log)
    assert rig.sidecar.metrics()("fallbacks_total", stage="prefill", reason="refused") == 1


def test_prefill_of_a_foreign_authority_is_not_used(tls_rig: Rigs, tmp_path: Path) -> None:
    foreign = Authority().issue(HOST).server_context(tmp_path / "foreign")
    rig = tls_rig("--on-prefill-failure", "fail", prefill=foreign)
    answer = rig.chat()
    assert (answer.status, answer.reason_code) == (502, "prefill_refused")
    assert not rig.prefilled()


def test_check_can_be_left_out(tls_rig: Rigs, tmp_path: Path) -> None:
    foreign = Authority().issue("other.example").server_context(tmp_path / "foreign")
    flags = ("--tls-insecure-skip-verify", "prefiller", "--tls-insecure-skip-verify", "decoder")
    rig = tls_rig(*flags, prefill=foreign, decode=foreign)
    assert rig.chat().decision.startswith("remote")


def test_plain_prefill_where_tls_is_wanted(tls_rig: Rigs, tmp_path: Path) -> None:
    rig = tls_rig("--enable-tls", "prefiller", "--tls-ca", str(CA.write(tmp_path / "ca.crt")))
    answer = rig.chat()
    assert answer.status == 200
    assert answer.decision in ("recompute; reason=prefill_refused", "recompute; reason=prefill_reset")


def test_prefill_that_never_answers_the_handshake(tls_rig: Rigs, tmp_path: Path) -> None:
    """Accepted by its kernel and no more: the connect timeout holds for the handshake too."""
    with socket.create_server((HOST, 0)) as listener:
        rig = tls_rig(*quick(), "--enable-tls", "prefiller", "--tls-ca", str(CA.write(tmp_path / "ca.crt")))
        rig.target = f"{HOST}:{listener.getsockname()[1]}"
        answer = rig.chat()
        assert answer.decision == "recompute; reason=prefill_unreachable"
        port = listener.getsockname()[1]
        eventually(lambda: port not in {one.remote_port for one in rig.sidecar.descriptors().connections})


def test_decode_with_a_foreign_name_is_not_there(tls_rig: Rigs, tmp_path: Path) -> None:
    """The probe says it as well: such a sidecar is not ready."""
    wrong = CA.issue("other.example").server_context(tmp_path / "wrong")
    with ThreadedEngine(tls=wrong) as engine:
        sidecar = Sidecar(
            *("--model-server-port", str(engine.port), "--enable-tls", "decoder"),
            *("--tls-ca", str(CA.write(tmp_path / "ca.crt"))),
            ready="/livez",
        )
        try:
            eventually(lambda: "certificate not accepted" in sidecar.admin("GET", "/readyz")[1])
            answer = sidecar.ask("POST", COMPLETIONS, completion(), [("Authorization", KEY)])
            assert (answer.status, answer.reason_code) == (503, "decode_refused")
            assert not engine.requests
            sidecar.stop()
        finally:
            sidecar.kill()


def test_engines_that_ask_for_a_certificate(tls_rig: Rigs, tmp_path: Path) -> None:
    """mTLS the other way round: a neighbour that is not a sidecar gets nothing from the engines."""
    strict = PAIR.server_context(tmp_path / "engines")
    strict.load_verify_locations(cadata=CA.pem.decode())
    strict.verify_mode = ssl.CERT_REQUIRED
    own = CA.issue("sidecar").write(tmp_path / "own")
    rig = tls_rig("--tls-client-cert", str(own), prefill=strict, decode=strict)
    assert rig.chat().decision.startswith("remote")
    with pytest.raises((ssl.SSLError, ConnectionError, Cut)):
        _ask_once((HOST, rig.decode.port), CA.client_context())


def test_prefill_that_asks_for_a_certificate_that_we_have_not(tls_rig: Rigs, tmp_path: Path) -> None:
    """TLS 1.3 says so after the handshake; a fault of the connection, not a hang."""
    strict = PAIR.server_context(tmp_path / "engines")
    strict.load_verify_locations(cadata=CA.pem.decode())
    strict.verify_mode = ssl.CERT_REQUIRED
    rig = tls_rig(prefill=strict)
    began = time.monotonic()
    answer = rig.chat()
    assert answer.status == 200
    assert answer.decision in ("recompute; reason=prefill_reset", "recompute; reason=prefill_refused")
    assert time.monotonic() - began < AT_ONCE_S


def test_probe_key_for_probes_and_warm_up(tmp_path: Path) -> None:
    """It goes to the engines' probes and warm-up, is read again, and never to be seen."""
    token = tmp_path / "token"
    token.write_text(f"{CANARY}-one\n", encoding="ascii")
    with ThreadedEngine(api_key=f"{CANARY}-one") as decode, ThreadedEngine(api_key=f"{CANARY}-one") as prefill:
        sidecar = Sidecar(
            *("--disagg", "on", "--prefill", prefill.address, "--model-server-port", str(decode.port)),
            *("--local-side-channel", f"127.0.0.1:{decode.side_channel_port}"),
            *("--prefill-side-channel-port", str(prefill.side_channel_port)),
            *("--warm-up", "on", "--probe-token-file", str(token)),
        )
        try:
            eventually(lambda: "warm-up: warm" in sidecar.log)
            for engine in (decode, prefill):
                assert {one.header("authorization") for one in engine.requests} == {f"Bearer {CANARY}-one"}
            token.write_text(f"{CANARY}-two", encoding="ascii")
            eventually(lambda: decode.requests[-1].header("authorization") == f"Bearer {CANARY}-two")
            assert CANARY not in sidecar.admin("GET", "/config")[1]
            sidecar.stop()
        finally:
            sidecar.kill()


def test_silent_peer_check_speaks_tls(tls_rig: Rigs, tmp_path: Path) -> None:
    """While decode waits for KV the peer's health is asked over TLS: a healthy one is not taken for silent."""
    rig = all_tls(tls_rig, tmp_path, *quick())
    rig.decode.fault(Fault(delay_head_seconds=0.8), path=CHAT)
    answer = rig.chat()
    assert answer.decision.startswith("remote")
    assert any(one.path == "/health" for one in rig.prefill.requests)
