"""A real sidecar process, and the rig that it runs in: between two simulated engines.

A `Sidecar` must end well wherever a test leaves it: SIGTERM gives exit code 0, and its log holds no traceback, no
exception that nobody fetched, no warning of the interpreter's and nothing that a client sent (`CANARY` is in every
prompt and key of the tests).
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from prometheus_client.parser import text_string_to_metric_families

from tests.integration.client import TIMEOUT_S, Address, Answer, Client
from tests.ports import free_ports

if TYPE_CHECKING:
    from tests.engine import Received, ThreadedEngine

ROOT = Path(__file__).parents[2]
CANARY = "kanarienvogel"
KEY = f"Bearer {CANARY}-key"
DIRECT = ("X-Direct", "1")
"""Marks a request that a test sent to an engine itself."""
START_TIMEOUT_S = 20.0
RELEASED = b"pd-sidecar/released-handoff"
"""The model that the sidecar asks for to give a handoff back."""
LISTEN = "0A"  # the kernel's state number in /proc/net/tcp

_numbers = itertools.count(1)


def prompt(tokens: int) -> str:
    """A prompt of so many tokens of the simulated engine that no other test has."""
    text = f"{CANARY} {next(_numbers)} "
    return (text + "all work and no play " * (tokens * 4 // 21 + 1))[: tokens * 4]


def chat(tokens: int = 400, **fields: Any) -> dict[str, Any]:
    """A chat request whose prompt is long enough to be worth a remote prefill."""
    return {"model": "sim", "messages": [{"role": "user", "content": prompt(tokens)}], "max_tokens": 8, **fields}


def completion(tokens: int = 400, **fields: Any) -> dict[str, Any]:
    return {"model": "sim", "prompt": prompt(tokens), "max_tokens": 8, **fields}


def eventually(condition: Callable[[], Any], timeout_s: float = 5.0) -> None:
    """Until `condition()` is true; AssertionError if it does not come true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not true within {timeout_s:g} s"
        time.sleep(0.005)


MAX_BODY_BYTES = 4_000_000
AT_ONCE_S = 4.0
"""For what happens at once, on a machine that has something else to do; what it is told from takes longer."""


def quick(policy: str = "recompute") -> tuple[str, ...]:
    """Flags with bounds and deadlines that a test can reach; a handoff is good for 0.8 s. Many tests share them,
    so that one process does for all."""
    return (
        *("--on-prefill-failure", policy, "--recompute-max-concurrent", "1"),
        *("--prefill-timeout", "2.5", "--prefill-connect-timeout", "0.3", "--pull-timeout", "0.5"),
        *("--kv-lease", "1.2", "--max-body-bytes", str(MAX_BODY_BYTES)),
        *("--client-head-timeout", "0.6", "--client-body-timeout", "0.6", "--client-idle-timeout", "1.5"),
    )


class BlackHole:
    """An address that takes no connection and refuses none: its listen queue is full."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=0)
        self.port: int = self._listener.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self._fillers = []
        for _ in range(3):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", self.port))
            self._fillers.append(filler)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in (*self._fillers, self._listener):
            one.close()


class Connection(NamedTuple):
    """A TCP connection of the process."""

    local_port: int
    remote_port: int


@dataclass(frozen=True)
class Descriptors:
    """What a process has open."""

    count: int
    connections: list[Connection]
    others: list[str]
    """Neither connection nor listener: what is open for ever, and sockets that were closed only by half."""


class Metrics:
    """One scrape."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def __call__(self, name: str, **labels: str) -> float:
        """The sum of all samples of `pd_sidecar_<name>` that have these labels."""
        return sum(
            sample.value
            for sample in self.samples
            if sample.name == f"pd_sidecar_{name}" and labels.items() <= sample.labels.items()
        )

    def labels(self, name: str) -> list[dict[str, str]]:
        return [sample.labels for sample in self.samples if sample.name == f"pd_sidecar_{name}"]


