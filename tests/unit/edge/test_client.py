"""A client's connection when the sidecar itself is at fault; what a client can do wrong is tests/integration's."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sidecar.edge import client
from sidecar.edge.client import ClientConnection
from sidecar.edge.request import Request
from sidecar.settings import Settings


class Transport:
    aborted = False

    def set_write_buffer_limits(self, high: int) -> None: ...

    def get_extra_info(self, _name: str) -> None:
        return None

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True


class BrokenRunner:
    def __init__(self, _service: object, _client: object, request: Request) -> None:
        self.request = request

    def start(self) -> None:
        raise RuntimeError("a bug")

    def client_left(self) -> None:
        raise AssertionError("the runner hears of it when the transport says so")


def test_bug_ends_the_connection_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The parser reports an exception in its callbacks as an error of parsing: it is no 400, and nobody waits."""
    monkeypatch.setattr(client, "Runner", BrokenRunner)
    refused: list[Any] = []
    service = SimpleNamespace(
        loop=asyncio.new_event_loop(),
        settings=Settings(),
        live=SimpleNamespace(draining=False),
        observer=SimpleNamespace(refused=refused.append),
    )
    connection = ClientConnection(cast("Any", service), set())
    transport = Transport()
    connection.connection_made(cast("Any", transport))
    with caplog.at_level(logging.ERROR):
        connection.data_received(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}")
    assert transport.aborted
    assert refused == []
    [record] = caplog.records
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "a bug"
    service.loop.close()
