"""The peer that a leg may fetch KV from: its rank by its port; none where it is not allowed, or means another."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from sidecar.decision.guards import Kind
from sidecar.edge.source import HEADER, for_decode, for_prefill, kv_source
from sidecar.prefill.address import Address
from sidecar.prefill.endpoints import Endpoint

SETTINGS: dict[str, Any] = {
    "port": 8000,
    "data_parallel_size": 4,
    "p2p_connector_port": 7777,
    "enable_p2p_pull": "on",
    "prefill_from_decode": "off",
}
OWN = Address("10.0.0.9", 7777)


def source(*values: bytes, allowed: bool = True, kind: Kind = Kind.REMOTE, **settings: Any) -> Address | None:
    endpoints = SimpleNamespace(admits_host=lambda _host, _port: allowed)
    service: Any = SimpleNamespace(
        p2p=SimpleNamespace(own=OWN), endpoints=endpoints, settings=SimpleNamespace(**SETTINGS | settings)
    )
    request: Any = SimpleNamespace(read={HEADER: list(values)} if values else {})
    return kv_source(service, request, kind)


@pytest.mark.parametrize(
    ("named", "port"),
    [
        (b"10.0.0.5:8000", 7777),
        (b"10.0.0.5:8001", 7778),
        (b"10.0.0.5:8003", 7780),
        (b"10.0.0.5:8004", 7777),  # no rank of a pod like ours
        (b"10.0.0.5:7999", 7777),
        (b"10.0.0.5:80", 7777),
    ],
)
def test_rank_of_a_peer(named: bytes, port: int) -> None:
    assert source(named) == Address("10.0.0.5", port)


def test_one_rank() -> None:
    assert source(b"10.0.0.5:8001", data_parallel_size=1) == Address("10.0.0.5", 7777)


def test_none() -> None:
    assert source() is None
    assert source(b"no address") is None
    assert source(b"10.0.0.5") is None
    assert source(b"10.0.0.5:8000", allowed=False) is None


def test_decode_for_a_remote_prefill_alone() -> None:
    assert source(prefill_from_decode="on") == OWN
    assert source(prefill_from_decode="on", kind=Kind.LOCAL) is None
    assert source(b"10.0.0.5:8000", prefill_from_decode="on") == Address("10.0.0.5", 7777)
    assert source(b"10.0.0.5:8000", prefill_from_decode="on", enable_p2p_pull="off") == OWN


SERVICE: Any = SimpleNamespace(p2p=SimpleNamespace(own=OWN), settings=SimpleNamespace(**SETTINGS))


@pytest.mark.parametrize(
    ("endpoint", "source", "fetches"),
    [
        ("10.0.0.5", Address("10.0.0.9", 7777), True),
        ("10.0.0.5", Address("10.0.0.5", 7777), False),  # itself
        ("127.0.0.1", Address("127.0.0.1", 7778), True),  # two engines of one machine
        ("127.0.0.1", Address("127.0.0.1", 7777), False),
        ("10.0.0.5", Address("127.0.0.1", 7777), False),  # would dial itself
        ("10.0.0.5", Address("localhost", 7777), False),
        ("10.0.0.5", Address("0.0.0.0", 7777), False),
        ("10.0.0.5", None, False),
    ],
)
def test_prefill(endpoint: str, source: Address | None, fetches: bool) -> None:
    params = for_prefill(b'{"a":1}', source, Endpoint(Address(endpoint, 8000), configured=True), SERVICE)
    assert ("remote_kv_source" in json.loads(params)) is fetches
    assert json.loads(params)["a"] == 1


def test_decode() -> None:
    assert for_decode(None, SERVICE) is None
    assert for_decode(OWN, SERVICE) is None
    named = json.loads(for_decode(Address("10.0.0.5", 7777), SERVICE) or b"")["remote_kv_source"]
    assert (named["remote_host"], named["remote_port"]) == ("10.0.0.5", 7777)
