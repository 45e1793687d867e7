"""Runs in the engines' Python: imports vLLM once, then forks an engine for each request on its standard input.

It knows processes and nothing else: what an engine is started with comes from `e2e/rig.py`, one JSON object a
line in, one a line out. When its input ends (also when the parent was killed) it ends every engine and itself.

Importing vLLM takes eleven seconds of CPU, and a vLLM server does it three times; forked, an engine is up in six.

What is tamed, for a machine of a few cores without RDMA (none of it touches the protocol):
- vLLM's CPU platform insists on starting its processes by `spawn`; here `spawn` means `fork`.
- NIXL's progress thread polls without pause, one full core for each idle engine. It is off unless an engine is
  started with `prog_thread`: vLLM drives NIXL itself at each step, and a prefill engine keeps stepping while it
  holds blocks. Only an *idle* prefill engine does not serve a read any more, so tests of expired leases need it.
- Mooncake's connector asks for the current accelerator and is told that it is the first; over TCP it uses none.
- NIXL's connector pins each engine's worker to the last core of the machine: prefill and decode would fight for it.
  Pinning by the engine is ignored, pinning by the rig (`cores`) is done before.

Other arguments are folders of packages beside the environment's. With `--plain` nothing is imported or tamed:
engines are started as they come, by executing the command.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import re
import runpy
import select
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SERVER_MODULE = "vllm.entrypoints.openai.api_server"
# prctl(2); the numbers are Linux's.
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
CLONE_NEWNS = 0x00020000  # unshare(2)
MS_REC, MS_SLAVE = 0x4000, 0x80000  # mount(2)
REAP_INTERVAL_SECONDS = 0.05
SHARED_MEMORY = Path("/dev/shm")
PROG_THREAD = "PD_RIG_PROG_THREAD"

ANSWERS = 3  # where the answers go: vLLM logs to standard output

_libc = ctypes.CDLL(None, use_errno=True)
_set_affinity = os.sched_setaffinity


def die_with_parent() -> None:
    """A forked process must not outlive the one that forked it, whatever that one died of."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def tame() -> None:
    """See the file's description."""
    import multiprocessing

    get_context = multiprocessing.get_context

    def forking(method: str | None = None) -> Any:
        return get_context("fork" if method == "spawn" else method)

    multiprocessing.get_context = forking
    os.sched_setaffinity = lambda *_: None

    import torch

    if not torch.accelerator.is_available():
        torch.accelerator.current_device_index = lambda: 0

    import nixl._api

    config_init = nixl._api.nixl_agent_config.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["enable_prog_thread"] = os.environ.get(PROG_THREAD) == "1"
        config_init(self, *args, **kwargs)

    nixl._api.nixl_agent_config.__init__ = init


def name_shared_memory() -> None:
    """Has this engine's shared memory named after its session, so that it can be removed after a crash."""
    from multiprocessing import shared_memory

    shared_memory._SHM_NAME_PREFIX = f"/{shared_memory_prefix(os.getsid(0))}"  # type: ignore[attr-defined]
    shared_memory._SHM_SAFE_NAME_LENGTH = 40  # type: ignore[attr-defined] # 14 has no room for it


def preload() -> None:
    """Imports what an engine's three processes need, so that a fork finds it done."""
    import importlib

    for module in (
        SERVER_MODULE,
        "vllm.v1.engine.core",
        "vllm.v1.worker.cpu_worker",
        "vllm.v1.executor.multiproc_executor",
        "vllm.v1.executor.uniproc_executor",
        "vllm.model_executor.models.llama",
        "vllm.v1.attention.backends.cpu_attn",
        "vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector",
    ):
        importlib.import_module(module)


def enter(netns: str) -> None:
    """Moves this process into a network namespace, with a view of its devices: UCX looks for them in /sys."""
    descriptor = os.open(netns, os.O_RDONLY)
    if _libc.setns(descriptor, 0):
        raise OSError(ctypes.get_errno(), f"setns {netns}")
    os.close(descriptor)
    show_devices()


