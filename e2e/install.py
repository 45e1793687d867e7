"""The Python environment of the real engines: vLLM for CPU with NIXL, locked in `engines.lock`, cached.

Run by the project's own Python, standard library only. It knows nothing about models or engines, and no
registry by name: packages come from wherever `pip` is configured to look.

    PD_E2E_CACHE          where everything goes (default: pd-sidecar in $XDG_CACHE_HOME or ~/.cache)
    PD_E2E_ENGINE_PYTHON  the Python 3.11 to build with (default: the first one found)
    PD_E2E_TORCH_INDEX    an extra package index for torch. Without a CPU build in reach pip takes the
                              CUDA one, which works too and is some gigabytes larger
    VLLM_PYTHON               the Python of a vLLM of your own; then nothing is installed
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

LOCK = Path(__file__).with_name("engines.lock")
PYTHON_VERSION = (3, 11)  # the version that engines.lock was resolved for
# Installed by wheels we need, used by nothing we run: NIXL's expert-parallel library, 104 MB.
UNUSED = ("nixl_ep_cu12",)
HEARTBEAT_SECONDS = 20


class InstallError(RuntimeError):
    """The environment could not be made; the text says at which step and what to change."""


def cache_root() -> Path:
    """The one folder that this rig writes to, apart from logs of a running rig."""
    if own := os.environ.get("PD_E2E_CACHE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "pd-sidecar"


def say(text: str) -> None:
    print(text, flush=True)


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Says what is being done, that it still is, and how long it took."""
    say(f"  {what} ...")
    start = time.monotonic()
    done = threading.Event()

    def heartbeat() -> None:
        while not done.wait(HEARTBEAT_SECONDS):
            say(f"    still at it ({time.monotonic() - start:.0f} s)")

    thread = threading.Thread(target=heartbeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    say(f"    done in {time.monotonic() - start:.0f} s")


@contextlib.contextmanager
def exclusive(path: Path, what: str) -> Iterator[None]:
    """Holds a lock file: two runs at once must not build the same thing twice, or into each other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"  waiting: another process is making {what}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def find_python() -> Path:
    """A Python of the locked version that can make virtual environments."""
    wanted = ".".join(map(str, PYTHON_VERSION))
    if named := os.environ.get("PD_E2E_ENGINE_PYTHON"):
        candidates = [named]
    else:
        own = getattr(sys, "_base_executable", sys.executable)  # outside of the virtual environment we run in
        folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
        candidates = [own, *(str(Path(folder) / f"python{wanted}") for folder in folders)]
    probe = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    for candidate in candidates:
        try:
            found = subprocess.run(
                [candidate, "-c", probe], capture_output=True, text=True, timeout=60, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if found.returncode == 0 and found.stdout.strip() == wanted:
            return Path(candidate)
    raise InstallError(
        f"install: no usable Python {wanted} (with venv and ensurepip) among "
        f"{', '.join(dict.fromkeys(candidates))}. "
        f"Install python{wanted} and its venv module, or name one in PD_E2E_ENGINE_PYTHON"
    )


def environment_dir() -> Path:
    """Where the environment of this lock file lies: another lock or Python version gets another folder."""
    key = hashlib.sha256(LOCK.read_bytes())
    key.update(repr((PYTHON_VERSION, os.uname().machine)).encode())
    return cache_root() / f"engines-{key.hexdigest()[:16]}"


def engine_python() -> Path:
    """The Python that runs the engines, installed first if need be.

    Raises InstallError. With VLLM_PYTHON nothing is installed and that one is taken.
    """
    if own := os.environ.get("VLLM_PYTHON"):
        path = Path(own).expanduser()
        if not os.access(path, os.X_OK):
            raise InstallError(f"install: VLLM_PYTHON={own} is not an executable file")
        return path
    target = environment_dir()
    python = target / "bin" / "python"
    complete = target / ".complete"
    if complete.exists():
        return python
    with exclusive(target.with_suffix(".lock"), "the engines' environment"):
        if not complete.exists():
            _build(target)
            complete.touch()
    return python


def _build(target: Path) -> None:
    """Builds it where it will stay (scripts in it hold its path); the caller marks it complete."""
    started = time.monotonic()
    base = find_python()
    if target.exists():
        say(f"removing a half-built environment: {target}")
        shutil.rmtree(target)
    say(f"installing vLLM for CPU with NIXL into {target} (once; about 2.2 GB, some minutes)")
    with step(f"virtual environment from {base}"):
        run_step([str(base), "-m", "venv", str(target)], target)
    # The head of the lock is torch; the rest is complete, needs no solver and goes in without dependencies.
    head, rest = LOCK.read_text().split("# [no-deps]", 1)
    torch = next(line for line in head.splitlines() if line.startswith("torch=="))
    rest_file = target / "engines.lock"
    rest_file.write_text("#" + rest)
    constraints = target / "constraints.txt"
    pins = [line.removesuffix("\\") for line in rest.splitlines() if re.match(r"\S+==", line)]
    constraints.write_text("\n".join(pins))
    index = os.environ.get("PD_E2E_TORCH_INDEX")
    extra = ["--extra-index-url", index] if index else []
    python = str(target / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
    with step(torch):
        run_step([*pip, *extra, "--constraint", str(constraints), torch], target)
    with step(f"vLLM, NIXL and {len(pins)} packages in all"):
        run_step([*pip, "--no-deps", "--require-hashes", "--requirement", str(rest_file)], target)
    for name in UNUSED:
        for path in target.glob(f"lib/python*/site-packages/{name}"):
            shutil.rmtree(path)
    with step("check that vLLM and NIXL can be imported"):
        check = "import vllm.entrypoints.openai.api_server, nixl._api, torch; print(torch.__version__)"
        version = run_step([python, "-c", check], target)
    build = version.splitlines()[-1] if version else ""
    if list(target.glob("lib/python*/site-packages/nvidia")):
        say(
            f"  note: this torch ({build}) is a CUDA build; it works on a CPU too. To save space name an "
            "index with CPU builds in PD_E2E_TORCH_INDEX and delete that folder"
        )
    say(f"  installed in {time.monotonic() - started:.0f} s")


def run_step(command: list[str], target: Path) -> str:
    """One step of the installation; its whole output is in the error if it fails."""
    # VLLM's own settings of the caller must not leak into the check, and pip must not ask for a user install.
    env = {**os.environ, "PIP_USER": "0", "PIP_REQUIRE_VIRTUALENV": "0"}
    env.pop("PYTHONPATH", None)
    env.pop("PYTHONHOME", None)
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-25:])
        raise InstallError(
            f"install: step failed with exit code {done.returncode}: {' '.join(command)}\n{tail}\n"
            f"Nothing half-built is used; the next run starts again in {target}. If a package was not found, "
            "see `pip config list` (index, proxy) and PD_E2E_TORCH_INDEX in e2e/README.md"
        )
    return done.stdout


if __name__ == "__main__":
    try:
        print(engine_python())
    except InstallError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
