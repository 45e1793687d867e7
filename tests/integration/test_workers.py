"""`--workers`: several processes that serve one port are one sidecar to whoever looks at it and to every engine."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.engine import Fault, ThreadedEngine
from tests.integration.client import Client
from tests.integration.crew import LOCAL, PATH, Crew, peers
from tests.integration.sidecar import Sidecar, completion, eventually, free_ports


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
    assert metrics("nixl_handshakes_total") > 0, "the hub's own"
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
    held = {pid: len(peers(pid, rig.sidecar.port)) for pid in rig.pids()}
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


def test_switch(crew: Callable[..., Crew]) -> None:
    """PUT /disagg reaches every worker."""
    rig = crew()
    with rig.connected_to(1) as one, rig.connected_to(2) as two:
        assert rig.sidecar.admin("PUT", "/disagg", "off") == (200, "off\n")
        for client in (one, two):
            eventually(lambda client=client: rig.remote(client).decision == "local; reason=disabled")
        assert rig.sidecar.admin("PUT", "/disagg", "on") == (200, "on\n")
        for client in (one, two):
            eventually(lambda client=client: rig.remote(client).decision.startswith("remote"))


def test_sighup(tmp_path: Path) -> None:
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


def test_ranks() -> None:
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