def show_devices() -> None:
    """A /sys of this process's own that shows the devices of its network namespace."""
    if (
        _libc.unshare(CLONE_NEWNS)
        or _libc.mount(b"none", b"/", None, MS_REC | MS_SLAVE, None)
        or _libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None)
    ):
        raise OSError(ctypes.get_errno(), "mount /sys")


def become_engine(order: dict[str, Any], parent: int, born: int, plain: bool) -> None:
    """In the fork: sets it apart (closing `born` then), and runs the engine until that ends."""
    die_with_parent()
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
    os.setsid()  # the session is how the rig finds every process of this engine
    os.close(born)
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(ANSWERS)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(order["env"])
    if order["netns"]:
        enter(order["netns"])
    tempfile.tempdir = None  # forget what was read from the environment before
    if order["cores"]:
        _set_affinity(0, order["cores"])
    if plain:
        os.execv(sys.executable, [sys.executable, "-m", SERVER_MODULE, *order["args"]])
    name_shared_memory()
    os.environ[PROG_THREAD] = "1" if order["prog_thread"] else "0"
    sys.argv = [SERVER_MODULE, *order["args"]]
    runpy.run_module(SERVER_MODULE, run_name="__main__")


def fork_engine(order: dict[str, Any], plain: bool) -> int:
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    waiting, born = os.pipe()
    pid = os.fork()
    if pid:
        os.close(born)
        os.read(waiting, 1)  # until the session exists: before that the rig would think the engine dead
        os.close(waiting)
        return pid
    status = 1
    try:
        os.close(waiting)
        become_engine(order, parent, born, plain)
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def session_pids(session: int) -> list[int]:
    """The living processes of a session, from /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            # The command's name stands in parentheses and may hold anything; after it: state, ppid, pgrp, session.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.append(int(entry.name))
    return found


def kill_session(session: int) -> None:
    """Kills every process of a session; then removes the shared memory that they had no time to remove.

    Also to be called for an engine that ended by itself: one that crashed leaves hundreds of megabytes.
    """
    shared = set(SHARED_MEMORY.glob(f"{shared_memory_prefix(session)}*"))
    while pids := session_pids(session):
        for pid in pids:
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{pid}/maps").read_text()
                shared.update(Path(m) for m in re.findall(rf"{SHARED_MEMORY}/\S+$", maps, re.MULTILINE))
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    shared.update(SHARED_MEMORY.glob(f"{shared_memory_prefix(session)}*"))
    for path in shared:
        path.unlink(missing_ok=True)


def shared_memory_prefix(session: int) -> str:
    return f"pd-rig-{session}-"


def answer(message: dict[str, Any]) -> None:
    os.write(ANSWERS, json.dumps(message).encode() + b"\n")


def reap(engines: set[int]) -> None:
    """Collects ended children: engines, and orphans of theirs (this process adopts them)."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid in engines:
            engines.discard(pid)
            answer({"exited": pid, "status": os.waitstatus_to_exitcode(status)})


def serve(plain: bool) -> None:
    engines: set[int] = set()
    unread = b""
    while True:
        readable, _, _ = select.select([0], [], [], REAP_INTERVAL_SECONDS)
        if readable:
            chunk = os.read(0, 65536)
            if not chunk:
                break
            *lines, unread = (unread + chunk).split(b"\n")
            for line in lines:
                pid = fork_engine(json.loads(line), plain)
                engines.add(pid)
                answer({"started": pid})
        reap(engines)
    for pid in engines:
        kill_session(pid)
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def main() -> None:
    plain = "--plain" in sys.argv
    sys.path += [argument for argument in sys.argv[1:] if argument != "--plain"]
    os.dup2(1, ANSWERS)
    os.dup2(2, 1)
    # The rig decides when this ends, not a Ctrl-C that the terminal sends to everyone.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    start = time.monotonic()
    if not plain:
        tame()
        preload()
        # Python's own forks, at any depth: the engine core and the workers must not outlive their server.
        os.register_at_fork(after_in_child=die_with_parent)
        gc.collect()
        gc.freeze()  # the collector would write to every object, and so copy every shared page, in each fork
    answer({"ready": round(time.monotonic() - start, 1)})
    serve(plain)


if __name__ == "__main__":
    main()
