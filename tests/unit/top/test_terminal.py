"""What `pd-sidecar top` says of an address that is no admin port: which one, what was wanted, what was found."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidecar.cli import main
from tests.ports import free_ports
from tests.saying import saying


def page(status: str, kind: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    return head.encode("ascii") + body


WANTED = "the admin port of a sidecar is wanted (--metrics-port, 9090 as a rule; no path)"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, f"/metrics: Connection refused; {WANTED}"),
        (page("404 Not Found", "text/plain", b"x"), f"/metrics: 404 Not Found; {WANTED}"),
        (page("403 Forbidden", "text/plain", b"x"), "/metrics: 403 Forbidden; its key is wanted (--token-file)"),
        (
            page("200 OK", "text/html", b"pd_sidecar_x{\n"),
            "/metrics: found text/html, and no exposition of metrics; " + WANTED,
        ),
        (page("200 OK", "text/plain", b"up 1\n"), "/metrics: found text/plain without pd_sidecar_; " + WANTED),
        (b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f", f"/metrics: no HTTP; {WANTED}"),
    ],
)
def test_no_admin_port(answer: bytes | None, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with saying(answer) as url:
        assert main(["top", "--once", "--url", url]) == 1
    assert capsys.readouterr().err.splitlines() == [f"pd-sidecar: {url}{said}"]


def test_no_url(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--url", "http://127.0.0.1:admin"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"nonnumeric port: 'admin'; {WANTED}")


@pytest.mark.parametrize("content", [None, b"\xff"])
def test_no_key(content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    assert main(["top", "--once", "--url", f"127.0.0.1:{free_ports()}", "--token-file", str(path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    found = "No such file or directory" if content is None else "no ASCII"
    assert line == f"pd-sidecar: --token-file {path}: {found}; the sidecar's --admin-token-file is wanted"
