"""TLS towards both engines over real sockets, data plane and control plane: whom the sidecar believes."""

from __future__ import annotations

import socket
import ssl
import time
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.engine import Fault, ThreadedEngine
from tests.integration.apis import CHAT, COMPLETIONS
from tests.integration.client import Cut
from tests.integration.sidecar import AT_ONCE_S, CANARY, KEY, Sidecar, completion, eventually, quick
from tests.integration.tls import CA, HOST, PAIR, Rigs, all_tls, ask_once


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
        ask_once((HOST, rig.decode.port), CA.client_context())


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
