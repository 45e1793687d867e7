"""`--workers`: several processes that serve one port are one sidecar to whoever looks at it, and one of them that
dies, hangs or is alone takes nothing but its own connections along.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.engine import Fault, ThreadedEngine
from tests.integration.client import Client, Cut
from tests.integration.sidecar import LISTEN, ROOT, Rig, Sidecar, close_idle, completion, eventually, free_ports

PATH = "/v1/completions"
SLOWLY = Fault(drip_bytes=200, drip_seconds=0.05)
LOCAL = {"prompt": "short", "model": "sim", "max_tokens": 2}


class Crew(Rig):
    """A rig whose sidecar has several workers."""

    def pids(self) -> list[int]:
        """Of the worker processes."""
        pid = self.sidecar.process.pid
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]

    def worker_of(self, client: Client) -> int:
        """Number of the worker that has this connection: asked with a request that stays local."""
        client.request("POST", PATH, LOCAL)
        wanted = client.answer("POST").header("x-request-id")
        return next(one["worker"] for one in self.sidecar.decisions() if one["request_id"] == wanted)

    def pid_of(self, worker: int) -> int:
        """The process that is this worker."""
        with self.connected_to(worker) as client:
            local = client.socket.getsockname()[1]
            for pid in self.pids():
                if local in _peers(pid, self.sidecar.port):
                    return pid
        raise AssertionError(f"no process has a connection of worker {worker}")

    def connected_to(self, worker: int) -> Client:
        """A connection that the kernel has dealt to this worker."""
        for _ in range(64):
            client = self.sidecar.connect()
            if self.worker_of(client) == worker:
                return client
            client.close()
        raise AssertionError(f"none of 64 connections went to worker {worker}")

    def refuse(self) -> None:
        """The prefill engine takes no connection and keeps none."""
        self.prefill.refuse()
        close_idle(self.prefill)

    def remote(self, client: Client, **fields: Any) -> Any:
        """One request that may go remote, on this connection."""
        client.request("POST", PATH, completion(**fields), self.headers())
        return client.answer("POST")


def _peers(pid: int, port: int) -> set[int]:
    """Remote ports of the connections to `port` that a process has open."""
    sockets = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            sockets.add(str(link.readlink()))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            columns = line.split()
            local, remote = (int(address.rpartition(":")[2], 16) for address in columns[1:3])
            if f"socket:[{columns[9]}]" in sockets and local == port and columns[3] != LISTEN:
                found.add(remote)
    return found


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.fixture
def crew() -> Iterator[Callable[..., Crew]]:
    """`crew(*flags)`: two workers between two engines; ended with SIGTERM and looked at, unless it has ended."""
    with ExitStack() as stack:

        def make(*flags: str, **options: Any) -> Crew:
            prefill = stack.enter_context(ThreadedEngine())
            decode = stack.enter_context(ThreadedEngine(port=free_ports(8), side_channel_port=free_ports(8)))
            sidecar = Sidecar(
                *("--workers", "2", "--model-server-port", str(decode.port)),
                *("--local-side-channel", f"127.0.0.1:{decode.side_channel_port}"),
                *("--disagg", "on", "--prefill-allow", "127.0.0.0/8", "--recompute-max-concurrent", "100", *flags),
                **options,
            )
            stack.callback(sidecar.stop)
            return Crew(sidecar, prefill, decode)

        yield make


def test_one_sidecar(crew: Callable[..., Crew]) -> None:
    """Both workers serve; answers are the engine's; the numbers are sums; nothing is left open."""
    rig = crew()
    before = [_open(pid) for pid in rig.pids()]
    seen = {1: 0, 2: 0}
    for _ in range(40):
        body = completion()
        answer = rig.post(PATH, body)
        assert answer.status == 200
        assert answer.decision == f"remote; prefill={rig.prefill.address}"
        assert answer.text == rig.expected(PATH, body)
    for record in rig.sidecar.decisions():
        seen[record["worker"]] += 1
    assert sum(seen.values()) == 40
    assert min(seen.values()) > 2, seen
    metrics = rig.sidecar.metrics()
    assert metrics("requests_total", decision="remote", status="200") == 40
    assert metrics("ttft_seconds_count", decision="remote") == 40
    assert metrics("prefill_seconds_bucket", le="+Inf") == 40
    assert metrics("handoffs_total", outcome="used") == 40
    assert metrics("workers", state="serving") == 2
    assert metrics("worker_resident_bytes") > 2e7
    assert metrics("nixl_handshakes_total", outcome="ok") + metrics("nixl_handshakes_total") > 0, "the hub's own"
    times = [record["time"] for record in rig.sidecar.decisions()]
    assert times == sorted(times, reverse=True)
    eventually(lambda: not rig.sidecar.in_flight())
    rig.prefill.stop()
    rig.decode.stop()
    eventually(lambda: all(_open(pid) <= was + 1 for pid, was in zip(rig.pids(), before, strict=True)))


