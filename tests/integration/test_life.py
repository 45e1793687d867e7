"""The life of the process: start, readiness, switches while it runs, drain, end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from sidecar.cli import main
from tests.engine import Fault, ThreadedEngine
from tests.integration.apis import CHAT, COMPLETIONS
from tests.integration.client import Cut
from tests.integration.sidecar import AT_ONCE_S, ROOT, Rig, Sidecar, chat, completion, eventually
from tests.ports import free_ports

# -- start ---------------------------------------------------------------------------------------------------


def run(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sidecar", *arguments],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


MISTAKES: dict[str, tuple[list[str], dict[str, str], str]] = {
    "unknown flag": (["--min-remote-token", "5"], {}, "min-remote-token"),
    "bad number": (["--port", "eighty"], {}, "--port"),
    "bad choice": (["--disagg", "maybe"], {}, "--disagg"),
    "bad connector": (["--kv-connector", "pigeon"], {}, "pigeon"),
    "bad prefill": (["--prefill", "nowhere"], {}, "nowhere"),
    "bad network": (["--prefill-allow", "10.0.0.0/99"], {}, "10.0.0.0/99"),
    "same port": (["--port", "8200"], {}, "overlap"),
    "environment": ([], {"PD_SIDECAR_DISAGG": "maybe"}, "PD_SIDECAR_DISAGG"),
    "unknown environment": ([], {"PD_SIDECAR_FROB": "1"}, "PD_SIDECAR_FROB"),
    "no file": (["--config", "/does/not/exist.yaml"], {}, "/does/not/exist.yaml"),
    "bad uds": (["--model-server-uds", "/x", "--data-parallel-size", "2"], {}, "--model-server-uds"),
}


@pytest.mark.parametrize("command", ["serve", "check-config"])
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_end_the_start(
    command: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, one line each."""
    flags, environment, named = MISTAKES[name]
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert main([command, *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pd-sidecar: ")
    assert named in line


def test_each_mistake_has_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("port: zero\nfrob: 1\nprefill: [a, 'b:1']\n", encoding="utf-8")
    assert main(["check-config", "--config", str(file), "--disagg", "x"]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 4
    for word in ("port", "frob", "'a'", "disagg"):
        assert word in said


def test_check_config_prints_what_serve_would_use(tmp_path: Path) -> None:
    """Flag over environment over file over default."""
    file = tmp_path / "config.yaml"
    file.write_text("port: 1111\nmetrics-port: 2222\nprefill-timeout: 3\n", encoding="utf-8")
    ended = run(
        *("check-config", "--config", str(file), "--port", "3333", "--vllm-port", "4444"),
        environment={"PD_SIDECAR_PORT": "5555", "PD_SIDECAR_METRICS_PORT": "6666"},
    )
    assert ended.returncode == 0
    for line in ("port: 3333", "metrics-port: 6666", "prefill-timeout: 3.0", "model-server-port: 4444"):
        assert line in ended.stdout.splitlines()


@pytest.mark.parametrize("taken", ["serving", "admin"])
def test_port_in_use(taken: str) -> None:
    """Exit code 2 and one line that names the port."""
    with socket.create_server(("0.0.0.0", free_ports())) as holder:
        port = holder.getsockname()[1]
        ports = [port, free_ports()] if taken == "serving" else [free_ports(), port]
        ended = run("serve", "--port", str(ports[0]), "--metrics-port", str(ports[1]))
    assert ended.returncode == 2
    errors = [line for line in ended.stderr.splitlines() if "ERROR" in line]
    assert len(errors) == 1
    assert str(port) in errors[0]
    assert "Traceback" not in ended.stderr


def test_start_line_says_what_a_header_may_name() -> None:
    """Closed by default, and the log says in one line what to add."""
    with ThreadedEngine() as decode:
        sidecar = Sidecar("--model-server-port", str(decode.port))
        try:
            assert "--prefill-allow" in sidecar.log
            answer = sidecar.ask("POST", COMPLETIONS, completion(), [("x-prefiller-host-port", "127.0.0.1:1234")])
            assert (answer.status, answer.reason_code) == (403, "reading_not_allowed")
            # Without a header and without --prefill every request is local.
            assert sidecar.ask("POST", COMPLETIONS, completion()).decision == "local; reason=no_target"
        finally:
            sidecar.stop()


# -- readiness -----------------------------------------------------------------------------------------------


def test_starts_before_its_engine_and_becomes_ready_with_it() -> None:
    """Case 36: start-up and liveness depend on the sidecar alone. Case 29: 503 until the engine is there, said once
    in the log. Case 37: ready with the engine, after it, and despite one slow probe; prefill never matters."""
    port = free_ports()
    sidecar = Sidecar("--model-server-port", str(port), "--prefill", f"127.0.0.1:{free_ports()}", ready="/startupz")
    decode = ThreadedEngine(port=port)
    try:
        assert sidecar.admin("GET", "/livez")[0] == 200
        status, text = sidecar.admin("GET", "/readyz")
        assert status == 503
        assert "decode engine" in text
        for _ in range(5):
            answer = sidecar.ask("POST", CHAT, chat(10))
            assert (answer.status, answer.reason_code) == (503, "decode_refused")
            assert answer.header("retry-after")
        assert sidecar.log.count("no connection") == 1
        decode.start()
        sidecar.wait_until("/readyz")
        assert sidecar.ask("POST", CHAT, chat(10)).status == 200
        # One probe that takes long is no reason to take streams away.
        decode.faults.once(Fault(status=500), path="/health")
        time.sleep(1.3)
        assert sidecar.admin("GET", "/readyz")[0] == 200
        decode.stop()
        sidecar.wait_until("/readyz", 503)
        assert sidecar.admin("GET", "/livez")[0] == 200
        decode.start()
        sidecar.wait_until("/readyz")
        assert sidecar.log.count(" ready") >= 2
    finally:
        decode.stop()
        sidecar.stop()


# -- on, off, auto -------------------------------------------------------------------------------------------


@pytest.fixture
def switched(tmp_path: Path) -> Iterator[tuple[Rig, Path]]:
    """A rig with a --config file that says `on`."""
    file = tmp_path / "config.yaml"
    file.write_text("disagg: on\n", encoding="utf-8")
    with ThreadedEngine() as prefill, ThreadedEngine(seconds_per_token=0.02) as decode:
        sidecar = Sidecar(
            *("--config", str(file), "--model-server-port", str(decode.port), "--prefill", prefill.address)
        )
        rig = Rig(sidecar, prefill, decode)
        rig.target = ""
        yield rig, file
        sidecar.stop()


def kind(rig: Rig) -> str:
    return rig.post(COMPLETIONS, completion(40, max_tokens=1)).decision.split(";")[0]


def mode(rig: Rig) -> str:
    return rig.sidecar.admin("GET", "/disagg")[1].strip()


def test_switch(switched: tuple[Rig, Path]) -> None:
    """By PUT, by SIGHUP and by editing the file, for the next request; what runs ends as it began. The last word
    counts."""
    rig, file = switched
    assert kind(rig) == "remote"
    with rig.open(COMPLETIONS, completion(stream=True, max_tokens=30, ignore_eos=True)) as running:
        answer = running.head()
        assert answer.decision.startswith("remote")
        assert rig.sidecar.admin("PUT", "/disagg", "off") == (200, "off\n")
        local = rig.post(COMPLETIONS, completion())
        assert local.decision == "local; reason=disabled"
        running.body(answer, "POST")
    assert answer.events[-1] == b"[DONE]"
    assert mode(rig) == "off"
    assert json.loads(rig.sidecar.admin("GET", "/config")[1])["disagg"] == "off"
    # Quoted JSON is fine, nonsense is not, and neither is another method.
    assert rig.sidecar.admin("PUT", "/disagg", '"on"') == (200, "on\n")
    assert kind(rig) == "remote"
    assert rig.sidecar.admin("PUT", "/disagg", "perhaps")[0] == 400
    assert rig.sidecar.admin("PUT", "/disagg", "x" * 100_000)[0] in (400, 413)
    assert rig.sidecar.admin("POST", "/disagg", "off")[0] == 405
    assert mode(rig) == "on"
    # SIGHUP reads the file again.
    file.write_text("disagg: auto\n", encoding="utf-8")
    rig.sidecar.signal(signal.SIGHUP)
    eventually(lambda: mode(rig) == "auto")
    assert rig.post(COMPLETIONS, completion(40)).decision == "local; reason=short"
    assert rig.post(COMPLETIONS, completion(400)).decision.startswith("remote")
    # So does an edit; also one by which a symbolic link changes, as a ConfigMap's does.
    other = file.with_name("other.yaml")
    other.write_text("disagg: off\nmin-remote-tokens: 1\n", encoding="utf-8")
    link = file.with_name("link")
    link.symlink_to(other)
    link.replace(file)
    eventually(lambda: mode(rig) == "off")
    assert "restart for it: --min-remote-tokens" in rig.sidecar.log
    # A file with a mistake, or none at all, changes nothing.
    other.write_text("disagg: [nonsense\n", encoding="utf-8")
    eventually(lambda: "not taken over" in rig.sidecar.log)
    other.unlink()
    rig.sidecar.signal(signal.SIGHUP)
    time.sleep(0.1)
    assert mode(rig) == "off"
    assert kind(rig) == "local"


def test_sighup_without_a_file(rig: Rig) -> None:
    rig.sidecar.signal(signal.SIGHUP)
    assert rig.chat().status == 200
    eventually(lambda: "no --config file" in rig.sidecar.log)


def test_switching_under_load(rigged: Callable[..., Rig]) -> None:
    """Nothing is lost while the switch goes back and forth."""
    rig = rigged()
    try:
        with rig.sidecar.connect() as client:
            for number in range(60):
                rig.sidecar.admin("PUT", "/disagg", ("on", "off", "auto")[number % 3])
                client.request("POST", COMPLETIONS, completion(60), rig.headers())
                answer = client.answer("POST")
                assert answer.status == 200
                assert answer.decision.split(";")[0] == ("remote", "local", "local")[number % 3]
    finally:
        rig.sidecar.admin("PUT", "/disagg", "on")


# -- the end -------------------------------------------------------------------------------------------------


@pytest.fixture
def draining() -> Iterator[Callable[..., Rig]]:
    """Rigs of which each test ends the sidecar itself."""
    prefill = ThreadedEngine()
    decode = ThreadedEngine(seconds_per_token=0.05)
    prefill.start()
    decode.start()
    rigs: list[Rig] = []

    def make(*flags: str) -> Rig:
        sidecar = Sidecar(
            *("--model-server-port", str(decode.port), "--disagg", "on", "--prefill", prefill.address, *flags)
        )
        rigs.append(Rig(sidecar, prefill, decode))
        rigs[-1].target = ""
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.sidecar.stop()
    prefill.stop()
    decode.stop()


def stream(tokens: int) -> dict[str, Any]:
    return completion(stream=True, max_tokens=tokens, ignore_eos=True)


def test_drain(draining: Callable[..., Rig]) -> None:
    """Case 38: not ready at once, no new connection, open answers end, idle connections are closed, and the exit is
    not later than the last answer."""
    rig = draining()
    idle = rig.sidecar.connect()
    idle.request("GET", "/version")
    assert idle.answer().status == 200
    kept = rig.open(COMPLETIONS, stream(60))
    with rig.open(COMPLETIONS, stream(60)) as running, kept:
        answer = running.head()
        kept_answer = kept.head()
        rig.sidecar.signal(signal.SIGTERM)
        eventually(lambda: rig.sidecar.admin("GET", "/readyz")[0] == 503)
        assert "draining" in rig.sidecar.admin("GET", "/readyz")[1]
        assert rig.sidecar.admin("GET", "/livez")[0] == 200
        assert idle.at_end()
        with pytest.raises(OSError):
            rig.sidecar.connect()
        running.body(answer, "POST")
        kept.body(kept_answer, "POST")
        ended_at = time.monotonic()
        assert answer.events[-1] == kept_answer.events[-1] == b"[DONE]"
        assert running.at_end()
        assert kept.at_end()
    assert rig.sidecar.exit_code() == 0
    assert time.monotonic() - ended_at < AT_ONCE_S
    idle.close()


def test_drain_answers_what_is_on_its_way(draining: Callable[..., Rig]) -> None:
    """A request whose body is still being sent is answered. One that was sent behind one that runs is answered, or
    its connection ends; never is half of an answer given."""
    rig = draining()
    body = json.dumps(completion(max_tokens=2)).encode()
    with rig.open(COMPLETIONS, stream(40)) as busy, rig.sidecar.connect() as slow:
        answer = busy.head()
        busy.request("GET", "/version")
        slow.request("POST", COMPLETIONS, body[:10], [("Content-Length", str(len(body)))])
        assert rig.sidecar.ask("GET", "/version").status == 200  # what came before it has been read by then
        rig.sidecar.signal(signal.SIGTERM)
        eventually(lambda: "draining" in rig.sidecar.log)
        slow.send(body[10:])
        late = slow.answer("POST")
        assert (late.status, late.header("connection")) == (200, "close")
        busy.body(answer, "POST")
        assert answer.events[-1] == b"[DONE]"
        rest = busy.rest()
        assert rest == b"" or rest.startswith(b"HTTP/1.1 200 OK\r\n")
    assert rig.sidecar.exit_code() == 0


def test_drain_timeout(draining: Callable[..., Rig]) -> None:
    """What does not end is cut off, and the engine knows."""
    rig = draining("--drain-timeout", "0.5")
    with rig.open(COMPLETIONS, stream(100_000)) as client:
        answer = client.head()
        rig.sidecar.signal(signal.SIGTERM)
        began = time.monotonic()
        with pytest.raises(Cut):
            client.body(answer, "POST")
        assert rig.sidecar.exit_code() == 0
        assert 0.4 < time.monotonic() - began < 0.5 + AT_ONCE_S
    rig.decode.wait_for(lambda engine: engine.running == 0)
    assert "1 connections cut off" in rig.sidecar.log


def test_second_signal_ends_at_once(draining: Callable[..., Rig]) -> None:
    """SIGINT is as good as SIGTERM."""
    rig = draining()
    with rig.open(COMPLETIONS, stream(100_000)) as client:
        client.head()
        rig.sidecar.signal(signal.SIGTERM)
        eventually(lambda: "draining" in rig.sidecar.log)
        began = time.monotonic()
        rig.sidecar.signal(signal.SIGINT)
        assert rig.sidecar.exit_code() == 0
        assert time.monotonic() - began < AT_ONCE_S
    rig.decode.wait_for(lambda engine: engine.running == 0)


def test_end_in_every_stage(draining: Callable[..., Rig]) -> None:
    """Requests in every stage when the end comes at once: no exception that nobody fetched."""
    rig = draining("--prefill-allow", "127.0.0.0/8")
    rig.prefill.fault(Fault(silence=True), path=COMPLETIONS)
    rig.decode.fault(Fault(silence=True), path="/v1/models")
    with ExitStack() as clients:
        for _ in range(5):
            clients.enter_context(rig.open(COMPLETIONS, completion()))
            clients.enter_context(rig.open(CHAT, chat(stream=True, max_tokens=1000, ignore_eos=True)))
            clients.enter_context(rig.sidecar.connect()).request("GET", "/v1/models")
            large = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5000000\r\n\r\n" + b"x" * 300_000
            clients.enter_context(rig.sidecar.connect()).send(large)
        rig.decode.wait_for(lambda engine: engine.running == 5)
        rig.sidecar.signal(signal.SIGTERM)
        eventually(lambda: "draining" in rig.sidecar.log)
        rig.sidecar.signal(signal.SIGTERM)
        assert rig.sidecar.exit_code() == 0


# -- the admin port ------------------------------------------------------------------------------------------


def test_admin_port(rig: Rig) -> None:
    for path in ("/livez", "/readyz", "/startupz", "/metrics", "/config", "/decisions", "/endpoints", "/disagg"):
        assert rig.sidecar.admin("GET", path)[0] == 200
    assert rig.sidecar.admin("GET", "/nothing")[0] == 404
    assert rig.sidecar.admin("GET", "/v1/models")[0] == 404
    assert rig.sidecar.admin("DELETE", "/decisions")[0] == 405
    metrics = rig.sidecar.metrics()
    assert metrics("build_info") == 1
    assert metrics("effective") == 1
    assert "process_resident_memory_bytes" in metrics.text


GARBAGE = (
    b"\x00\x01garbage\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET " + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
    b"PUT /disagg HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n",
    b"PUT /disagg HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET / HTTP/1.1\r\nbad header\x00: 1\r\n\r\n",
)


@pytest.mark.parametrize("log_level", ["info", "debug"])
def test_garbage_on_the_admin_port(log_level: str) -> None:
    """The sender's mistake: 400, at most a line, never a traceback (`stop` looks for one)."""
    sidecar = Sidecar("--model-server-port", str(free_ports()), "--log-level", log_level, ready="/livez")
    try:
        for garbage in GARBAGE:
            with socket.create_connection(("127.0.0.1", sidecar.admin_port)) as sender:
                sender.settimeout(5)
                sender.sendall(garbage)
                assert b" 400 " in sender.recv(200)
        assert sidecar.admin("GET", "/livez")[0] == 200
    finally:
        sidecar.stop()


def test_threads_do_not_grow(rig: Rig) -> None:
    before = rig.sidecar.threads
    for _ in range(20):
        assert rig.chat().status == 200
    assert rig.sidecar.threads <= before + 1
