"""Pods as the chart makes them, each in a namespace of its own: a simulated engine, and for decode a real sidecar.

They start, end and die as the kubelet has it: a native sidecar starts before the engine and gets SIGTERM after it.
The chart's own seconds, divided by `SCALE`. Must not know who may send them requests.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Any

import yaml

from tests.chart.render import CHART
from tests.engine import ThreadedEngine
from tests.integration.sidecar import Metrics, Sidecar, close_idle

if TYPE_CHECKING:
    from e2e.cluster.network import Namespace
    from tests.kube.api import ThreadedApi

SCALE = 5.0
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
HTTP_PORT, ENGINE_PORT, ADMIN_PORT, SIDE_CHANNEL_PORT, API_PORT = 8000, 8200, 9090, 5600, 6443
START_S = 60.0
ENGINE: dict[str, Any] = {
    "kv_load_failure_policy": "recompute",
    "seconds_per_token": 0.08,
    "prefill_seconds_per_1k_tokens": 0.4,
    "pull_seconds_per_1k_tokens": 0.01,
}


class Pod:
    """`role` is decode or prefill. `ready` and `terminating` are what the cluster says of it."""

    def __init__(self, name: str, role: str, network: tuple[Namespace, str], api: ThreadedApi) -> None:
        self.name, self.role = name, role
        self.namespace, self.ip = network
        self.ready = self.terminating = False
        self.aborted = 0
        """Requests that its engine had aborted when it ended as it should."""
        self.engine: ThreadedEngine | None = None
        self.sidecar: Sidecar | None = None
        self.logs: list[str] = []
        self.last_words: list[Metrics] = []
        """Of each life of the sidecar, just before its end."""
        self._values = VALUES[role]
        self._api = api
        if role == "decode":
            api.listen(self._loopback(API_PORT))

    @property
    def address(self) -> str:
        """Where requests go to."""
        return f"{self.ip}:{HTTP_PORT}"

    @property
    def health(self) -> tuple[str, int, str]:
        """Of the engine: host, port and path of its readiness probe."""
        return self.ip, HTTP_PORT if self.role == "prefill" else ENGINE_PORT, "/health"

    def _loopback(self, port: int) -> socket.socket:
        with self.namespace.entered():
            return socket.create_server(("127.0.0.1", port))

    # -- life

    def start(self) -> None:
        """The sidecar; once its startup probe is content, the engine."""
        with self.namespace.entered():
            if self.role == "decode":
                self.sidecar = Sidecar(
                    *("--discovery", "kubernetes", "--kubernetes-api", f"http://127.0.0.1:{API_PORT}"),
                    *("--discovery-namespace", self._api.namespace, "--disagg", "on", "--warm-up", "on"),
                    *("--prefill-side-channel-port", str(SIDE_CHANNEL_PORT)),
                    *("--drain-timeout", f"{self.drain_s:g}"),
                    environment={"POD_IP": self.ip, "VLLM_NIXL_SIDE_CHANNEL_HOST": self.ip, "POD_NAME": self.name},
                    ports=(HTTP_PORT, ADMIN_PORT),
                    ready="/startupz",
                )
            # On every address, as vLLM listens: probes come from the node, the sidecar from the pod.
            host, port = ("0.0.0.0", ENGINE_PORT) if self.role == "decode" else (self.ip, HTTP_PORT)
            self.engine = ThreadedEngine(
                own_thread=True,
                host=host,
                port=port,
                side_channel_host=self.ip,
                side_channel_port=SIDE_CHANNEL_PORT,
                keep_alive_seconds=120.0,
                **ENGINE,
            )
            self.engine.start()

    @property
    def requests(self) -> int:
        """Prompts that its engine has been asked since its start."""
        return sum(one.method == "POST" for one in list(self.engine.requests)) if self.engine else 0

    @property
    def pre_stop_s(self) -> float:
        return float(self._values["preStopSeconds"]) / SCALE

    @property
    def shutdown_s(self) -> float:
        return float(self._values["shutdownTimeoutSeconds"]) / SCALE

    @property
    def drain_s(self) -> float:
        return float(VALUES["sidecar"]["settings"]["drain-timeout"]) / SCALE if self.role == "decode" else 0.0

    @property
    def grace_s(self) -> float:
        """terminationGracePeriodSeconds, as the chart adds it up."""
        return self.pre_stop_s + self.shutdown_s + self.drain_s + 15 / SCALE

    def end(self) -> str:
        """As the kubelet ends a pod that is Terminating. How it went: "" if well."""
        assert self.engine is not None
        began = time.monotonic()
        time.sleep(self.pre_stop_s)
        cut = self._end_engine()
        problem = f"the engine cut {cut} requests off" if cut else ""
        if self.sidecar is not None:
            self._hear()
            self.sidecar.signal(signal.SIGTERM)
            try:
                code = self.sidecar.exit_code(max(began + self.grace_s - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                problem = problem or "the sidecar outlived its grace period"
            else:
                problem = problem or (f"the sidecar ended with {code}" if code else "")
            self._end_sidecar()
        return problem

    def _end_engine(self) -> int:
        """SIGTERM with --shutdown-timeout: no new connection, what has begun is finished. How many were not."""
        assert self.engine is not None
        engine, self.engine = self.engine, None
        engine.refuse()
        until = time.monotonic() + self.shutdown_s
        while (engine.running or engine.waiting) and time.monotonic() < until:
            close_idle(engine)
            time.sleep(0.05)
        cut = engine.running + engine.waiting
        self.aborted += engine.aborted
        engine.stop()
        return cut

    def kill(self) -> None:
        """SIGKILL for all its processes, in the middle of whatever they do."""
        assert self.engine is not None
        if self.sidecar is not None:
            self._hear()
            self.sidecar.signal(signal.SIGKILL)
        self.engine.kill()
        self.engine.stop()
        self.engine = None
        if self.sidecar is not None:
            self._end_sidecar()

    def _hear(self) -> None:
        assert self.sidecar is not None
        with self.namespace.entered():
            self.last_words.append(self.sidecar.metrics())

    def _end_sidecar(self) -> None:
        assert self.sidecar is not None
        sidecar, self.sidecar = self.sidecar, None
        self.logs.append(sidecar.log)
        try:
            sidecar.check_log()
        finally:
            sidecar.kill()

    def close(self) -> None:
        """At the end of a run: at once, but the sidecar is asked first."""
        if self.sidecar is not None:
            self._hear()
            self._end_sidecar()
        if self.engine is not None:
            self.engine.stop()
            self.engine = None