def _open(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def test_legs_are_counted_once(crew: Callable[..., Crew]) -> None:
    """What both workers have open at an endpoint is one number, on /endpoints and in the metrics."""
    rig = crew()
    rig.prefill.fault(Fault(silence=True), path=PATH)
    with rig.connected_to(1) as one, rig.connected_to(2) as two:
        for client in (one, two):
            client.request("POST", PATH, completion(), rig.headers())
        eventually(lambda: rig.sidecar.metrics()("prefill_inflight", prefill=rig.prefill.address) == 2)
        assert rig.sidecar.metrics()("inflight", leg="prefill") == 2
        assert f'"{rig.prefill.address}"' in rig.sidecar.admin("GET", "/endpoints")[1]
        assert '"in_flight": 2, "users": 2' in rig.sidecar.admin("GET", "/endpoints")[1]
    eventually(lambda: '"in_flight": 0, "users": 0' in rig.sidecar.admin("GET", "/endpoints")[1])
    assert not rig.sidecar.in_flight()


def test_breaker_is_one(crew: Callable[..., Crew]) -> None:
    """What one worker finds out spares the others the attempt, and one trial closes it for all."""
    rig = crew()
    with rig.connected_to(1) as one, rig.connected_to(2) as two:
        assert rig.remote(one).decision.startswith("remote")
        assert rig.remote(two).decision.startswith("remote")
        attempts = rig.sidecar.metrics()("prefill_attempts_total")
        rig.refuse()
        assert rig.remote(one).decision.startswith("recompute")
        time.sleep(0.02)
        assert rig.remote(two).decision == "local; reason=no_usable_prefill"
        metrics = rig.sidecar.metrics()
        assert metrics("prefill_attempts_total") == attempts + 1
        assert metrics("breaker_state", prefill=rig.prefill.address) == 2
        rig.prefill.accept()
        eventually(lambda: rig.remote(two).decision.startswith("remote"))
        time.sleep(0.02)
        assert rig.remote(one).decision.startswith("remote")
        assert rig.sidecar.metrics()("breaker_state") == 0
    assert rig.sidecar.log.count(": breaker open\n") == 2, "the change, and why a prompt stayed"
    assert rig.sidecar.log.count("breaker closed") == 1


def test_breaker_of_an_endpoint_that_only_one_has_seen(crew: Callable[..., Crew]) -> None:
    """A gateway names endpoints request by request: each worker knows those that another was sent to."""
    rig = crew()
    rig.target = f"127.0.0.1:{free_ports()}"
    with rig.connected_to(1) as one, rig.connected_to(2) as two:
        assert rig.remote(one).decision == "recompute; reason=prefill_refused"
        time.sleep(0.02)
        assert rig.remote(two).decision == "local; reason=no_usable_prefill"


def test_failures_in_a_row_are_counted_over_all(crew: Callable[..., Crew]) -> None:
    """Three failures open, whoever had them."""
    rig = crew("--prefill-attempts", "1")
    with rig.connected_to(1) as one, rig.connected_to(2) as two:
        rig.prefill.fault(Fault(status=500), path=PATH)
        for client in (one, two, one):
            assert rig.remote(client).decision.startswith("recompute; reason=prefill")
            time.sleep(0.02)
        assert rig.remote(two).decision == "local; reason=no_usable_prefill"


def test_decisions_see_what_others_have_at_decode(crew: Callable[..., Crew]) -> None:
    """A prompt that one worker has sent to the decode engine is before the next one of another worker, too."""
    rig = crew("--disagg", "auto")
    with rig.connected_to(1) as one, rig.connected_to(2) as two:
        rig.decode.fault(Fault(silence=True), path=PATH, times=1)
        nobody = [("x-prefiller-host-port", f"127.0.0.1:{free_ports()}")]
        one.request("POST", PATH, completion(2000), nobody)  # recomputed
        rig.decode.wait_for(lambda engine: any(b"kanarienvogel" in received.body for received in engine.requests))
        time.sleep(0.1)
        inputs = rig.decision_on(rig.remote(two))["inputs"]
        assert inputs["local_ahead"] >= 1500
        assert inputs["streams"] >= 1
    eventually(lambda: not rig.sidecar.in_flight())
    with rig.connected_to(2) as two:
        eventually(lambda: rig.decision_on(rig.remote(two))["inputs"]["local_ahead"] == 0)


def test_budget_is_exact(crew: Callable[..., Crew]) -> None:
    """However many fail at once in both workers, so many are recomputed; a killed worker's are given back."""
    rig = crew("--recompute-max-concurrent", "3")
    rig.refuse()
    rig.decode.fault(Fault(silence=True), path=PATH)
    statuses: list[int] = []

    def ask() -> None:
        with contextlib.suppress(OSError):
            statuses.append(rig.post(PATH, completion()).status)

    threads = [threading.Thread(target=ask) for _ in range(40)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(statuses) == 37)
    assert set(statuses) == {503}
    assert rig.sidecar.metrics()("recompute_inflight") == 3
    held = {pid: len(_peers(pid, rig.sidecar.port)) for pid in rig.pids()}
    assert sum(held.values()) == 3
    victim = max(held, key=lambda pid: held[pid])
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: rig.sidecar.metrics()("recompute_inflight") == 3 - held[victim])
    rig.decode.faults.clear()
    rig.sidecar.wait_until("/readyz")
    for pid in rig.pids():
        if pid != victim:
            os.kill(pid, signal.SIGKILL)  # the others' requests end with their connections
    for thread in threads:
        thread.join(10)
    eventually(lambda: rig.sidecar.metrics()("recompute_inflight") == 0)
    eventually(lambda: rig.sidecar.metrics()("workers", state="serving") == 2)


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


