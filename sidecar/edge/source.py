"""The peer from which a leg that computes may fetch a prefix of its prompt (`x-kv-cache-source-host-port`).

A hint and no more: where it is malformed, not allowed or not there, the request goes its way without it.
"""

import secrets

from sidecar.connectors.offloading import with_kv_source
from sidecar.edge.request import Request
from sidecar.edge.service import Service
from sidecar.prefill.address import Address, BadAddress, parse

HEADER = b"x-kv-cache-source-host-port"


def kv_source(service: Service, request: Request) -> Address | None:
    """The P2P channel of the peer that the header names, if it may be contacted. The gateway knows the pod's
    serving port alone: it tells the rank, in a pod whose ranks are served where ours are, and nothing else."""
    values = request.read.get(HEADER)
    if not values or service.p2p is None:
        return None
    try:
        named = parse(values[0].decode("ascii"))
    except (BadAddress, UnicodeDecodeError):
        return None
    if not service.endpoints.admits_host(named.host, named.port):
        return None
    settings = service.settings
    rank = named.port - settings.port
    if not 0 <= rank < settings.data_parallel_size:
        rank = 0
    return Address(named.host, settings.p2p_connector_port + rank)


def fetching(params: bytes, source: Address) -> bytes:
    """`params` (b"": none) of a leg that may fetch from `source`."""
    return with_kv_source(params, secrets.token_hex(16), source.host, source.port)
