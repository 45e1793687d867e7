"""`--workers`: a process of a sidecar that dies, hangs, is left alone or told to end takes nothing but its own
connections along, and leaves nobody behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine import Fault, ThreadedEngine
from tests.integration.client import Cut
from tests.integration.crew import PATH, SLOWLY, Crew, gone
from tests.integration.sidecar import ROOT, Sidecar, completion, eventually, free_ports


def test_killed_worker(crew: Callable[..., Crew]) -> None:
    """Its connections are lost and nothing else: counts stay, the port is served, another takes its place."""
    rig = crew()
    for _ in range(20):
        assert rig.post(PATH, completion()).status == 200
    before = rig.sidecar.metrics()
    descriptors = rig.sidecar.open_descriptors
    with rig.connected_to(1) as one, rig.connected_to(2) as two:
        pids = {number: rig.pid_of(number) for number in (1, 2)}
        rig.decode.fault(Fault(stall_after_events=2), path=PATH, times=2)
        for client in (one, two):
            client.request("POST", PATH, completion(max_tokens=8, stream=True), rig.headers())
            assert client.head().status == 200
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises((Cut, OSError)):
            one.answer("POST")
        # Until the hub has its exit code: its first thread is gone before what all of them have open is closed.
        eventually(lambda: not Path(f"/proc/{pids[1]}").exists())
        for _ in range(10):
            assert rig.post(PATH, completion()).status == 200
        assert rig.sidecar.admin("GET", "/readyz")[0] == 200
        assert rig.sidecar.metrics()("requests_total") >= before("requests_total") + 10
        eventually(lambda: rig.sidecar.metrics()("inflight", leg="decode") == 1)
        eventually(lambda: rig.sidecar.metrics()("workers", state="serving") == 2)
        assert rig.pid_of(2) == pids[2]
        assert rig.pid_of(1) != pids[1]
    metrics = rig.sidecar.metrics()
    assert metrics("worker_deaths_total", worker="1") == 1
    assert metrics("worker_deaths_total", worker="2") == 0
    for name in ("requests_total", "ttft_seconds_count", "handoffs_total", "worker_cpu_seconds_total"):
        assert metrics(name) >= before(name)
    assert f"worker 1 (pid {pids[1]}) ended: SIGKILL; started again in 0.2 s" in rig.sidecar.log
    eventually(lambda: not rig.sidecar.in_flight())
    eventually(lambda: rig.sidecar.open_descriptors <= descriptors)


def test_restarted_worker_knows_what_the_others_know(crew: Callable[..., Crew]) -> None:
    """Switch, breaker and block are told to whoever comes later."""
    rig = crew()
    with rig.connected_to(2) as two:
        assert rig.remote(two).decision.startswith("remote")
        rig.refuse()
        for _ in range(4):  # the pause doubles with each failed trial
            rig.remote(two)
            time.sleep(0.3)
        os.kill(rig.pid_of(1), signal.SIGKILL)
        eventually(lambda: rig.sidecar.metrics()("worker_deaths_total") == 1)
        eventually(lambda: rig.sidecar.metrics()("workers", state="serving") == 2)
        assert rig.sidecar.admin("PUT", "/disagg", "off")[0] == 200
        os.kill(rig.pid_of(1), signal.SIGKILL)
        eventually(lambda: rig.sidecar.metrics()("worker_deaths_total") == 2)
        eventually(lambda: rig.sidecar.metrics()("workers", state="serving") == 2)
        with rig.connected_to(1) as one:
            assert rig.remote(one).decision == "local; reason=disabled"


def test_stopped_worker(crew: Callable[..., Crew]) -> None:
    """A worker that hangs is named; a scrape answers with what it had told last."""
    rig = crew()
    for _ in range(10):
        assert rig.post(PATH, completion()).status == 200
    before = rig.sidecar.metrics()
    pid = rig.pid_of(2)
    requests = rig.sidecar.metrics()("requests_total")
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        metrics = rig.sidecar.metrics()
        assert time.monotonic() - began < 2
        assert metrics("workers", state="silent") == 1
        assert metrics("worker_silences_total", worker="2") >= 1
        assert metrics("requests_total") == requests >= before("requests_total")
        assert f"worker 2 (pid {pid}) does not answer" in rig.sidecar.log
        assert {one["worker"] for one in rig.sidecar.decisions()} == {1}
    finally:
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: rig.sidecar.metrics()("workers", state="serving") == 2)
    assert f"worker 2 (pid {pid}) answers again" in rig.sidecar.log


def test_stopped_worker_does_not_outlive_the_hub(crew: Callable[..., Crew]) -> None:
    """SIGTERM ends it too, in the time that answers get."""
    rig = crew("--drain-timeout", "0.5")
    pids = rig.pids()
    os.kill(pids[0], signal.SIGSTOP)
    rig.sidecar.signal(signal.SIGTERM)
    assert rig.sidecar.exit_code() == 0
    assert all(map(gone, pids))
    assert "did not end" in rig.sidecar.log


def test_killed_hub(crew: Callable[..., Crew]) -> None:
    """Nobody is left behind: open answers come to their end, then the workers end and the ports are free."""
    rig = crew()
    with rig.connected_to(1) as one, rig.connected_to(2) as two:
        pids = rig.pids()
        rig.decode.fault(SLOWLY, path=PATH)
        for client in (one, two):
            client.request("POST", PATH, completion(max_tokens=8, stream=True), rig.headers())
            assert client.head().status == 200
        rig.sidecar.process.kill()
        rig.sidecar.process.wait()
        for client in (one, two):
            body = b""
            with contextlib.suppress(OSError):
                while data := client.socket.recv(65536):
                    body += data
            assert b"[DONE]" in body
    eventually(lambda: all(map(gone, pids)))
    for port in (rig.sidecar.port, rig.sidecar.admin_port):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            probe.listen()


def test_drain(crew: Callable[..., Crew]) -> None:
    """Streams of both workers come to their end; exit code 0; no process is left."""
    rig = crew()
    with rig.connected_to(1) as one, rig.connected_to(2) as two:
        pids = rig.pids()
        rig.decode.fault(SLOWLY, path=PATH)
        for client in (one, two):
            client.request("POST", PATH, completion(max_tokens=8, stream=True), rig.headers())
        answers = [client.head() for client in (one, two)]
        rig.sidecar.signal(signal.SIGTERM)
        eventually(lambda: "draining" in rig.sidecar.log)
        for client, answer in zip((one, two), answers, strict=True):
            client.body(answer, "POST")
            assert answer.events[-1] == b"[DONE]"
    assert rig.sidecar.exit_code() == 0
    assert all(map(gone, pids))


def test_signal_before_it_serves(crew: Callable[..., Crew]) -> None:
    """Workers take a second to start; whoever does not want them any more need not wait for it."""
    rig = crew(ready=None)
    eventually(lambda: len(rig.pids()) == 2)
    pids = rig.pids()
    rig.sidecar.signal(signal.SIGTERM)
    assert rig.sidecar.exit_code() == 0
    assert all(map(gone, pids))


def test_second_signal(crew: Callable[..., Crew]) -> None:
    """Ends at once, all of them."""
    rig = crew()
    with rig.connected_to(1) as one:
        pids = rig.pids()
        rig.decode.fault(Fault(stall_after_events=2), path=PATH)
        one.request("POST", PATH, completion(stream=True), rig.headers())
        assert one.head().status == 200
        rig.sidecar.signal(signal.SIGTERM)
        eventually(lambda: "draining" in rig.sidecar.log)
        rig.sidecar.signal(signal.SIGTERM)
        assert rig.sidecar.exit_code(3) == 0
    assert all(map(gone, pids))


def test_port_taken() -> None:
    """As ever: exit code 2 and one line; also where the one who has it would share it."""
    with ThreadedEngine() as decode:
        first = Sidecar("--workers", "2", "--model-server-port", str(decode.port), "--nixl-relay", "off")
        try:
            for port, admin_port, said in (
                (first.port, free_ports(), f"--port {first.port}: Address already in use"),
                (free_ports(), first.admin_port, f"--metrics-port {first.admin_port}: Address already in use"),
            ):
                flags = ("--port", str(port), "--metrics-port", str(admin_port), "--nixl-relay", "off")
                second = subprocess.run(
                    [sys.executable, "-m", "sidecar", "serve", "--workers", "2", *flags],
                    cwd=ROOT,
                    capture_output=True,
                    text=True,
                    timeout=20,
                    check=False,
                )
                assert second.returncode == 2
                assert f"cannot start: {said}" in second.stderr
                assert "Traceback" not in second.stderr
        finally:
            first.stop()
