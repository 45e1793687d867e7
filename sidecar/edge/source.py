"""The peer from which a leg that computes may fetch a prefix of its prompt: the one that the gateway names
(`x-kv-cache-source-host-port`), else, for the prefill leg, the decode engine with the conversation so far.

A hint and no more: where it is malformed, not allowed or not there, the request goes its way without it.
"""

import secrets

from sidecar.connectors.offloading import with_kv_source
from sidecar.decision.guards import Kind
from sidecar.edge.request import Request
from sidecar.edge.service import Service
from sidecar.prefill.address import Address, BadAddress, is_loopback_or_unspecified, parse
from sidecar.prefill.endpoints import Endpoint

HEADER = b"x-kv-cache-source-host-port"


def kv_source(service: Service, request: Request, kind: Kind) -> Address | None:
    """The P2P channel of the peer, if it may be contacted. The gateway knows the pod's serving port alone: it tells
    the rank, in a pod whose ranks are served where ours are, and nothing else."""
    settings, p2p = service.settings, service.p2p
    if p2p is None:
        return None
    values = request.read.get(HEADER)
    if values and settings.enable_p2p_pull == "on":
        return _named(service, values[0])
    return p2p.own if settings.prefill_from_decode == "on" and kind is Kind.REMOTE else None


def _named(service: Service, value: bytes) -> Address | None:
    try:
        named = parse(value.decode("ascii"))
    except (BadAddress, UnicodeDecodeError):
        return None
    if not service.endpoints.admits_host(named.host, named.port):
        return None
    settings = service.settings
    rank = named.port - settings.port
    if not 0 <= rank < settings.data_parallel_size:
        rank = 0
    return Address(named.host, settings.p2p_connector_port + rank)


def for_prefill(params: bytes, source: Address | None, endpoint: Endpoint, service: Service) -> bytes:
    """`params` of a prefill leg, with the peer from which it may fetch."""
    if source is None:
        return params
    first = service.settings.p2p_connector_port
    itself = source.host in endpoint.hosts and first <= source.port < first + max(endpoint.facts.ranks, 1)
    # A loopback address means this pod to us, and another one to a prefill engine elsewhere.
    elsewhere = is_loopback_or_unspecified(source.host) and not is_loopback_or_unspecified(endpoint.address.host)
    return params if itself or elsewhere else _fetching(params, source)


def for_decode(source: Address | None, service: Service) -> bytes | None:
    """`kv_transfer_params` of a decode leg without a handoff, None for none."""
    if source is None or service.p2p is None or source == service.p2p.own:
        return None
    return _fetching(b"", source)


def _fetching(params: bytes, source: Address) -> bytes:
    return with_kv_source(params, secrets.token_hex(16), source.host, source.port)
