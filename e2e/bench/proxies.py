"""The proxies under test: how each is configured, started on its core, found ready and ended.

Each is data: a command, perhaps a file, the number of legs. It must not know cases or what is measured.
Every proxy gets the settings that are best for it here: one worker, logs off the hot path, no caps, no
buffering where that is a choice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from tests.ports import free_ports

READY_TIMEOUT_S = 40
_END_TIMEOUT_S = 3


@dataclass(frozen=True)
class Place:
    """Where one proxy stands: its ports, the engines' ports, a folder for its files."""

    port: int
    admin_port: int
    prefill_port: int
    decode_port: int
    collector_port: int
    folder: Path


@dataclass(frozen=True)
class Spec:
    """One proxy. `legs` is 2 for a P/D router (three messages a request), 1 for a plain relay."""

    name: str
    legs: int
    command: Callable[[Place, Path], list[str]]
    peer: str | None = None  # the name in install.py; None is the project itself
    files: Callable[[Place], dict[str, str]] = lambda _: {}
    environment: dict[str, str] = field(default_factory=dict)
    headers: Callable[[Place], dict[str, str]] = lambda _: {}
    remark: str = ""
    folder: Path | None = None  # working directory; `python -m sidecar` takes the package that it finds there


# Which interpreter runs the sidecar; its build decides much of the sidecar's CPU (use_python).
_interpreter = [sys.executable]


def _sidecar(*extra: str) -> Callable[[Place, Path], list[str]]:
    def command(place: Place, _: Path) -> list[str]:
        return [
            *(_interpreter[0], "-m", "sidecar", "serve"),
            *("--port", str(place.port), "--metrics-port", str(place.admin_port)),
            *("--model-server-port", str(place.decode_port)),
            *("--prefill", f"127.0.0.1:{place.prefill_port}", "--min-remote-tokens", "0"),
            *extra,
        ]

    return command


def _sidecar_traced(place: Place, binary: Path) -> list[str]:
    spans = ("--tracing", "on", "--trace-sample", "0.01")
    where = ("--otlp-endpoint", f"http://127.0.0.1:{place.collector_port}")
    return _sidecar("--disagg", "on", *spans, *where)(place, binary)


def _vllm_router(place: Place, binary: Path) -> list[str]:
    return [
        *(str(binary), "--host", "127.0.0.1", "--port", str(place.port), "--vllm-pd-disaggregation"),
        *("--prefill", f"http://127.0.0.1:{place.prefill_port}"),
        *("--decode", f"http://127.0.0.1:{place.decode_port}"),
        *("--policy", "round_robin", "--log-level", "warning", "--prometheus-port", str(place.admin_port)),
        *("--worker-startup-check-interval", "1"),
    ]


def _smg(place: Place, binary: Path) -> list[str]:
    return [
        *(str(binary), "launch", "--host", "127.0.0.1", "--port", str(place.port), "--pd-disaggregation"),
        *("--prefill", f"http://127.0.0.1:{place.prefill_port}"),
        *("--decode", f"http://127.0.0.1:{place.decode_port}"),
        *("--backend", "vllm", "--policy", "round_robin", "--log-level", "warn"),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(place.admin_port)),
        # Without these it polls the engines for loads and looks for a tokenizer, which stubs don't have.
        *("--disable-load-monitoring", "--disable-tokenizer-autoload"),
        *("--worker-startup-check-interval", "1", "--shutdown-grace-period-secs", "1"),
    ]


def _nginx_files(place: Place) -> dict[str, str]:
    temporary = "".join(
        f"{kind}_temp_path {place.folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    return {
        "nginx.conf": f"""
daemon off; worker_processes 1; pid {place.folder}/nginx.pid; error_log stderr error;
worker_rlimit_nofile 65536;
events {{ worker_connections 8192; }}
http {{
  access_log off; client_max_body_size 0; {temporary}
  keepalive_requests 1000000000; keepalive_timeout 3600s; client_body_buffer_size 64k;
  upstream engine {{ server 127.0.0.1:{place.decode_port}; keepalive 4096; keepalive_requests 1000000000; }}
  server {{
    listen 127.0.0.1:{place.port} backlog=4096;
    location / {{
      proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_request_buffering off; proxy_read_timeout 3600s;
    }}
  }}
}}
"""
    }


