"""A real vLLM engine: its processes, from the zygote that it is forked from to the last of them, and its metrics.

Blocking, standard library only. It must not know the sidecar, nor which engines belong together (`e2e/rig.py`). How
engines share one import of vLLM, and what is tamed in them: `e2e/zygote.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import http.client
import json
import os
import queue
import re
import shlex
import shutil
import signal
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from e2e import zygote
from e2e.install import engine_python, say

Role = Literal["prefill", "decode"]
HOST = "127.0.0.1"
# A start takes 2 to 10 s, on a busy machine twenty times that; a vLLM of the user's own loads from scratch.
START_TIMEOUT_SECONDS = 300.0
PLAIN_START_TIMEOUT_SECONDS = 900.0
LOG_TAIL_LINES = 30
# One machine, no RDMA. `nobind`: vLLM must not choose cores. Everything it caches goes to our folder.
CPU_ENGINE_ENV = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "UCX_TLS": "tcp,self",
    "UCX_NET_DEVICES": "all",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
QUIET_ENV = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
OWN_SETTINGS = ("VLLM_PYTHON", "VLLM_ENGINE_FLAGS", "VLLM_ENGINE_ENV")


class RigError(RuntimeError):
    """An engine could not be started or reached; the text names it, its address, and the end of its log."""


# --- processes --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Beside:
    """Folders that the engines find besides those of their environment."""

    packages: tuple[Path, ...] = ()
    libraries: tuple[Path, ...] = ()


NOTHING_BESIDE = Beside()


class Zygote:
    """The process that engines are forked from, see e2e/zygote.py; shared by all rigs of this process."""

    _shared: dict[tuple[Path, bool, Beside], Zygote] = {}  # noqa: RUF012 (a registry, meant to be shared)
    _shared_lock = threading.Lock()

    def __init__(self, python: Path, *, plain: bool, beside: Beside = NOTHING_BESIDE) -> None:
        self.plain = plain
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (read when something goes wrong)
        env = {k: v for k, v in os.environ.items() if k not in OWN_SETTINGS and k != "PYTHONPATH"} | QUIET_ENV
        if not plain:
            env |= CPU_ENGINE_ENV
        if beside.libraries:
            env["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, beside.libraries))
        command = [str(python), zygote.__file__, *(["--plain"] if plain else []), *map(str, beside.packages)]
        # A session of its own: a Ctrl-C in the terminal goes to us alone, and we end the engines in order.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=env,
            start_new_session=True,
        )
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._ordering = threading.Lock()
        self.exit_codes: dict[int, int] = {}
        threading.Thread(target=self._read, daemon=True).start()
        self.import_seconds: float = self._answer("import vLLM")["ready"]

    @classmethod
    def shared(cls, beside: Beside = NOTHING_BESIDE) -> Zygote:
        """That of the installed vLLM, or of the user's own (`VLLM_PYTHON`), started when first needed."""
        with cls._shared_lock:
            key = (engine_python(), "VLLM_PYTHON" in os.environ, beside)
            found = cls._shared.get(key)
            if found is None or found._process.poll() is not None:
                if not key[1]:
                    say("importing vLLM (once; engines are forked from it)")
                found = cls._shared[key] = cls(key[0], plain=key[1], beside=beside)
                atexit.register(found.close)
            return found

    def fork(self, order: dict[str, Any]) -> int:
        """Starts one engine; returns the process id, which is also its session."""
        with self._ordering:
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(json.dumps(order).encode() + b"\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                pass  # it has died: the missing answer tells, with the reason
            pid: int = self._answer("fork an engine")["started"]
            return pid

    def close(self) -> None:
        """Ends it, and with it every engine that is still there."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            if "exited" in message:
                self.exit_codes[message["exited"]] = message["status"]
            else:
                self._answers.put(message)
        self._answers.put(None)

    def _answer(self, what: str) -> dict[str, Any]:
        message = self._answers.get()
        if message is None:
            self._answers.put(None)
            self._errors.seek(0)
            tail = b"\n".join(self._errors.read().splitlines()[-LOG_TAIL_LINES:]).decode(errors="replace")
            raise RigError(f"engines: the zygote ended when asked to {what}:\n{tail}")
        return message


# --- one engine -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Response:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Metrics:
    """A scrape of an engine's /metrics."""

    def __init__(self, text: str) -> None:
        self.samples: list[tuple[str, dict[str, str], float]] = []
        for line in text.splitlines():
            match = re.fullmatch(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)", line)
            if match:
                labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match[2] or ""))
                self.samples.append((match[1], labels, float(match[3])))

    def total(self, name: str, **labels: str) -> float:
        """The sum over all samples of `name` with these labels; 0 where there is none."""
        wanted = labels.items()
        return sum(v for n, have, v in self.samples if n == name and wanted <= have.items())

    def labels(self, name: str) -> list[dict[str, str]]:
        """The label sets of `name`; `vllm:cache_config_info`, say, tells everything in them."""
        return [have for n, have, _ in self.samples if n == name]


PROMPT_TOKEN_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


@dataclass(frozen=True)
class Place:
    """Where the engines of a role stand, if not on loopback: their address, and the file of the network namespace
    that has it (/proc/PID/ns/net)."""

    host: str
    netns: str


