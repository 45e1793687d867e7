"""TLS on the serving port over real sockets: who is let in, whose certificate is shown, and how it ends."""

from __future__ import annotations

import ssl
import threading
import time
import warnings
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.integration.client import Client, Cut
from tests.integration.sidecar import AT_ONCE_S, eventually, quick
from tests.integration.tls import CA, HOST, MIB, PAIR, Rigs, ask_once


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


def test_client_without_certificate_is_refused(tls_rig: Rigs, tmp_path: Path) -> None:
    """mTLS: no certificate and one of a foreign authority both end in the handshake; no request is read."""
    rig = tls_rig("--client-ca", str(CA.write(tmp_path / "clients.crt")))
    foreign = Authority()
    for number, pair in enumerate((None, foreign.issue("client"))):
        context = CA.client_context(pair, tmp_path / str(number))
        with pytest.raises((ssl.SSLError, ConnectionError, Cut)):
            ask_once(rig.sidecar.address, context)
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
