"""Whom the decode engine connects to: its sidecar's relay and NIXL's own ports, nobody else.

Seen as the kernel sees it: every `connect` of every process of the engine is traced while it meets a prefill engine
for the first time.
"""

from __future__ import annotations

import ipaddress
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from e2e.asking import Questions, eventually

if TYPE_CHECKING:
    from e2e.engines import Engine
    from e2e.pair import Pair

RELAY_NETWORK = ipaddress.ip_network("127.77.0.0/16")
_CONNECT = re.compile(
    r"connect\(\d+, \{sa_family=AF_INET6?, sin6?_port=htons\((\d+)\).*?"
    r'(?:inet_addr\(|inet_pton\(AF_INET6, )"([^"]+)"'
)

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")


class Peer(NamedTuple):
    """Where a process wanted to connect to."""

    host: str
    port: int


@contextmanager
def connections(engine: Engine) -> Iterator[set[Peer]]:
    """What the engine connects to meanwhile; complete at the end."""
    seen: set[Peer] = set()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace"
        attached = [argument for pid in engine.pids() for argument in ("-p", str(pid))]
        tracer = subprocess.Popen(
            ["strace", "-f", "-e", "trace=connect", "-o", str(trace), *attached],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert tracer.stderr is not None
        try:
            for _ in engine.pids():  # one line for each process that it holds now
                assert "attached" in tracer.stderr.readline()
            yield seen
        finally:
            tracer.terminate()
            tracer.communicate()
        seen.update(Peer(host, int(port)) for port, host in _CONNECT.findall(trace.read_text()))


def listening(engine: Engine) -> set[int]:
    """TCP ports on which any process of the engine listens."""
    ports = set()
    for pid in engine.pids():
        sockets = {str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
                columns = line.split()
                if columns[3] == "0A" and f"socket:[{columns[9]}]" in sockets:
                    ports.add(int(columns[1].rpartition(":")[2], 16))
    return ports


@pytest.mark.parametrize("relay", ["on", "off"])
def test_only_the_relay_and_nixl(pair: Pair, relay: str) -> None:
    pair.decode.restart()  # it has met nobody yet
    questions = Questions(pair.decode)
    sidecar = pair.serve("--nixl-relay", relay)
    pulled = pair.pulled_tokens()
    with connections(pair.decode) as seen:
        for _ in range(4):
            assert questions.next().ask(sidecar).decision.startswith("remote")
        eventually(lambda: pair.pulled_tokens() > pulled)
    side_channel = pair.prefill.side_channel_port
    data_plane = (listening(pair.prefill) | listening(pair.decode)) - {side_channel, pair.prefill.port}
    others = {peer for peer in seen if peer.port not in data_plane}
    assert any(peer.port in data_plane for peer in seen), "no KV connection was seen"
    assert all(ipaddress.ip_address(peer.host).is_loopback for peer in others)
    if relay == "on":
        assert others, "no handshake was seen"
        assert all(ipaddress.ip_address(peer.host) in RELAY_NETWORK for peer in others), others
    else:  # what it would do by itself: so the trace shows what there is to be seen
        assert {peer.port for peer in others} == {side_channel}
