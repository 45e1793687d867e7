"""KV connectors: each one is data and a few functions, never a code path of its own.

What a connector adds to the prefill body, what it reads from the prefill answer and what it adds to the decode
body stands here. Caps, retries, deadlines, metrics and aborts are written once, elsewhere.
"""

from sidecar.connectors.connector import Connector
from sidecar.connectors.mooncake import MOONCAKE
from sidecar.connectors.nixl import NIXL_PUSH, NIXLV2
from sidecar.connectors.none import NONE
from sidecar.connectors.offloading import OFFLOADING
from sidecar.connectors.store import LMCACHE, SHARED_STORAGE

CONNECTORS: dict[str, Connector] = {
    connector.name: connector
    for connector in (NIXLV2, NIXL_PUSH, OFFLOADING, MOONCAKE, SHARED_STORAGE, LMCACHE, NONE)
}

__all__ = ["CONNECTORS", "Connector"]
