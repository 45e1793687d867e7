"""A scrape in pieces is the same scrape, and no piece is long."""

from __future__ import annotations

import time

import pytest
from prometheus_client.exposition import choose_encoder

from sidecar.admin.exposition import SAMPLES_AT_ONCE, pieces
from sidecar.admin.observer import Observer
from sidecar.exchange.budget import Budget
from sidecar.prefill.address import Address, AllowList
from sidecar.prefill.endpoints import Endpoints

FORMATS = ("", "text/plain;version=1.0.0;escaping=allow-utf-8", "application/openmetrics-text; version=1.0.0")


def observer(endpoints: int) -> Observer:
    known = Endpoints([Address("p", port + 1) for port in range(endpoints)], AllowList([]), time.monotonic)
    made = Observer(known, Budget(1, 0))
    for status in range(200, 450):
        made.requests.add(("chat", "remote", "on", str(status)))
    for decision in ("local", "remote"):
        made.ttft.observe((decision,), 0.2, "4bf92f3577b34da6a3ce929d0e0e4736")
    return made


@pytest.mark.parametrize("accept", FORMATS)
@pytest.mark.parametrize("endpoints", [0, 1, SAMPLES_AT_ONCE, 3 * SAMPLES_AT_ONCE + 1])
def test_the_pieces_are_the_whole(accept: str, endpoints: int) -> None:
    collection = observer(endpoints).collection
    encode, _ = choose_encoder(accept)
    assert b"".join(pieces(collection, encode)) == encode(collection)


@pytest.mark.parametrize("accept", FORMATS)
def test_no_piece_is_long(accept: str) -> None:
    encode, _ = choose_encoder(accept)
    for piece in pieces(observer(1500).collection, encode):
        samples = [line for line in piece.splitlines() if not line.startswith(b"#")]
        assert len(samples) < 2 * SAMPLES_AT_ONCE
