"""Real vLLM engines for tests, demo and benchmark: starts prefill and decode engines, ends what it started.

    with Rig(model="tiny", prefill=1, decode=1) as rig:
        rig.prefill[0].address, rig.decode[0].metrics(), rig.prefill[0].kill(), rig.prefill[0].restart()

Blocking, standard library only; `async with` works too and does the waiting in a thread. It must not know the
sidecar. How engines share one import of vLLM, and what is tamed in them: `e2e/zygote.py`.
By hand: `python -m e2e.engines --prefill 1 --decode 1 --model tiny`.
"""

from __future__ import annotations

import argparse
import asyncio
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
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, Self

from e2e import models, zygote
from e2e.install import cache_root, engine_python, say
from tests.ports import free_ports

Role = Literal["prefill", "decode"]
HOST = "127.0.0.1"
# A start takes 2 to 10 s, on a busy machine twenty times that; a vLLM of the user's own loads from scratch.
START_TIMEOUT_SECONDS = 300.0
PLAIN_START_TIMEOUT_SECONDS = 900.0
LOG_TAIL_LINES = 30
# The path of a Unix socket ends at 107 bytes; vLLM's sockets have names of 37, our folders in between take 20.
LONGEST_BASE = 50
# Room for about 32,000 tokens (1 KB each) and 11,000 tokens (46 KB each).
KV_CACHE_BYTES = {"tiny": 32 << 20, "smollm2": 512 << 20}
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


# --- several of them --------------------------------------------------------------------------------------


