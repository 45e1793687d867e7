"""A client's connection when the sidecar itself is at fault, and its deadlines; what a client can do wrong is
tests/integration's."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sidecar.edge import client
from sidecar.edge.client import ClientConnection
from sidecar.edge.request import Request
from sidecar.settings import Settings


class Transport:
    """One that closes once its peer has read what is in its buffer, which no test does."""

    aborted = closing = half_closed = False
    written = b""

    @staticmethod
    def written_all() -> None: ...

    def set_write_buffer_limits(self, high: int) -> None: ...

    def get_extra_info(self, _name: str) -> None:
        return None

    def is_closing(self) -> bool:
        return self.aborted or self.closing

    def can_write_eof(self) -> bool:
        return True

    def resume_reading(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 1

    def write_eof(self) -> None:
        self.half_closed = True

    def writelines(self, parts: Sequence[bytes]) -> None:
        self.written += b"".join(parts)
        self.written_all()

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.aborted = True


class BrokenRunner:
    def __init__(self, _service: object, _client: object, request: Request) -> None:
        self.request = request

    def start(self) -> None:
        raise RuntimeError("a bug")

    def client_left(self) -> None:
        raise AssertionError("the runner hears of it when the transport says so")


class IdleRunner:
    def __init__(self, _service: object, _client: object, request: Request) -> None:
        self.request = request

    def start(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def body_piece(self, data: bytes) -> None: ...

    def body_end(self, trailers: bytes) -> None: ...

    def client_left(self) -> None: ...


def make_service() -> Any:
    return SimpleNamespace(
        loop=asyncio.new_event_loop(),
        settings=Settings(),
        live=SimpleNamespace(draining=False),
        observer=SimpleNamespace(refused=lambda _row: None),
    )


@pytest.mark.parametrize("reads", [True, False], ids=["slowly", "no further"])
def test_client_that_reads_the_end_of_its_answer(monkeypatch: pytest.MonkeyPatch, reads: bool) -> None:
    """What is under way has no deadline of its own, and what is over always has one."""
    monkeypatch.setattr(client, "Runner", IdleRunner)
    service = make_service()
    connection, transport = ClientConnection(service, set()), Transport()
    connection.connection_made(cast("Any", transport))
    connection.data_received(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}")
    assert connection.deadline == 0.0
    connection.pause_writing()
    assert connection.deadline
    connection.resume_writing()
    assert connection.deadline == 0.0
    connection.pause_writing()
    connection.answered(connection._runner.request)  # type: ignore[union-attr]
    if reads:
        connection.resume_writing()
    assert connection.deadline
    connection.overdue()
    assert transport.closing
    assert connection.deadline, "closing waits for what is still to be read"
    connection.overdue()
    assert transport.aborted
    service.loop.close()


def test_bug_ends_the_connection_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The parser reports an exception in its callbacks as an error of parsing: it is no 400, and nobody waits."""
    monkeypatch.setattr(client, "Runner", BrokenRunner)
    refused: list[Any] = []
    service = make_service()
    service.observer.refused = refused.append
    connection = ClientConnection(service, set())
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


REQUEST = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}"
STREAMED = b"POST /v1/audio HTTP/1.1\r\nhost: a\r\ncontent-type: audio/wav\r\ncontent-length: 2\r\n\r\n"


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ClientConnection, Transport]]:
    """A connection whose requests are answered when the test says so."""
    monkeypatch.setattr(client, "Runner", IdleRunner)
    service = make_service()
    connection, transport = ClientConnection(service, set()), Transport()
    connection.connection_made(cast("Any", transport))
    yield connection, transport
    service.loop.close()


def answer(connection: ClientConnection) -> None:
    assert connection._runner is not None
    connection.answered(connection._runner.request)


def last_answer(connection: ClientConnection) -> None:
    connection.close_when_answered()
    answer(connection)


def broken_off(connection: ClientConnection) -> None:
    connection.close_after_write(reset=False)
    answer(connection)


def half_closed(connection: ClientConnection) -> None:
    assert connection.eof_received() is None  # type: ignore[func-returns-value]
    connection.transport.close()  # type: ignore[union-attr]  # as transports do then


@pytest.mark.parametrize("ended", [last_answer, broken_off, half_closed])
@pytest.mark.parametrize("behind", [b"", b"POST", REQUEST], ids=["nothing more", "half a request", "a request"])
def test_client_that_does_not_read_the_end(
    connected: tuple[ClientConnection, Transport], ended: Callable[[ClientConnection], None], behind: bytes
) -> None:
    """What is written last may not fill the buffer, and would wait in it for ever."""
    connection, transport = connected
    connection.data_received(REQUEST + behind)
    ended(connection)
    assert transport.closing or transport.half_closed
    assert connection.deadline > connection._service.loop.time() + client.LINGER_S, "it may take its time"
    connection.overdue()
    assert transport.aborted


def test_refusal_for_a_client_that_does_not_read(connected: tuple[ClientConnection, Transport]) -> None:
    """It waits for the answer before it, though not for ever."""
    connection, transport = connected
    connection.data_received(REQUEST)
    connection.pause_writing()
    connection.data_received(b"POST / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n")
    answer(connection)
    assert transport.written == b""
    assert connection.deadline
    connection.overdue()
    assert transport.aborted


@pytest.mark.parametrize("head", [REQUEST[:-2], STREAMED], ids=["read", "streamed"])
def test_go_ahead_that_fills_the_buffer(connected: tuple[ClientConnection, Transport], head: bytes) -> None:
    """It is given once, and nothing begins before the client reads it."""
    connection, transport = connected
    transport.written_all = connection.pause_writing
    connection.data_received(head.replace(b"host: a", b"host: a\r\nexpect: 100-continue"))
    assert connection._runner is None
    transport.written_all = lambda: None
    connection.resume_writing()
    connection.data_received(b"{}")
    assert connection._runner is not None
    assert transport.written == b"HTTP/1.1 100 Continue\r\n\r\n"


def test_large_body_that_still_comes_after_a_refusal(connected: tuple[ClientConnection, Transport]) -> None:
    """It is thrown away, for the while that is meant for that, however slowly it comes."""
    connection, _ = connected
    connection.data_received(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\n\r\n{")
    connection.overdue()
    ends_at = connection.deadline
    connection.body_progressed()  # as its reader says
    assert connection.deadline == ends_at


def test_streamed_body_of_a_client_that_does_not_read(connected: tuple[ClientConnection, Transport]) -> None:
    """The engine may answer before the body's end. Whatever is late has its deadline: first the client's reading,
    then its body."""
    connection, transport = connected
    connection.data_received(STREAMED)
    connection.pause_writing()
    connection.resume_writing()
    assert connection.deadline, "the body is yet to come"
    connection.pause_writing()
    connection.data_received(b"{}")
    assert connection.deadline, "the answer is yet to be read"
    connection.resume_writing()
    assert connection.deadline == 0.0
    connection.pause_writing()
    connection.overdue()
    assert transport.aborted
