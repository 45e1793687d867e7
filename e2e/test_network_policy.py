"""What the chart's network policy lets through is what real engines use.

With UCX_TCP_PORT_RANGE the KV goes over the ports that the policy opens, and nothing else passes between the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from e2e.engines import Engine, Rig
from e2e.test_rig import SENTENCE, complete
from tests.chart.render import CHART

PORTS = yaml.safe_load((CHART / "values.yaml").read_text())["networkPolicy"]["nixlDataPorts"]
DATA = range(PORTS["first"], PORTS["last"] + 1)
LISTEN = "0A"  # the kernel's state number in /proc/net/tcp


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig("tiny", extra_env={"UCX_TCP_PORT_RANGE": f"{DATA.start}-{DATA.stop - 1}"}) as rig:
        yield rig


def sockets(engine: Engine) -> tuple[set[int], list[tuple[int, int]]]:
    """Ports that the engine listens on, and (local, remote) of its connections."""
    own = set()
    for pid in engine.pids():
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                own.add(str(link.readlink()))
            except FileNotFoundError:  # closed in the meantime
                continue
    listening, connections = set(), []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{engine.session}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            columns = line.split()
            local, remote = (int(address.rpartition(":")[2], 16) for address in columns[1:3])
            if f"socket:[{columns[9]}]" not in own:
                continue
            if columns[3] == LISTEN:
                listening.add(local)
            else:
                connections.append((local, remote))
    return listening, connections


def test_kv_goes_over_the_ports_that_the_policy_opens(rig: Rig) -> None:
    prefill, decode = rig.prefill[0], rig.decode[0]
    first = complete(prefill, rig, SENTENCE * 20, 1, kv_transfer_params={"do_remote_decode": True})
    complete(decode, rig, SENTENCE * 20, 4, kv_transfer_params=first["kv_transfer_params"])
    assert decode.prompt_tokens_by_source()["external_kv_transfer"] > 0
    p_listens, p_connections = sockets(prefill)
    d_listens, d_connections = sockets(decode)
    opened_by_decode = {remote for _, remote in d_connections if remote in p_listens}
    opened_by_prefill = {remote for _, remote in p_connections if remote in d_listens}
    assert opened_by_decode & set(DATA), "no data connection: is the variable still read?"
    assert opened_by_decode <= {*DATA, prefill.port, prefill.side_channel_port}
    assert not opened_by_prefill, "the policy lets no prefill pod connect to a decode pod"
