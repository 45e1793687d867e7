"""What the chart's network policy lets through is what real engines use.

With UCX_TCP_PORT_RANGE the KV goes over the ports that the policy opens, and nothing else passes between the two.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from e2e.asking import COMPLETIONS, ask, prompt, request_body
from e2e.engines import HOST, Engine
from e2e.rig import Rig
from tests.chart.render import CHART
from tests.integration.sidecar import Sidecar

PORTS = yaml.safe_load((CHART / "values.yaml").read_text())["networkPolicy"]["nixlDataPorts"]
DATA = range(PORTS["first"], PORTS["last"] + 1)
LISTEN = "0A"  # the kernel's state number in /proc/net/tcp


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


@pytest.mark.parametrize(("ours", "theirs"), [("nixlv2", "NixlConnector"), ("nixl-push", "NixlPushConnector")])
def test_kv_goes_over_the_ports_that_the_policy_opens(ours: str, theirs: str) -> None:
    environment = {"UCX_TCP_PORT_RANGE": f"{DATA.start}-{DATA.stop - 1}"}
    with Rig("tiny", kv_connector=theirs, extra_env=environment) as rig:
        prefill, decode = rig.prefill[0], rig.decode[0]
        sidecar = Sidecar(
            *("--disagg", "on", "--kv-connector", ours),
            *("--prefill", prefill.address, "--prefill-side-channel-port", str(prefill.side_channel_port)),
            *("--model-server-port", str(decode.port)),
            *("--local-side-channel", f"{HOST}:{decode.side_channel_port}"),
        )
        try:
            answer = ask(sidecar, COMPLETIONS, request_body(COMPLETIONS, prompt(300)))
            assert answer.decision == f"remote; prefill={prefill.address}"
            p_listens, p_connections = sockets(prefill)
            d_listens, d_connections = sockets(decode)
        finally:
            sidecar.kill()
    opened_by_decode = {remote for _, remote in d_connections if remote in p_listens}
    opened_by_prefill = {remote for _, remote in p_connections if remote in d_listens}
    assert opened_by_decode & set(DATA), "no data connection: is the variable still read?"
    assert opened_by_decode <= {*DATA, prefill.port, prefill.side_channel_port}
    # Prefill that pushes has asked decode's side channel, and closed that connection by now or not.
    assert opened_by_prefill <= ({decode.side_channel_port} if ours == "nixl-push" else set())