def test_switch(crew: Callable[..., Crew], tmp_path: Path) -> None:
    """PUT /disagg and SIGHUP reach every worker."""
    file = tmp_path / "config.yaml"
    file.write_text("log-level: info\n", encoding="utf-8")
    rig = crew("--config", str(file))
    with rig.connected_to(1) as one, rig.connected_to(2) as two:
        assert rig.sidecar.admin("PUT", "/disagg", "off") == (200, "off\n")
        for client in (one, two):
            eventually(lambda client=client: rig.remote(client).decision == "local; reason=disabled")
        assert rig.sidecar.admin("PUT", "/disagg", "on") == (200, "on\n")
        for client in (one, two):
            eventually(lambda client=client: rig.remote(client).decision.startswith("remote"))


def test_sighup(tmp_path: Path, crew: Callable[..., Crew]) -> None:
    """The file's word, which no flag overrides here, reaches every worker."""
    file = tmp_path / "config.yaml"
    file.write_text("disagg: 'on'\n", encoding="utf-8")
    with ThreadedEngine() as prefill, ThreadedEngine(port=free_ports(8)) as decode:
        sidecar = Sidecar(
            *("--workers", "2", "--config", str(file), "--model-server-port", str(decode.port)),
            *("--local-side-channel", f"127.0.0.1:{decode.side_channel_port}", "--prefill-allow", "127.0.0.0/8"),
        )
        rig = Crew(sidecar, prefill, decode)
        try:
            with rig.connected_to(1) as one, rig.connected_to(2) as two:
                assert rig.remote(one).decision.startswith("remote")
                file.write_text("disagg: 'off'\n", encoding="utf-8")
                sidecar.signal(signal.SIGHUP)
                for client in (one, two):
                    eventually(lambda client=client: rig.remote(client).decision == "local; reason=disabled")
        finally:
            sidecar.stop()


def test_discovered_endpoints(crew: Callable[..., Crew], tmp_path: Path) -> None:
    """Who joins and who leaves is known to every worker, and the side channel stays for who still uses it."""
    file = tmp_path / "endpoints"
    file.write_text("", encoding="utf-8")
    rig = crew("--discovery", f"file:{file}")
    target, rig.target = rig.target, ""
    with rig.connected_to(1) as one, rig.connected_to(2) as two:
        assert rig.remote(one).decision == "local; reason=no_target"
        file.write_text(f"{target}\n", encoding="utf-8")
        for client in (one, two):
            eventually(lambda client=client: rig.remote(client).decision == f"remote; prefill={target}")
        rig.prefill.fault(Fault(delay_head_seconds=1.5), path=PATH, times=1)
        one.request("POST", PATH, completion(), rig.headers())
        eventually(lambda: rig.sidecar.metrics()("prefill_inflight") == 1)
        file.write_text("", encoding="utf-8")
        eventually(lambda: rig.remote(two).decision == "local; reason=no_target")
        assert one.answer("POST").decision == f"remote; prefill={target}"
        eventually(lambda: target not in rig.sidecar.admin("GET", "/endpoints")[1])


def test_port_taken() -> None:
    """As ever: exit code 2 and one line; also where the one who has it would share it."""
    with ThreadedEngine() as decode:
        first = Sidecar("--workers", "2", "--model-server-port", str(decode.port), "--nixl-relay", "off")
        try:
            for port, admin_port, said in (
                (first.port, free_ports(), f"port {first.port}: Address already in use"),
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


def test_ranks(crew: Callable[..., Crew]) -> None:
    """Every worker serves every rank's port."""
    engines = free_ports(2)
    with ThreadedEngine(port=engines) as first, ThreadedEngine(port=engines + 1) as second:
        sidecar = Sidecar(
            *("--workers", "2", "--data-parallel-size", "2", "--model-server-port", str(engines)),
            *("--nixl-relay", "off"),
            ranks=2,
        )
        try:
            for _ in range(10):
                for rank in (0, 1):
                    with Client(("127.0.0.1", sidecar.port + rank)) as client:
                        client.request("POST", PATH, LOCAL)
                        assert client.answer("POST").status == 200
            served = [sum(one.method == "POST" for one in engine.requests) for engine in (first, second)]
            assert served == [10, 10]
            assert {one["worker"] for one in sidecar.decisions()} == {1, 2}
        finally:
            sidecar.stop()
