"""What machine and which versions a result was taken with. It must not know results."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

_PACKAGES = ("pd-sidecar", "uvloop", "httptools", "msgspec", "aiohttp", "pyzmq")


def _first(path: str, key: str) -> str:
    try:
        for line in Path(path).read_text().splitlines():
            if line.startswith(key):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return "unknown"


def _revision() -> str:
    """The commit measured, with a plus where the work tree differs from it in what is measured."""
    root = Path(__file__).parents[1]
    try:
        git = ["git", "-C", str(root)]
        commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--", "sidecar", "transport"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip() + ("+" if changed.stdout.strip() else "")


_ASK_BUILD = (
    "import platform, sysconfig; told = str(sysconfig.get_config_var('CONFIG_ARGS')); "
    "flags = [flag for flag in ('--enable-optimizations', '--with-lto') if flag in told]; "
    "print(platform.python_version(), 'configured with', ' '.join(flags) or 'no optimisation flags')"
)


def _python(interpreter: str) -> str:
    """Version and build: without profile-guided optimisation an interpreter is markedly slower."""
    told = subprocess.run([interpreter, "-c", _ASK_BUILD], capture_output=True, text=True, check=False)
    return told.stdout.strip() or "unknown"


def describe(versions: dict[str, str], interpreter: str) -> dict[str, Any]:
    """CPU, kernel, memory, load, the project's packages and `versions` of what else has a part in the numbers."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    memory_kb = _first("/proc/meminfo", "MemTotal").split()[0]
    return {
        "cpu": _first("/proc/cpuinfo", "model name"),
        "cpu_mhz": _first("/proc/cpuinfo", "cpu MHz"),
        "cores": os.cpu_count(),
        "memory_gb": round(int(memory_kb) / 1e6, 1) if memory_kb.isdigit() else None,
        "virtual": "hypervisor" in _first("/proc/cpuinfo", "flags").split(),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "python": _python(interpreter),
        "load_average_at_start": os.getloadavg()[0],
        "revision": _revision(),
        "versions": found | versions,
    }


def sentence(machine: dict[str, Any]) -> str:
    """The machine in a line of a report."""
    cores = f"{machine['cores']} cores{' (virtual)' if machine['virtual'] else ''}"
    return (
        f"{machine['cpu']}, {cores}, {machine['memory_gb']} GB, Linux {machine['kernel']}, {machine['libc']}, "
        f"Python {machine['python']}."
    )


def versions(machine: dict[str, Any]) -> str:
    """Names and versions in a line of a report."""
    return ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