@dataclass(eq=False)
class Engine:
    """One vLLM server with all its processes. Made by `Rig`; `restart` keeps its ports."""

    role: Role
    name: str
    port: int
    side_channel_port: int  # of rank 0; rank r has this plus r
    p2p_port: int  # the control channel of an offloading connector's P2P tier, likewise
    bootstrap_port: int  # Mooncake's, of all ranks
    log_path: Path
    args: list[str]
    env: dict[str, str]
    cores: list[int] = field(default_factory=list)  # empty: any
    prog_thread: bool = False
    tls: ssl.SSLContext | None = None  # how it is spoken to, if it was started with a certificate
    place: Place | None = None  # None: loopback, in the namespace of the rig
    beside: Beside = NOTHING_BESIDE
    session: int = 0  # the process id of its server, 0 before the first start
    start_seconds: float = 0.0
    _zygote: Zygote | None = None
    _started: float = 0.0

    @property
    def host(self) -> str:
        return self.place.host if self.place else HOST

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def start(self) -> None:
        """Forks it; `wait_healthy` waits until it can be used."""
        assert not self.alive(), f"{self.name} runs"
        self._zygote = Zygote.shared(self.beside)
        folder = Path(self.env["TMPDIR"])
        shutil.rmtree(folder, ignore_errors=True)  # a killed engine leaves its sockets
        folder.mkdir()
        with self.log_path.open("a") as log:
            log.write(f"--- {self.name} starts: {shlex.join(self.args)}\n")
        self._started = time.monotonic()
        self.session = self._zygote.fork(
            {
                "args": self.args,
                "env": self.env,
                "log": str(self.log_path),
                "cores": self.cores,
                "prog_thread": self.prog_thread,
                "netns": self.place.netns if self.place else "",
            }
        )

    def wait_healthy(self, timeout_seconds: float | None = None) -> None:
        """Until GET /health is 200. Raises RigError with the end of the log if it ends or takes too long."""
        assert self._zygote is not None
        if timeout_seconds is None:
            timeout_seconds = PLAIN_START_TIMEOUT_SECONDS if self._zygote.plain else START_TIMEOUT_SECONDS
        deadline = time.monotonic() + timeout_seconds
        while not self.healthy():
            if not self.alive():
                code = self._zygote.exit_codes.get(self.session)
                raise RigError(self._failure(f"ended while starting (exit code {code})"))
            if time.monotonic() > deadline:
                raise RigError(self._failure(f"not healthy after {timeout_seconds:.0f} s"))
            time.sleep(0.05)
        self.start_seconds = time.monotonic() - self._started

    def healthy(self) -> bool:
        try:
            return self.request("GET", "/health", timeout_seconds=2).status == 200
        except (OSError, http.client.HTTPException):
            return False

    def alive(self) -> bool:
        """Whether its server process is there (also when stopped by a signal)."""
        return self.session in self.pids()

    def pids(self) -> list[int]:
        """All its processes: server, engine core, workers."""
        return zygote.session_pids(self.session) if self.session else []

    def kill(self) -> None:
        """SIGKILL to all its processes at once; returns when they are gone."""
        if self.session:
            zygote.kill_session(self.session)

    def stop(self) -> None:
        """SIGSTOP to all its processes: it answers nothing, but its sockets stay open."""
        self._signal(signal.SIGSTOP)

    def cont(self) -> None:
        """SIGCONT to all its processes."""
        self._signal(signal.SIGCONT)

    def terminate(self) -> None:
        """SIGTERM to its server alone, as a container runtime would; does not wait."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.session, signal.SIGTERM)

    def restart(self) -> None:
        """Kills it and starts another (a new NIXL engine id) on the same ports; waits until it is healthy."""
        self.kill()
        self.start()
        self.wait_healthy()

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float = 60.0,
    ) -> Response:
        """One HTTP request straight to the engine; a body that is not bytes goes as JSON. Raises OSError."""
        connection = (
            http.client.HTTPConnection(self.host, self.port, timeout=timeout_seconds)
            if self.tls is None
            else http.client.HTTPSConnection(self.host, self.port, timeout=timeout_seconds, context=self.tls)
        )
        try:
            sent = dict(headers or {})
            if body is not None and not isinstance(body, bytes):
                body = json.dumps(body).encode()
                sent.setdefault("content-type", "application/json")
            connection.request(method, path, body, sent)
            response = connection.getresponse()
            return Response(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()

    def metrics(self) -> Metrics:
        return Metrics(self.request("GET", "/metrics").body.decode())

    def kv_usage(self) -> float:
        """The share of KV blocks in use, 0 to 1; vLLM updates it at each engine step."""
        return self.metrics().total("vllm:kv_cache_usage_perc")

    def prompt_tokens_by_source(self) -> dict[str, int]:
        """Prompt tokens since its start, by where they came from (`PROMPT_TOKEN_SOURCES`)."""
        metrics = self.metrics()
        name = "vllm:prompt_tokens_by_source_total"
        return {source: int(metrics.total(name, source=source)) for source in PROMPT_TOKEN_SOURCES}

    def memory_bytes(self) -> int:
        """Proportional set size of all its processes: shared pages count by their share."""
        total = 0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
                total += int(re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)[1]) << 10  # type: ignore[index]
        return total

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        with contextlib.suppress(OSError):
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])
        return ""

    def _failure(self, what: str) -> str:
        return f"engines: {self.name} at {self.address} {what}; log {self.log_path} ends:\n{self.log_tail()}"