_ENVOY_TYPES = "type.googleapis.com/envoy.extensions"


def _envoy_files(place: Place) -> dict[str, str]:
    return {
        "envoy.yaml": f"""
admin: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {place.admin_port}}}}}}}
static_resources:
  listeners:
  - address: {{socket_address: {{address: 127.0.0.1, port_value: {place.port}}}}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": {_ENVOY_TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: bench
          codec_type: HTTP1
          stream_idle_timeout: 0s
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes: [{{match: {{prefix: /}}, route: {{cluster: engine, timeout: 0s}}}}]
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {{"@type": {_ENVOY_TYPES}.filters.http.router.v3.Router}}
  clusters:
  - name: engine
    connect_timeout: 1s
    circuit_breakers:
      thresholds: [{{max_connections: 65536, max_pending_requests: 65536, max_requests: 65536}}]
    load_assignment:
      cluster_name: engine
      endpoints:
      - lb_endpoints:
        - endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {place.decode_port}}}}}}}
"""
    }


def _target_header(place: Place) -> dict[str, str]:
    return {"x-prefiller-host-port": f"127.0.0.1:{place.prefill_port}"}


SPECS: dict[str, Spec] = {
    spec.name: spec
    for spec in (
        Spec("sidecar", 2, _sidecar("--disagg", "on"), headers=_target_header, remark="as it comes, NIXL relay on"),
        Spec(
            "sidecar-plain",
            2,
            _sidecar("--disagg", "on", "--nixl-relay", "off"),
            headers=_target_header,
            remark="NIXL relay off",
        ),
        Spec(
            "sidecar-traced",
            2,
            _sidecar_traced,
            headers=_target_header,
            remark="relay on, one request in 100 traced",
        ),
        Spec(
            "sidecar-workers",
            2,
            _sidecar("--disagg", "on", "--workers", "2"),
            headers=_target_header,
            remark="`--workers 2` on the one core that each proxy gets: what sharing costs, not what it gains",
        ),
        Spec("sidecar-local", 1, _sidecar("--disagg", "off"), remark="`--disagg off`: a plain relay"),
        Spec("vllm-router", 2, _vllm_router, peer="vllm-router", remark="`--kv-connector nixl`, its default"),
        Spec("smg", 2, _smg, peer="smg", remark="`--backend vllm`, finds the NIXL connector by itself"),
        Spec(
            "nginx",
            1,
            lambda place, binary: [str(binary), "-p", str(place.folder), "-c", str(place.folder / "nginx.conf")],
            peer="nginx",
            files=_nginx_files,
            remark="one hop, keepalive, no buffering",
        ),
        Spec(
            "envoy",
            1,
            lambda place, binary: [
                *(str(binary), "-c", str(place.folder / "envoy.yaml"), "--concurrency", "1"),
                *("--disable-hot-restart", "--log-level", "error"),
            ],
            peer="envoy",
            files=_envoy_files,
            remark="one hop, `--concurrency 1`",
        ),
    )
}


def pin(core: int, priority: int) -> None:
    """For a child before its program: its core and its niceness."""
    os.sched_setaffinity(0, {core})
    if priority:
        os.setpriority(os.PRIO_PROCESS, 0, priority)


def use_python(interpreter: str) -> None:
    """Run the sidecar under another interpreter: with its own packages if it has them (a virtual environment), else
    with the packages of this one, whose version it must be then."""
    _interpreter[0] = interpreter
    if subprocess.run([interpreter, "-c", "import uvloop"], capture_output=True, check=False).returncode == 0:
        return
    packages = sysconfig.get_path("purelib")
    for name, spec in SPECS.items():
        if spec.peer is None:
            SPECS[name] = dataclasses.replace(spec, environment={"PYTHONPATH": packages})


