"""Pods' networks: a namespace for each, joined by the bridge of a node. The machine's own network is not touched,
and nothing is left of it when the descriptors are closed.

A thread that enters a namespace makes its sockets, threads and processes there. Must not know what runs in a pod.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from e2e.cluster.delay import Line

CLONE_NEWNET = 0x40000000  # linux/sched.h; Python has unshare() and setns() from 3.12 on only
NODE = "10.77.0.254"

T = TypeVar("T")
_libc = ctypes.CDLL(None, use_errno=True)


def why_not() -> str:
    """Why there can be no namespaces here; "" if there can."""
    if not shutil.which("ip"):
        return "needs iproute2 (ip)"
    try:
        Namespace().close()
    except PermissionError:
        return "needs root, or CAP_SYS_ADMIN and CAP_NET_ADMIN: network namespaces"
    return ""


def _checked(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _in_thread(function: Callable[[], T]) -> T:
    """In a thread of its own, so that it may change its namespace for good."""
    found: list[T] = []
    problems: list[BaseException] = []

    def run() -> None:
        try:
            found.append(function())
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if problems:
        raise problems[0]
    return found[0]


class Namespace:
    """A network of its own, with loopback. Raises `PermissionError` where that is not allowed."""

    def __init__(self) -> None:
        def make() -> int:
            _checked(_libc.unshare(CLONE_NEWNET), "unshare")
            return os.open("/proc/thread-self/ns/net", os.O_RDONLY)

        self._descriptor = _in_thread(make)
        self.ip("link", "set", "lo", "up")

    @property
    def path(self) -> str:
        """Names it to `ip`."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """This thread is in it meanwhile, and so is what it starts."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            _checked(_libc.setns(self._descriptor, CLONE_NEWNET), "setns")
            try:
                yield
            finally:
                _checked(_libc.setns(home, CLONE_NEWNET), "setns")
        finally:
            os.close(home)

    def run(self, *command: str, given: str | None = None) -> str:
        """A command inside; what it printed."""
        with self.entered():
            done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def ip(self, *arguments: str) -> None:
        self.run("ip", *arguments)

    def close(self) -> None:
        os.close(self._descriptor)


class Network:
    """A node's bridge, 10.77.0.0/24, and the pods on it."""

    def __init__(self) -> None:
        self.node = Namespace()
        self.node.ip("link", "add", "pods", "type", "bridge")
        self.node.ip("addr", "add", f"{NODE}/24", "dev", "pods")
        self.node.ip("link", "set", "pods", "up")
        self._pods: list[Namespace] = []
        self.lines: dict[str, Line] = {}
        """That can be slow, by the address of their pod."""

    def pod(self, line: bool = False) -> tuple[Namespace, str]:
        """Another namespace, and its address: never one that was used before. `line`: behind one of
        `lines`."""
        inside = Namespace()
        self._pods.append(inside)
        number = len(self._pods)
        address = f"10.77.0.{number}"
        if line:
            self.lines[address] = Line(self.node, f"pod{number}", inside, "eth0")
        else:
            self.node.ip(*f"link add pod{number} type veth peer name eth0 netns {inside.path}".split())
        self.node.ip(*f"link set pod{number} master pods up".split())
        inside.ip("addr", "add", f"{address}/24", "dev", "eth0")
        inside.ip("link", "set", "eth0", "up")
        inside.ip("route", "add", "default", "via", NODE)
        return inside, address

    def close(self) -> None:
        for line in self.lines.values():
            line.close()
        for one in (*self._pods, self.node):
            one.close()
