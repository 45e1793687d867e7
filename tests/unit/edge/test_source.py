"""The peer that a header names as a source of KV: its rank by its port, and none where it is not allowed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sidecar.edge.source import HEADER, kv_source
from sidecar.prefill.address import Address

SETTINGS = {"port": 8000, "data_parallel_size": 4, "p2p_connector_port": 7777}


def source(*values: bytes, allowed: bool = True, **settings: int) -> Address | None:
    endpoints = SimpleNamespace(admits_host=lambda _host, _port: allowed)
    service: Any = SimpleNamespace(
        p2p=object(), endpoints=endpoints, settings=SimpleNamespace(**SETTINGS | settings)
    )
    request: Any = SimpleNamespace(read={HEADER: list(values)} if values else {})
    return kv_source(service, request)


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