def add_baseline(where: str, folder: Path) -> None:
    """Another version of the sidecar as proxy `baseline`: a folder that holds the packages, or a git revision,
    which is unpacked into `folder`. ValueError if it is neither."""
    source = Path(where)
    if not source.is_dir():
        root = Path(__file__).parents[2]
        archive = subprocess.run(
            ["git", "-C", str(root), "archive", where, "sidecar", "transport"], capture_output=True, check=False
        )
        if archive.returncode:
            raise ValueError(f"{where} is no folder and no revision: {archive.stderr.decode().strip()}")
        source = folder
        source.mkdir(parents=True, exist_ok=True)
        subprocess.run(["tar", "-x", "-C", str(source)], input=archive.stdout, check=True)
    SPECS["baseline"] = dataclasses.replace(
        SPECS["sidecar"], name="baseline", folder=source, remark=f"the sidecar as of {where}"
    )


class NotReadyError(Exception):
    """The proxy did not come up; the message carries the end of its log."""


def descendants(pid: int) -> list[int]:
    """A process and all it started (nginx's worker does nginx's work)."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for children in Path(f"/proc/{parent}/task").glob("*/children"):
                found += [int(child) for child in children.read_text().split()]
    return found


class Proxy:
    """One started proxy on one core."""

    def __init__(
        self,
        spec: Spec,
        binary: Path,
        core: int,
        engines: tuple[int, int],
        folder: Path,
        priority: int = 0,
        *,
        collector_port: int = 0,
    ) -> None:
        """`engines` are the ports of prefill and decode; `folder` is for files and the log; at `collector_port`
        spans are taken."""
        folder.mkdir(parents=True, exist_ok=True)
        self.spec = spec
        self.place = Place(free_ports(), free_ports(), *engines, collector_port, folder)
        for name, text in spec.files(self.place).items():
            (folder / name).write_text(text)
        self.log = folder / f"{spec.name}.log"
        log: IO[bytes]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                spec.command(self.place, binary),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=spec.folder,
                # What is set in this shell for a sidecar of the user's is not meant for this one.
                env={name: text for name, text in os.environ.items() if not name.startswith("PD_SIDECAR_")}
                | spec.environment,
                start_new_session=True,
                # Set before the start: runtimes size their thread pools by it.
                preexec_fn=lambda: pin(core, priority),
            )

    @property
    def pid(self) -> int:
        """The process that was started; `pids` has its children too."""
        return self._process.pid

    @property
    def pids(self) -> list[int]:
        """Every process of this proxy."""
        return descendants(self._process.pid)

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def log_end(self, lines: int = 3) -> str:
        """The last lines of its log, on one line."""
        return " | ".join(self.log.read_text(errors="replace").strip().splitlines()[-lines:])[-400:]

    def wait_ready(self, body: bytes) -> None:
        """Until a request gets a 200 through it. NotReadyError otherwise."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        last = "it never listened"
        while time.monotonic() < deadline:
            if not self.alive:
                raise NotReadyError(f"ended with {self._process.returncode}: {self.log_end()}")
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.place.port, timeout=5)
                headers = {"Content-Type": "application/json", **self.spec.headers(self.place)}
                connection.request("POST", "/v1/chat/completions", body, headers)
                answer = connection.getresponse()
                content = answer.read()
                connection.close()
                if answer.status == 200:
                    return
                last = f"status {answer.status}: {content[:200].decode(errors='replace')}"
            except (OSError, http.client.HTTPException) as error:
                if not isinstance(error, ConnectionRefusedError):
                    last = repr(error)
            time.sleep(0.2)
        raise NotReadyError(f"not ready after {READY_TIMEOUT_S} s ({last}): {self.log_end()}")

    def end_gently(self, timeout_s: float = 30) -> None:
        """SIGTERM to the started process alone, and wait: it may have something to write."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=timeout_s)

    def close(self) -> None:
        """End exactly what was started, its children too."""
        pids = self.pids
        for sign in (signal.SIGTERM, signal.SIGKILL):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_END_TIMEOUT_S)
            pids = [pid for pid in pids if Path(f"/proc/{pid}/stat").exists() and pid != self.pid]
            if self._process.returncode is not None and not pids:
                return