class Rig:
    """Prefill and decode engines that belong together.

    model                `tiny`, `smollm2`, or a folder; PD_E2E_MODEL overrides it
    prefill, decode      how many engines of each
    pin                  each engine on one core: prefill on the first half of the cores, decode on the other
    block_size           tokens in a KV block
    kv_cache_bytes       size of each engine's KV cache (default by model)
    lease_seconds        how long a prefill engine keeps blocks for a reader (vLLM's own default is 30)
    load_failure_policy  what a decode engine does when KV cannot be loaded (vLLM's own default is `fail`)
    prog_thread          keep NIXL's busy progress thread: for all engines, or for one role. Tests that freeze
                         or expire an otherwise idle prefill engine need it
    kv_connector         the connector's name in vLLM, or None for engines without one
    connector_config     its kv_connector_extra_config, beside what the rig sets
    extra_flags          for all; prefill_flags and decode_flags for one role; later ones override earlier
    extra_env            environment of all engines
    tls                  how to speak to engines whose flags name a certificate
    prefill_place        the network namespace of the prefill engines, if it is not that of the rig
    consecutive          the decode engines listen on consecutive ports, like the ranks of a pod
    beside               packages and libraries that engines find besides those of their environment
    """

    def __init__(
        self,
        model: str = "tiny",
        *,
        prefill: int = 1,
        decode: int = 1,
        pin: bool = True,
        block_size: int = 32,
        kv_cache_bytes: int | None = None,
        lease_seconds: int | None = None,
        load_failure_policy: Literal["recompute", "fail"] = "recompute",
        prog_thread: bool | Role = False,
        kv_connector: str | None = "NixlConnector",
        connector_config: Mapping[str, Any] | None = None,
        extra_flags: Sequence[str] = (),
        prefill_flags: Sequence[str] = (),
        decode_flags: Sequence[str] = (),
        extra_env: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        prefill_place: Place | None = None,
        consecutive: bool = False,
        beside: Beside = NOTHING_BESIDE,
    ) -> None:
        self.model = os.environ.get("PD_E2E_MODEL") or model
        self.model_name = Path(self.model).name  # what requests say in "model"
        self.block_size = block_size
        self._kv_cache_bytes = kv_cache_bytes
        self._lease_seconds = lease_seconds
        self._load_failure_policy = load_failure_policy
        self._kv_connector = kv_connector
        self._connector_config = dict(connector_config or {})
        self._flags = {"prefill": [*extra_flags, *prefill_flags], "decode": [*extra_flags, *decode_flags]}
        self._env = dict(extra_env or {})
        self._tls = tls
        self._places: dict[Role, Place | None] = {"prefill": prefill_place, "decode": None}
        self._decode_ports = free_ports(decode) if consecutive else 0
        self._beside = beside
        self._counts: dict[Role, int] = {"prefill": prefill, "decode": decode}
        self._pin = pin
        self._prog_thread = prog_thread
        self.folder = Path()  # logs and sockets, made by start
        self.engines: list[Engine] = []

    @property
    def prefill(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.role == "prefill"]

    @property
    def decode(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.role == "decode"]

    def start(self) -> Self:
        """Starts all engines at once and waits for them; ends them again if one fails (RigError)."""
        plain = Zygote.shared(self._beside).plain
        path = str(models.model_path(self.model, engine_python()))
        base = tempfile.gettempdir()
        self.folder = Path(tempfile.mkdtemp(prefix="pd-rig-", dir=base if len(base) < LONGEST_BASE else "/tmp"))
        try:
            for role, count in self._counts.items():
                for index in range(count):
                    self.engines.append(self._engine(role, index, path, plain=plain))
            for engine in self.engines:
                engine.start()
            for engine in self.engines:
                engine.wait_healthy()
        except BaseException:
            self.close(keep_logs=True)
            raise
        return self

    def close(self, *, keep_logs: bool = False) -> None:
        """Ends every process of every engine, and says so if one could not be ended (RigError)."""
        for engine in self.engines:
            engine.kill()
        left = [pid for engine in self.engines for pid in engine.pids()]
        if not keep_logs and self.folder != Path():
            shutil.rmtree(self.folder, ignore_errors=True)
        if left:
            raise RigError(f"engines: processes {left} of {self.folder} could not be ended")

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        failed = kind is not None and issubclass(kind, Exception)  # not Ctrl-C
        self.close(keep_logs=failed)
        if failed:
            say(f"the engines' logs are kept in {self.folder}")

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(self, *reason: object) -> None:
        await asyncio.to_thread(self.__exit__, *reason)  # type: ignore[arg-type]

    def _engine(self, role: Role, index: int, path: str, *, plain: bool) -> Engine:
        name = f"{role}-{index}"
        number = len(self.engines)
        flags = [*self._flags[role], *shlex.split(os.environ.get("VLLM_ENGINE_FLAGS", ""))]
        # A server with data parallelism has one side channel for each rank, on consecutive ports.
        side_channel_port = free_ports(_data_parallel_size(flags))
        p2p_port, bootstrap_port = free_ports(_data_parallel_size(flags)), free_ports()
        place = self._places[role]
        host = place.host if place else HOST
        port = self._decode_ports + index if self._decode_ports and role == "decode" else free_ports()
        temporary = self.folder / f"{role[0]}{index}"  # short: socket paths end at 107 bytes
        env = {
            **QUIET_ENV,
            "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel_port),
            "VLLM_P2P_SIDE_CHANNEL_HOST": host,
            "VLLM_P2P_SIDE_CHANNEL_PORT": str(p2p_port),
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bootstrap_port),
            "TMPDIR": str(temporary),
            "VLLM_RPC_BASE_PATH": str(temporary),
            **self._env,
            **dict(_own_env(number)),
        }
        if not plain:
            cache = cache_root()
            env = {
                "VLLM_CACHE_ROOT": str(cache / "vllm"),
                "VLLM_CONFIG_ROOT": str(cache / "vllm-config"),
                "HF_HOME": str(cache / "huggingface"),
                **env,
            }
        prog_thread = self._prog_thread is True or self._prog_thread == role
        return Engine(
            role=role,
            name=name,
            port=port,
            side_channel_port=side_channel_port,
            p2p_port=p2p_port,
            bootstrap_port=bootstrap_port,
            log_path=self.folder / f"{name}.log",
            args=[*self._args(role, host, port, path, plain=plain), *flags],
            env=env,
            cores=self._cores(role, index) if self._pin and not plain else [],
            prog_thread=prog_thread,
            tls=self._tls,
            place=place,
            beside=self._beside,
        )

    def _args(self, role: Role, host: str, port: int, path: str, *, plain: bool) -> list[str]:
        args = ["--model", path, "--served-model-name", self.model_name, "--host", host, "--port", str(port)]
        args += ["--block-size", str(self.block_size), "--max-model-len", str(models.MAX_MODEL_LEN)]
        args += ["--enforce-eager", *models.FLAGS.get(self.model, [])]
        # Usage with cached tokens, and /render, /inference/v1/generate, /inference/v1/abort_requests.
        args += ["--enable-prompt-tokens-details", "--enable-scale-out"]
        size = self._kv_cache_bytes or (None if plain else KV_CACHE_BYTES.get(self.model, 512 << 20))
        if size:
            args += ["--kv-cache-memory-bytes", str(size)]
        if self._kv_connector:
            extra: dict[str, Any] = dict(self._connector_config)
            if self._lease_seconds is not None:
                extra["kv_lease_duration"] = self._lease_seconds
            config: dict[str, Any] = {
                "kv_connector": self._kv_connector,
                "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
                "kv_load_failure_policy": self._load_failure_policy,
                "kv_connector_extra_config": extra,
            }
            if not plain:
                config["kv_buffer_device"] = "cpu"
                extra["num_threads"] = 0  # UCX worker threads beside the one that vLLM drives: none
            args += ["--kv-transfer-config", json.dumps(config)]
        return args

    @staticmethod
    def _cores(role: Role, index: int) -> list[int]:
        cores = sorted(os.sched_getaffinity(0))
        half = len(cores) // 2
        if half == 0:
            return cores
        mine = cores[:half] if role == "prefill" else cores[half:]
        return [mine[index % len(mine)]]


