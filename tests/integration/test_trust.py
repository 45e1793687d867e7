"""What of the threat model (docs/trust.md) no other room shows."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from tests.engine import ThreadedEngine
from tests.integration.apis import COMPLETIONS
from tests.integration.sidecar import LISTEN, Rig, Sidecar, completion
from tests.ports import free_ports


def listeners(process: int) -> set[tuple[str, int]]:
    """Address and port of every TCP listener of a process."""
    own = set()
    for link in Path(f"/proc/{process}/fd").iterdir():
        try:
            name = str(link.readlink())
        except FileNotFoundError:  # closed meanwhile
            continue
        if name.startswith("socket:["):
            own.add(name[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            columns = line.split()
            if columns[3] == LISTEN and columns[9] in own:
                host, port = columns[1].split(":")
                words = [bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8)]
                found.add((str(ipaddress.ip_address(b"".join(words))), int(port, 16)))
    return found


def test_nothing_else_listens_beyond_loopback() -> None:
    """With all that listens switched on: the serving port and the admin port alone are reachable from elsewhere."""
    with ThreadedEngine() as decode, ThreadedEngine() as prefill:
        sidecar = Sidecar(
            *("--disagg", "on", "--prefill", prefill.address, "--model-server-port", str(decode.port)),
            *("--local-side-channel", f"127.0.0.1:{decode.side_channel_port}"),
            *("--kv-events", "on", "--kv-events-port", str(free_ports())),
        )
        try:
            rig = Rig(sidecar, prefill, decode)
            assert rig.post(COMPLETIONS, completion()).decision.startswith("remote")
            found = listeners(sidecar.process.pid)
            beyond = {port for host, port in found if not ipaddress.ip_address(host).is_loopback}
            assert beyond == {sidecar.port, sidecar.admin_port}
            assert len({port for _, port in found}) >= 4, "the relay and the KV events listen as well"
            sidecar.stop()
        finally:
            sidecar.kill()
