"""Compiles and drives rig.c: stub engines and load generator in one process.

It must not know which proxy stands between, nor what the bytes mean (payloads.py makes them).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.bench.proxies import pin

SOURCE = Path(__file__).with_name("rig.c")


class RigError(Exception):
    """The rig can't be built, or ended."""


def build(cache: Path) -> Path:
    """Compile rig.c once per version of it."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RigError("the benchmark's rig is C and no compiler was found (apt-get install gcc libc6-dev)")
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    binary = cache / f"rig-{digest}"
    if not binary.exists():
        cache.mkdir(parents=True, exist_ok=True)
        made = cache / f"rig-{digest}.{os.getpid()}"
        command = [compiler, "-O2", "-std=gnu11", "-Wall", "-Wextra", "-o", str(made), str(SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RigError(f"{' '.join(command)} failed:\n{done.stderr}")
        made.rename(binary)
    return binary


@dataclass(frozen=True)
class Sample:
    """One measured window, as rig.c prints it. Seconds and microseconds as the names say."""

    requests: int
    chunks: int
    errors: int
    first_bad_status: int
    reconnects: int
    hung: int
    clean_stream_ends: int
    streams_missing: int
    stalled_events: int
    overlapping: int
    wall_s: float
    proxy_cpu_s: float
    rig_cpu_s: float
    proxy_waited_s: float
    rig_waited_s: float
    prefills: int
    decodes: int
    handoffs: int
    handoffs_checked: int
    bytes_in: int
    samples: int
    mean_us: float
    p50_us: float
    p90_us: float
    p99_us: float
    max_us: float


class Rig:
    """The running rig; its stubs answer for as long as it lives."""

    def __init__(self, binary: Path, core: int, files: Path, canned: bytes, priority: int = 0) -> None:
        """`core` is where it runs, `files` a folder for the bytes it is given."""
        self._files = files
        self._loaded: dict[str, str] = {}
        (files / "canned").write_bytes(canned)
        self._process = subprocess.Popen(
            [binary, files / "canned"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: pin(core, priority),
        )
        ports = self._read()
        self.prefill_port = int(ports["prefill_port"])
        self.decode_port = int(ports["decode_port"])

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RigError(f"the rig ended with {self._process.wait()}")
        return json.loads(line)  # type: ignore[no-any-return]

    def _command(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._read()

    def load(self, kind: str, content: bytes) -> None:
        """Hand over one file of bytes (kinds: rig.c); the same bytes are not loaded twice."""
        digest = hashlib.sha256(content).hexdigest()
        if self._loaded.get(kind) == digest:
            return
        path = self._files / kind
        path.write_bytes(content)
        self._command(f"load {kind} {path}")
        self._loaded[kind] = digest

    def closed(
        self,
        port: int,
        *,
        connections: int,
        warm_s: float,
        window_s: float,
        pids: list[int],
        pause_us: int = 0,
        max_requests: int = 0,
    ) -> Sample:
        """Closed loop: each connection sends its next request `pause_us` after the answer to the last."""
        return Sample(
            **self._command(
                f"closed port={port} conns={connections} warm_ms={int(warm_s * 1000)} ms={int(window_s * 1000)} "
                f"pause_us={pause_us} max_requests={max_requests} pids={','.join(map(str, pids))}"
            )
        )

    def stream(
        self,
        port: int,
        *,
        streams: int,
        rate_hz: int,
        step: bool,
        warm_s: float,
        window_s: float,
        pids: list[int],
    ) -> Sample:
        """`streams` open answers of `rate_hz` events a second each; latencies are send-to-receive per event."""
        return Sample(
            **self._command(
                f"stream port={port} streams={streams} rate={rate_hz} step={int(step)} "
                f"warm_ms={int(warm_s * 1000)} ms={int(window_s * 1000)} pids={','.join(map(str, pids))}"
            )
        )

    def close(self) -> None:
        """End the rig (it ends by itself when its stdin closes)."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
