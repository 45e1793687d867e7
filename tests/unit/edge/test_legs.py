"""What a leg makes of a connection's faults before it has sent anything."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sidecar.connectors.connector import Handoff
from sidecar.edge.legs import DecodeLeg
from sidecar.exchange.failures import TABLE, Stage


@pytest.mark.parametrize("handoff", [None, Handoff(params=b"{}", prompt_tokens=1)], ids=["local", "handoff"])
@pytest.mark.parametrize("fault", ["refused", "unreachable", "reset"])
def test_a_decode_engine_that_takes_no_request(fault: str, handoff: Handoff | None) -> None:
    """Accepted and closed in one breath: the handoff was not sent, and the table must have a row for it."""
    faults: list[str] = []
    runner: Any = SimpleNamespace(fault=lambda name, _detail: faults.append(name))
    DecodeLeg(runner, (), handoff, streams_body=False).failed(fault, "closed right after it was accepted", False)
    (told,) = faults
    assert (Stage.HANDOFF if handoff else Stage.DECODE, told) in TABLE
