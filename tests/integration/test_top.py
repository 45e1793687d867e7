"""`pd-sidecar top` against a real sidecar: one frame as text, and live in a terminal."""

from __future__ import annotations

import contextlib
import http.client
import os
import pty
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.apis import COMPLETIONS
from tests.integration.sidecar import CANARY, ROOT, Rig, completion
from tests.ports import free_ports

TOP = (sys.executable, "-m", "sidecar", "top")


def once(url: str, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TOP, "--once", "--url", url, *more], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
    )


def test_one_frame(rigged: Callable[..., Rig]) -> None:
    rig = rigged("--drain-timeout", "58")  # its own: of many endpoints a frame shows the first
    assert rig.post(COMPLETIONS, completion()).decision.startswith("remote")
    done = once(f"127.0.0.1:{rig.sidecar.admin_port}")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert "disagg on" in lines[0]
    assert "   ready   effective" in lines[0]
    assert any(line.split()[:2] == ["remote", "on"] for line in lines)
    assert any(line.startswith(rig.prefill.address) and line.split()[1] == "closed" for line in lines)
    assert "\x1b" not in done.stdout


def test_nobody_there(rig: Rig) -> None:
    done = once(f"http://127.0.0.1:{free_ports()}")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("pd-sidecar: http://127.0.0.1:")
    assert "Connection refused" in done.stderr
    # The serving port is not the admin port, and that is said.
    done = once(f"http://127.0.0.1:{rig.sidecar.port}")
    assert done.returncode == 1
    assert "--metrics-port" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_without_a_terminal(rig: Rig) -> None:
    done = subprocess.run(
        [*TOP, "--url", f"http://127.0.0.1:{rig.sidecar.admin_port}"],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "--once" in done.stderr


def _own_address() -> str:
    """An address of this machine that is not loopback; "" if it has none. Nothing is sent to find out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def _status(method: str, address: str, port: int, path: str, headers: dict[str, str]) -> int:
    connection = http.client.HTTPConnection(address, port, timeout=10)
    try:
        connection.request(method, path, b"off" if method == "PUT" else None, headers)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.skipif(not _own_address(), reason="this machine has the loopback interface only")
def test_from_outside_the_pod_with_the_key_only(rigged: Callable[..., Rig], tmp_path: Path) -> None:
    """Metrics and probes are for everyone; what tells of requests and what turns the switch is not."""
    token = tmp_path / "token"
    token.write_text(f"{CANARY}-admin", encoding="ascii")
    rig = rigged("--admin-token-file", str(token))
    address, port = _own_address(), rig.sidecar.admin_port
    key = {"authorization": f"Bearer {CANARY}-admin"}
    for path in ("/metrics", "/livez", "/readyz", "/startupz"):
        assert _status("GET", address, port, path, {}) == 200
    for method, path in (
        *(("GET", "/config"), ("GET", "/decisions"), ("GET", "/endpoints")),
        *(("GET", "/disagg"), ("PUT", "/disagg")),
    ):
        for headers in ({}, {"authorization": "Bearer x"}):
            assert _status(method, address, port, path, headers) == 403
    assert rig.sidecar.admin("GET", "/disagg") == (200, "on\n")
    assert _status("GET", address, port, "/decisions", key) == 200
    done = once(f"http://{address}:{port}")
    assert (done.returncode, "--token-file" in done.stderr) == (1, True)
    assert once(f"http://{address}:{port}", "--token-file", str(token)).returncode == 0


def test_live(rig: Rig) -> None:
    """In a terminal: it draws, goes on drawing, and q leaves everything as it was."""
    main, side = pty.openpty()
    process = subprocess.Popen(
        [*TOP, "--url", f"http://127.0.0.1:{rig.sidecar.admin_port}"],
        cwd=ROOT,
        stdin=side,
        stdout=side,
        stderr=side,
    )
    os.close(side)
    seen = b""

    def read_until(wanted: Callable[[], bool]) -> None:
        nonlocal seen
        deadline = time.monotonic() + 15
        while not wanted():
            assert time.monotonic() < deadline, seen
            try:
                seen += os.read(main, 65536)
            except OSError:  # the other side is closed
                assert wanted(), seen
                return

    try:
        read_until(lambda: b"in flight: 0 at decode" in seen)
        assert seen.startswith(b"\x1b[?1049h")
        assert rig.post(COMPLETIONS, completion()).status == 200
        read_until(lambda: b"over the last " in seen)
        os.write(main, b"q")
        read_until(lambda: seen.endswith(b"\x1b[?25h\x1b[?1049l"))
        assert process.wait(10) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
        os.close(main)
