"""`helm test` and TLS: the test pod's program asks a real sidecar that runs with the rendered arguments."""

import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.certificates import DAY, Authority
from tests.chart.render import Object, one, sidecars, validated, with_values
from tests.engine import ThreadedEngine
from tests.integration.sidecar import Sidecar, eventually
from tests.ports import free_ports

KEPT = ("--secure-serving", "--cert-path", "--client-ca")


@pytest.fixture
def engine() -> Iterator[ThreadedEngine]:
    with ThreadedEngine() as engine:
        yield engine


def started(documents: list[Object], engine: ThreadedEngine, secret: Path) -> Sidecar:
    """With what the chart says of TLS, and the secret in a folder of this machine."""
    arguments = [each for each in sidecars(documents)[0]["args"] if each.partition("=")[0] in KEPT]
    moved = [each.replace("/etc/pd-sidecar-tls", str(secret)) for each in arguments]
    return Sidecar(*moved, "--model-server-port", str(engine.port))


def answers(documents: list[Object], port: int) -> subprocess.CompletedProcess[str]:
    """What `helm test` runs, as the pod would; only the Service is elsewhere."""
    test = one(documents, "Pod", "test")["spec"]["containers"][0]
    scheme, _, service = test["args"][1].partition("://")
    assert service == "rel-pd-sidecar-decode:8000"
    command = [sys.executable, *test["command"][1:], test["args"][0], f"{scheme}://127.0.0.1:{port}"]
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("secret", ["", "decode-tls"])
def test_it_says_what_was_decided(secret: str, engine: ThreadedEngine, tmp_path: Path) -> None:
    documents = with_values({"sidecar.tls.secretName": secret})
    Authority().issue("decode").mount(tmp_path / "tls")
    sidecar = started(documents, engine, tmp_path / "tls")
    try:
        done = answers(documents, sidecar.port)
        assert (done.returncode, done.stderr) == (0, "")
        assert "1 token, decision: local; reason=" in done.stdout
        if secret:
            assert answers(with_values({}), sidecar.port).returncode != 0, "it is TLS"
    finally:
        sidecar.stop()
    validated["helm test's program against a real sidecar"] += 1


def test_a_renewed_secret_is_taken_over(engine: ThreadedEngine, tmp_path: Path) -> None:
    documents = with_values({"sidecar.tls.secretName": "decode-tls"})
    authority = Authority()
    authority.issue("decode").mount(tmp_path / "tls")
    sidecar = started(documents, engine, tmp_path / "tls")
    ends = "tls_certificate_not_after_seconds"
    try:
        before = sidecar.metrics()(ends)
        authority.issue("decode", ends=3 * DAY).mount(tmp_path / "tls")
        eventually(lambda: sidecar.metrics()(ends) > before + DAY.total_seconds())
        assert answers(documents, sidecar.port).returncode == 0
    finally:
        sidecar.stop()


def test_clients_without_a_certificate_are_refused_where_one_is_wanted(
    engine: ThreadedEngine, tmp_path: Path
) -> None:
    values = {"sidecar.tls.secretName": "decode-tls"}
    documents = with_values(values | {"sidecar.tls.clientCa": True})
    assert not [each for each in documents if each["kind"] == "Pod"], "helm test has no certificate"
    authority = Authority()
    authority.issue("decode").mount(tmp_path / "tls")
    authority.write(tmp_path / "tls" / "ca.crt")
    sidecar = started(documents, engine, tmp_path / "tls")
    try:
        assert answers(with_values(values), sidecar.port).returncode != 0
    finally:
        sidecar.stop()


def test_it_fails_without_an_engine() -> None:
    assert answers(with_values({}), free_ports()).returncode != 0


def test_it_fails_without_a_token() -> None:
    class Empty(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._say(b'{"data": [{"id": "sim"}], "usage": {"completion_tokens": 0}}')

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.do_GET()

        def _say(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Empty) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        done = answers(with_values({}), server.server_port)
        server.shutdown()
    assert done.returncode == 1
    assert "0 token" in done.stdout
