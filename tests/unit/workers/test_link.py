"""Framing between hub and worker."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sidecar.workers.link import Link
from sidecar.workers.messages import NoKv, ToWorker


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.sent = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


def link(received: Any, lost: Any = lambda: None) -> tuple[Link[Any], Wire]:
    one: Link[Any] = Link(msgspec.msgpack.Decoder(ToWorker), received, lost)
    wire = Wire()
    one.connection_made(wire)  # type: ignore[arg-type]
    return one, wire


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_frames(step: int) -> None:
    heard: list[Any] = []
    sender, wire = link(None)
    for number in range(20):
        sender.send(NoKv(number, number))
    receiver, _ = link(heard.append)
    for start in range(0, len(wire.sent), step):
        receiver.data_received(wire.sent[start : start + step])
    assert heard == [NoKv(number, number) for number in range(20)]


def test_one_bad_message_does_not_end_it(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Any] = []
    sender, wire = link(None)
    sender.send(NoKv(1, 1))
    receiver, _ = link(heard.append)
    receiver.data_received(b"\x01\x00\x00\x00\xc1" + wire.sent)
    assert heard == [NoKv(1, 1)]
    assert "a message between hub and worker" in caplog.text


def test_nonsense_ends_it() -> None:
    receiver, wire = link(None)
    receiver.data_received(b"\xff\xff\xff\xff")
    assert wire.closed


def test_nobody_there() -> None:
    gone: list[int] = []
    one, wire = link(None, lambda: gone.append(1))
    one.connection_lost(None)
    one.send(NoKv(1, 1))
    assert gone == [1]
    assert not wire.sent