def _own_env(number: int) -> Iterator[tuple[str, str]]:
    """VLLM_ENGINE_ENV: `NAME=value` separated by blanks, {n} the engine's number (prefill first, from 0)."""
    for item in shlex.split(os.environ.get("VLLM_ENGINE_ENV", "")):
        name, equals, value = item.partition("=")
        if not equals:
            raise RigError(f"engines: VLLM_ENGINE_ENV has {item!r}, which is not NAME=value")
        yield name, value.replace("{n}", str(number))


def _data_parallel_size(flags: list[str]) -> int:
    if "--data-parallel-size" in flags:
        return int(flags[flags.index("--data-parallel-size") + 1])
    return 1


# --- by hand ----------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m e2e.engines", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="tiny", help="tiny, smollm2 or a folder")
    parser.add_argument("--prefill", type=int, default=1, help="prefill engines")
    parser.add_argument("--decode", type=int, default=1, help="decode engines")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--lease-seconds", type=int)
    parser.add_argument("--load-failure-policy", choices=["recompute", "fail"], default="recompute")
    parser.add_argument("--connector", default="NixlConnector")
    parser.add_argument("--prog-thread", action="store_true", help="keep NIXL's busy progress thread")
    parser.add_argument("--no-pin", action="store_true", help="leave the engines on all cores")
    parser.add_argument("flags", nargs="*", help="after --: more flags for every engine")
    options = parser.parse_args()
    rig = Rig(
        options.model,
        prefill=options.prefill,
        decode=options.decode,
        pin=not options.no_pin,
        block_size=options.block_size,
        lease_seconds=options.lease_seconds,
        load_failure_policy=options.load_failure_policy,
        prog_thread=options.prog_thread,
        kv_connector=options.connector,
        extra_flags=options.flags,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` would have us ignore it
    try:
        with rig:
            for engine in rig.engines:
                say(
                    f"{engine.name}: {engine.url} (side channel {engine.side_channel_port}, up in "
                    f"{engine.start_seconds:.1f} s, {engine.memory_bytes() >> 20} MB, log {engine.log_path})"
                )
            say(f'model "{rig.model_name}"; Ctrl-C ends them')
            signal.pause()
    except KeyboardInterrupt:
        say("ended")
    except RuntimeError as error:  # RigError, InstallError, ModelError: the text is all that helps
        sys.exit(str(error))


if __name__ == "__main__":
    main()
