"""A rig whose sidecar has several workers, and what the kernel says of these."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.engine import Fault
from tests.integration.sidecar import LISTEN, Rig, close_idle, completion

if TYPE_CHECKING:
    from tests.integration.client import Client

PATH = "/v1/completions"
SLOWLY = Fault(drip_bytes=200, drip_seconds=0.05)
LOCAL = {"prompt": "short", "model": "sim", "max_tokens": 2}


class Crew(Rig):
    """A rig whose sidecar has several workers."""

    def pids(self) -> list[int]:
        """Of the worker processes."""
        pid = self.sidecar.process.pid
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]

    def worker_of(self, client: Client) -> int:
        """Number of the worker that has this connection: asked with a request that stays local."""
        client.request("POST", PATH, LOCAL)
        wanted = client.answer("POST").header("x-request-id")
        return next(one["worker"] for one in self.sidecar.decisions() if one["request_id"] == wanted)

    def pid_of(self, worker: int) -> int:
        """The process that is this worker."""
        with self.connected_to(worker) as client:
            local = client.socket.getsockname()[1]
            for pid in self.pids():
                if local in peers(pid, self.sidecar.port):
                    return pid
        raise AssertionError(f"no process has a connection of worker {worker}")

    def connected_to(self, worker: int) -> Client:
        """A connection that the kernel has dealt to this worker."""
        for _ in range(64):
            client = self.sidecar.connect()
            if self.worker_of(client) == worker:
                return client
            client.close()
        raise AssertionError(f"none of 64 connections went to worker {worker}")

    def refuse(self) -> None:
        """The prefill engine takes no connection and keeps none."""
        self.prefill.refuse()
        close_idle(self.prefill)

    def remote(self, client: Client, **fields: Any) -> Any:
        """One request that may go remote, on this connection."""
        client.request("POST", PATH, completion(**fields), self.headers())
        return client.answer("POST")


def peers(pid: int, port: int) -> set[int]:
    """Remote ports of the connections to `port` that a process has open."""
    sockets = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            sockets.add(str(link.readlink()))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            columns = line.split()
            local, remote = (int(address.rpartition(":")[2], 16) for address in columns[1:3])
            if f"socket:[{columns[9]}]" in sockets and local == port and columns[3] != LISTEN:
                found.add(remote)
    return found


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
