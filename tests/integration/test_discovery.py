"""Prefill endpoints that come and go while requests run: found in a file, by DNS, in the Kubernetes API."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.engine import Fault, ThreadedEngine
from tests.integration.apis import CHAT, COMPLETIONS
from tests.integration.sidecar import Sidecar, chat, completion, eventually
from tests.kube.api import ThreadedApi
from tests.kube.objects import pod, pool
from tests.nameserver import ThreadedNameServer
from tests.ports import free_ports

if TYPE_CHECKING:
    from tests.integration.client import Answer

Started = Callable[..., Sidecar]


@pytest.fixture
def decode() -> Iterator[ThreadedEngine]:
    with ThreadedEngine() as engine:
        yield engine


@pytest.fixture
def started(decode: ThreadedEngine) -> Iterator[Started]:
    with ExitStack() as stack:

        def start(*flags: str, **options: Any) -> Sidecar:
            sidecar = Sidecar(
                *("--model-server-port", str(decode.port), "--disagg", "on"),
                *("--local-side-channel", f"127.0.0.1:{decode.side_channel_port}"),
                *flags,
                **options,
            )
            stack.callback(sidecar.stop)
            return sidecar

        yield start


def ask(sidecar: Sidecar, target: str = "", **fields: Any) -> Answer:
    headers = [("x-prefiller-host-port", target)] if target else []
    return sidecar.ask("POST", COMPLETIONS, completion(**fields), headers)


def known(sidecar: Sidecar) -> dict[str, dict[str, Any]]:
    """What /endpoints says, by address."""
    shown = json.loads(sidecar.admin("GET", "/endpoints")[1])
    return {one["address"]: one for one in shown["endpoints"]}


def write(path: Path, *lines: str) -> None:
    """In one step."""
    new = path.with_suffix(".new")
    new.write_text("".join(f"{line}\n" for line in lines))
    new.replace(path)


# -- a file --------------------------------------------------------------------------------------------------


def test_file(started: Started, tmp_path: Path) -> None:
    """An endpoint is used once it is in the file, by choice or by header, and left alone once it is not."""
    path = tmp_path / "endpoints"
    with ThreadedEngine() as one, ThreadedEngine() as other:
        sidecar = started("--discovery", f"file:{path}")
        assert "waiting for --discovery file:" in sidecar.log
        eventually(lambda: f"{path} does not exist; no endpoint is known from it" in sidecar.log)
        assert ask(sidecar).decision == "local; reason=no_target"
        assert ask(sidecar, one.address).status == 403
        write(path, "# both", one.address)
        eventually(lambda: one.address in known(sidecar))
        assert ask(sidecar).decision == f"remote; prefill={one.address}"
        assert ask(sidecar, one.address).decision == f"remote; prefill={one.address}"
        assert ask(sidecar, other.address).status == 403
        write(path, f"- {other.address}")
        eventually(lambda: other.address in known(sidecar))
        assert ask(sidecar).decision == f"remote; prefill={other.address}"
        assert ask(sidecar, one.address).decision == f"remote; prefill={other.address}", "the header is behind"
        write(path, f"- {other.address}", "- nonsense")
        eventually(lambda: "line 2: 'nonsense' is not HOST:PORT" in sidecar.log)
        assert ask(sidecar).decision == f"remote; prefill={other.address}"
        metrics = sidecar.metrics()
        assert metrics("discovery_endpoints", state="ready") == 1
        assert metrics("discovery_errors_total", reason="missing") >= 1
        assert metrics("discovery_errors_total", reason="bad_file") >= 1
        assert metrics("discovery_age_seconds") < 10
        assert [labels["prefill"] for labels in metrics.labels("breaker_state")] == [other.address]
        assert f"(+{one.address})" in sidecar.log
        assert f"(+{other.address} -{one.address})" in sidecar.log


def test_static_endpoints_are_always_there(started: Started, tmp_path: Path) -> None:
    path = tmp_path / "endpoints"
    with ThreadedEngine() as one, ThreadedEngine() as other:
        write(path, one.address, other.address)
        sidecar = started("--discovery", f"file:{path}", "--prefill", one.address)
        eventually(lambda: other.address in known(sidecar))
        assert known(sidecar)[one.address]["sources"] == ["prefill", "discovery"]
        write(path)
        eventually(lambda: other.address not in known(sidecar))
        assert ask(sidecar).decision == f"remote; prefill={one.address}"


def _posts(engine: ThreadedEngine) -> int:
    return sum(one.method == "POST" for one in list(engine.requests))


def test_requests_in_flight_finish(started: Started, tmp_path: Path) -> None:
    """An endpoint that leaves while it computes: its answer is used, its KV is pulled through its relay, and only
    then is it forgotten."""
    path = tmp_path / "endpoints"
    with ThreadedEngine() as leaver, ThreadedEngine() as stayer:
        prefill_may_end = threading.Event()
        leaver.fault(Fault(hold=prefill_may_end), path=CHAT)
        write(path, leaver.address)
        sidecar = started("--discovery", f"file:{path}")
        eventually(lambda: leaver.address in known(sidecar))
        before = sidecar.descriptors()
        with ThreadPoolExecutor(4) as pool:
            futures = [pool.submit(sidecar.ask, "POST", CHAT, chat(stream=True)) for _ in range(4)]
            eventually(lambda: _posts(leaver) == 4)
            write(path, stayer.address)
            eventually(lambda: known(sidecar).get(leaver.address, {}).get("standing") == "left")
            assert ask(sidecar).decision == f"remote; prefill={stayer.address}"
            assert not any(future.done() for future in futures), "they were still at it"
            prefill_may_end.set()
            answers = [future.result(20) for future in futures]
        assert {answer.decision for answer in answers} == {f"remote; prefill={leaver.address}"}
        assert all(answer.status == 200 for answer in answers)
        assert _posts(leaver) == 4
        eventually(lambda: leaver.address not in known(sidecar))
        leaver.wait_for(lambda engine: engine.held_blocks == 0)
        eventually(lambda: leaver.connections_open == 0)
        ports = {leaver.port, leaver.side_channel_port}
        eventually(lambda: not any(one.remote_port in ports for one in sidecar.descriptors().connections))
        write(path)
        eventually(lambda: not known(sidecar))
        eventually(lambda: sidecar.descriptors().count <= before.count)


def test_a_handoff_that_nobody_wants_is_given_back_after_all(
    started: Started, tmp_path: Path, decode: ThreadedEngine
) -> None:
    """The engines have never met, and the endpoint leaves before decode refuses: the release still goes through its
    relay, and only then is it forgotten."""
    path = tmp_path / "endpoints"
    with ThreadedEngine() as leaver:
        write(path, leaver.address)
        sidecar = started("--discovery", f"file:{path}")
        eventually(lambda: leaver.address in known(sidecar))
        may_refuse = threading.Event()
        decode.fault(Fault(status=400, hold=may_refuse), path=COMPLETIONS, times=1)
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(ask, sidecar)
            leaver.wait_for(lambda engine: engine.held_blocks > 0)
            write(path)
            eventually(lambda: known(sidecar).get(leaver.address, {}).get("standing") == "left")
            may_refuse.set()
            assert future.result(10).status == 400

        def given_back() -> bool:
            ask(sidecar)  # a decode engine that is cold tells with its next step
            return not leaver.held_blocks

        eventually(given_back)
        eventually(lambda: not known(sidecar), 10)


def test_readiness_does_not_wait(started: Started, tmp_path: Path) -> None:
    """Nor does the end, in whatever state discovery is."""
    sidecar = started("--discovery", f"file:{tmp_path}/nothing/here", "--warm-up", "on")
    assert ask(sidecar).decision == "local; reason=no_target"
    assert json.loads(sidecar.admin("GET", "/endpoints")[1])["discovery"]["known"] is False


# -- DNS -----------------------------------------------------------------------------------------------------


def pods(stack: ExitStack, count: int, **options: Any) -> list[ThreadedEngine]:
    """Engines as pods have them: each on an address of its own, all on one port."""
    engines: list[ThreadedEngine] = []
    port = free_ports()
    for number in range(count):
        host = f"127.0.9.{number + 1}"
        engine = ThreadedEngine(host=host, port=port, side_channel_host=host, **options)
        engines.append(stack.enter_context(engine))
    return engines


def test_dns(started: Started) -> None:
    """Case 40: another address within the TTL; the last one while DNS is away."""
    with ExitStack() as stack:
        one, other = pods(stack, 2)
        server = stack.enter_context(ThreadedNameServer())
        name = "prefill.llm.svc.test"
        sidecar = started("--discovery", f"dns:{name}.:{one.port}", "--discovery-dns-server", server.address)
        eventually(lambda: f"there is no name {name}." in sidecar.log)
        assert ask(sidecar).decision == "local; reason=no_target"
        server.records[name] = [one.host]
        eventually(lambda: one.address in known(sidecar), 12)
        assert ask(sidecar).decision == f"remote; prefill={one.address}"
        assert ask(sidecar, f"{one.host}:{one.port + 1}").status == 403, "that port alone"
        server.records[name] = [other.host]
        eventually(lambda: other.address in known(sidecar))
        assert ask(sidecar).decision == f"remote; prefill={other.address}"
        server.silent = {"A", "AAAA"}
        eventually(lambda: "no DNS server answers within" in sidecar.log, 10)
        assert ask(sidecar).decision == f"remote; prefill={other.address}"
        metrics = sidecar.metrics()
        assert metrics("discovery_errors_total", reason="timeout") >= 1
        assert metrics("discovery_errors_total", reason="nxdomain") >= 1
        assert metrics("discovery_age_seconds") > 1
        assert metrics("discovery_endpoints", state="ready") == 1
        assert sidecar.threads < 8


# -- Kubernetes ----------------------------------------------------------------------------------------------


def test_kubernetes(started: Started) -> None:
    """Pods by their labels: ready ones alone, none that terminates, and what was known while the API is away."""
    with ExitStack() as stack:
        one, other = pods(stack, 2)
        server = stack.enter_context(ThreadedApi())
        flags = ("--discovery", "kubernetes", "--kubernetes-api", server.url, "--discovery-namespace", "llm")
        sidecar = started(*flags, "--discovery-port", str(one.port), "--discovery-model", "m")
        eventually(lambda: "no endpoint that is ready" in sidecar.log)
        assert ask(sidecar).decision == "local; reason=no_target"
        ours = {"llm-d.ai/role": "prefill", "llm-d.ai/model": "m"}
        server.do(lambda: server.apply("pods", pod("p0", one.host, labels=ours, ready=False)))
        server.do(lambda: server.apply("pods", pod("p1", other.host, labels={**ours, "llm-d.ai/model": "n"})))
        server.do(lambda: server.apply("pods", pod("d0", other.host, labels={**ours, "llm-d.ai/role": "decode"})))
        eventually(lambda: known(sidecar).get(one.address, {}).get("standing") == "not_ready")
        assert ask(sidecar).decision == "local; reason=no_target"
        assert ask(sidecar, one.address).decision == "local; reason=no_target", "known, and not to be used yet"
        assert ask(sidecar, other.address).status == 403
        server.do(lambda: server.apply("pods", pod("p0", one.host, labels=ours)))
        eventually(lambda: known(sidecar)[one.address]["standing"] == "ready")
        assert known(sidecar)[one.address]["detail"] == "pod p0"
        assert ask(sidecar).decision == f"remote; prefill={one.address}"
        server.do(
            lambda: server.apply("pods", pod("p1", other.host, labels={**ours, "llm-d.ai/role": "prefill-decode"}))
        )
        server.do(lambda: server.apply("pods", pod("p0", one.host, labels=ours, terminating=True)))
        eventually(lambda: known(sidecar)[one.address]["standing"] == "terminating")
        assert ask(sidecar, one.address).decision == f"remote; prefill={other.address}"
        assert sidecar.metrics()("discovery_endpoints", state="terminating") == 1
        server.failing = 503
        server.do(server.drop_watches)
        eventually(lambda: "says 503; the 1 endpoints that it told of" in sidecar.log)
        assert ask(sidecar).decision == f"remote; prefill={other.address}"
        assert server.count("list") == 1, "it is asked with pauses"


def test_inference_pool(started: Started) -> None:
    with ExitStack() as stack:
        (one,) = pods(stack, 1)
        server = stack.enter_context(ThreadedApi())
        server.do(lambda: server.apply("inferencepools", pool("p", {"app": "x"}, one.port)))
        server.do(
            lambda: server.apply("pods", pod("p0", one.host, labels={"app": "x", "llm-d.ai/role": "prefill"}))
        )
        flags = ("--discovery", "kubernetes", "--kubernetes-api", server.url, "--discovery-namespace", "llm")
        sidecar = started(*flags, "--inference-pool", "p")
        eventually(lambda: one.address in known(sidecar))
        assert ask(sidecar).decision == f"remote; prefill={one.address}"


def test_kubernetes_says_which_right_is_missing(started: Started) -> None:
    with ThreadedApi() as server:
        server.forbidden = {("list", "pods")}
        flags = ("--discovery", "kubernetes", "--kubernetes-api", server.url, "--discovery-namespace", "llm")
        sidecar = started(*flags)
        eventually(lambda: 'Role there with apiGroups: [""], resources: ["pods"]' in sidecar.log)
        assert sidecar.metrics()("discovery_errors_total", reason="forbidden") >= 1
        assert sidecar.log.count("may not list") == 1