class Sidecar:
    """`python -m sidecar serve` with `flags`, on ports of its own. Nobody is at the usual side-channel port: where
    an engine's is, its first handoff tells."""

    def __init__(
        self,
        *flags: str,
        environment: dict[str, str] | None = None,
        ready: str | None = "/readyz",
        ranks: int = 1,
        ports: tuple[int, int] | None = None,
    ) -> None:
        """`ready`: the probe that must say 200 before the constructor returns; None: do not wait. `ports`: for
        clients and of the admin port."""
        self.tls: ssl.SSLContext | None = None
        """How `connect` speaks TLS."""
        self.port, self.admin_port = ports or (free_ports(ranks), free_ports())
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 lives as long as the process
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PD_SIDECAR_")}
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "sidecar", "serve"),
                *("--port", str(self.port), "--metrics-port", str(self.admin_port)),
                *("--warm-up", "off"),  # its requests would count among those of the tests
                *("--nixl-relay-port", str(free_ports()), "--prefill-side-channel-port", str(free_ports())),
                *flags,
            ],
            cwd=ROOT,
            env={**inherited, "PYTHONWARNINGS": "default", **(environment or {})},
            stdout=self._log,
            stderr=self._log,
        )
        if ready is not None:
            try:
                self.wait_until(ready)
            except BaseException:
                self.kill()
                raise

    # -- life

    def wait_until(self, probe: str, status: int = 200) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while self._probe(probe) != status:
            assert self.process.poll() is None, f"exit code {self.process.returncode}:\n{self.log}"
            assert time.monotonic() < deadline, f"{probe} never said {status}:\n{self.log}"
            time.sleep(0.01)

    def _probe(self, path: str) -> int:
        try:
            return self.admin("GET", path)[0]
        except OSError:
            return 0

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def exit_code(self, timeout_s: float = TIMEOUT_S) -> int:
        return self.process.wait(timeout_s)

    def stop(self) -> None:
        """SIGTERM; everything that must hold at the end is checked."""
        try:
            seen = ""
            if self.process.poll() is None:
                seen = self.metrics().text + json.dumps(self.decisions())
                self.signal(signal.SIGTERM)
                code = self.exit_code()
                assert code == 0, f"exit code {code}:\n{self.log}"
            self.check_log()
            assert CANARY not in seen
        finally:
            self.kill()

    def check_log(self) -> None:
        log = self.log
        for sign in ("Traceback", "never retrieved", "Exception", "Warning:", "Unclosed"):
            assert sign not in log, log
        assert CANARY not in log

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._log.close()

    # -- what it says

    @property
    def log(self) -> str:
        if self._log.closed:
            return "(closed)"
        return os.pread(self._log.fileno(), 1 << 24, 0).decode()

    def admin(self, method: str, path: str, body: str | None = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.admin_port, timeout=TIMEOUT_S)
        try:
            connection.request(method, path, body, {"connection": "close"})
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def metrics(self) -> Metrics:
        status, text = self.admin("GET", "/metrics")
        assert status == 200
        return Metrics(text)

    def in_flight(self) -> float:
        """The sum of the gauges that read 0 when nothing is going on."""
        text = self.admin("GET", "/metrics")[1]
        return sum(
            float(value)
            for value in re.findall(r"^pd_sidecar_(?:recompute_)?inflight\S* (\S+)", text, re.MULTILINE)
        )

    def decisions(self) -> list[dict[str, Any]]:
        """Newest first."""
        status, text = self.admin("GET", "/decisions")
        assert status == 200
        return json.loads(text)

    # -- what the kernel says of it

    def _status(self, field: str) -> int:
        lines = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))

    @property
    def rss_mib(self) -> float:
        return self._status("VmRSS") / 1024

    @property
    def peak_rss_mib(self) -> float:
        """The most since the start or `forget_peak`."""
        return self._status("VmHWM") / 1024

    def forget_peak(self) -> None:
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5", encoding="ascii")

    @property
    def threads(self) -> int:
        return self._status("Threads")

    @property
    def open_descriptors(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self.process.pid}/fd").iterdir())

    def descriptors(self) -> Descriptors:
        """Slow where other processes have many sockets."""
        names = []
        for link in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed in the meantime
                names.append(str(link.readlink()))
        connections, others = [], set(names)
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{self.process.pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
                columns = line.split()
                name = f"socket:[{columns[9]}]"
                if name in others:
                    others.remove(name)
                    local, remote = (int(address.rpartition(":")[2], 16) for address in columns[1:3])
                    if columns[3] != LISTEN:
                        connections.append(Connection(local, remote))
        return Descriptors(len(names), connections, sorted(others))

    # -- requests

    @property
    def address(self) -> Address:
        return "127.0.0.1", self.port

    def connect(self) -> Client:
        return Client(self.address, tls=self.tls)

    def ask(self, method: str, target: str, body: Any = None, headers: Iterable[tuple[str, str]] = ()) -> Answer:
        """One request on a connection of its own."""
        with self.connect() as client:
            client.request(method, target, body, headers)
            return client.answer(method)


class Rig:
    """A sidecar between a prefill and a decode engine. A header names the prefill engine, so that each test can
    have one that nothing is known of yet."""

    def __init__(self, sidecar: Sidecar, prefill: ThreadedEngine, decode: ThreadedEngine) -> None:
        self.sidecar, self.prefill, self.decode = sidecar, prefill, decode
        self.target = prefill.address
        """What `x-prefiller-host-port` says; "" for no such header."""

    def headers(self, headers: Iterable[tuple[str, str]] = ()) -> list[tuple[str, str]]:
        target = [("x-prefiller-host-port", self.target)] if self.target else []
        return [("Authorization", KEY), *target, *headers]

    def post(self, path: str, body: Any, headers: Iterable[tuple[str, str]] = ()) -> Answer:
        return self.sidecar.ask("POST", path, body, self.headers(headers))

    def chat(self, **fields: Any) -> Answer:
        return self.post("/v1/chat/completions", chat(**fields))

    def expected(self, path: str, body: dict[str, Any]) -> str:
        """The text that the decode engine gives by itself. Asked behind the sidecar's back, afterwards."""
        answer = self.ask_engine("POST", path, body)
        assert answer.status == 200
        return answer.text

    def ask_engine(
        self, method: str, path: str, body: Any = None, headers: Iterable[tuple[str, str]] = ()
    ) -> Answer:
        """The same question to the decode engine itself."""
        with Client(("127.0.0.1", self.decode.port)) as client:
            client.request(method, path, body, [("Authorization", KEY), DIRECT])
            return client.answer(method)

    def open(self, path: str, body: Any, headers: Iterable[tuple[str, str]] = ()) -> Client:
        """Sends the request; the answer is yet to be read."""
        client = self.sidecar.connect()
        client.request("POST", path, body, self.headers(headers))
        return client

    def decoded(self) -> list[Received]:
        """What the decode engine was asked on behalf of clients."""
        return _of_clients(self.decode)

    def prefilled(self) -> list[Received]:
        return _of_clients(self.prefill)

    def decision_on(self, answer: Answer) -> dict[str, Any]:
        """What `/decisions` says of the request."""
        wanted = answer.header("x-request-id")
        return next(record for record in self.sidecar.decisions() if record["request_id"] == wanted)

    def has_blamed_prefill(self) -> bool:
        """Whether anything went wrong with the prefill engine, so that it may be left alone for a while."""
        if f"prefill endpoint {self.prefill.address}: not used" in self.sidecar.log:
            return True
        return f'"prefill": "{self.prefill.address}", "detail"' in self.sidecar.admin("GET", "/decisions")[1]

    def check_idle(self, before: Descriptors) -> Descriptors:
        """Every gauge reads 0, and once the engines have closed what is idle no connection is left but those to
        side channels. `before` is what was open before; returns what is open now."""

        eventually(lambda: not self.sidecar.in_flight())
        with contextlib.suppress(AssertionError):
            eventually(lambda: self._open_without_idle() <= before.count, 0.1)
            return before
        now = before

        def no_more_than_before() -> bool:
            nonlocal now
            self._open_without_idle()
            now = self.sidecar.descriptors()
            return not self._left(now) and len(now.others) <= len(before.others)

        try:
            eventually(no_more_than_before)
        except AssertionError:
            raise AssertionError(f"left: {self._left(now)}; {now.others}, before: {before.others}") from None
        return now

    def _open_without_idle(self) -> int:
        for engine in (self.prefill, self.decode):
            close_idle(engine)
        time.sleep(0.002)
        return self.sidecar.open_descriptors

    def _left(self, now: Descriptors) -> list[Connection]:
        own = {self.sidecar.admin_port}
        for engine in (self.prefill, self.decode):
            own |= {engine.side_channel_port + rank for rank in range(engine.data_parallel_size)}
        return [one for one in now.connections if not {one.local_port, one.remote_port} & own]


def close_idle(engine: ThreadedEngine) -> None:
    """What uvicorn does after 5 s without a request."""

    def close() -> None:
        for connection in list(engine.engine.server.connections):
            if not connection.busy:
                connection.transport.close()

    engine.call(close)


def _of_clients(engine: ThreadedEngine) -> list[Received]:
    direct = DIRECT[0].encode(), DIRECT[1].encode()
    return [
        one
        for one in list(engine.requests)
        if not _is_probe(one) and direct not in one.headers and RELEASED not in one.body
    ]


def _is_probe(one: Received) -> bool:
    """What the sidecar asks by itself. Clients ask for models too, and are no aiohttp."""
    if one.method != "GET":
        return False
    own = "aiohttp" in (one.header("user-agent") or "")
    return one.target in ("/health", "/metrics") or (own and one.path.startswith(("/v1/", "/metrics/")))


def released(engine: ThreadedEngine) -> int:
    """How many handoffs it was asked to give back."""
    return sum(RELEASED in one.body for one in list(engine.requests))
