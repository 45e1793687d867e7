"""What the hub sends is what the worker reads."""

from __future__ import annotations

import msgspec

from sidecar.connectors.connector import EngineFacts
from sidecar.decision.signals import Load
from sidecar.settings import Settings
from sidecar.workers import messages


def sent(message: messages.ToWorker) -> messages.ToWorker:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=messages.ToWorker)


def test_load() -> None:
    message = messages.Load(1, Load(3, 2, frozenset({"a", "b"}), 12345), 7.5)
    assert sent(message) == message


def test_settings() -> None:
    settings = Settings(workers=3, prefill=["10.0.0.1:8000"], disagg="on", drain_timeout=1.5)
    message = messages.Welcome(3, settings, 2**63 + 1, 9)
    assert sent(message) == message


def test_clean_breakers_and_endpoints_that_were_always_there() -> None:
    place = messages.Place("10.0.0.1", 8000)
    facts = EngineFacts(16, 100, "engine", 2)
    message = messages.News(place, False, "", facts, float("-inf"), 0, (0, 0, 1.0, 0.0), 0, [(1, 2, 3.0)], 4)
    assert sent(message) == message
