"""What a connection makes of the bytes of an answer, however they are cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sidecar.edge.engine import MAX_HEAD_BYTES, EngineConnection

if TYPE_CHECKING:
    from sidecar.edge.head import Head

ANSWER = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A: 1\r\n\r\n2\r\nok\r\n"
TRAILERS = b"0\r\nX-Sum: 1\r\nx-other:   two words\r\n\r\n"


class Pool:
    def __init__(self) -> None:
        self.idle = 0

    def put_back(self, _connection: EngineConnection) -> None:
        self.idle += 1

    def forget(self, _connection: EngineConnection) -> None:
        pass


class Transport:
    def get_extra_info(self, _name: str) -> None:
        return None

    def writelines(self, _parts: object) -> None:
        pass

    def abort(self) -> None:
        pass


class Leg:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.heads: list[Head] = []
        self.raw = b""
        self.ended = False
        self.fault = ""

    def head(self, head: Head) -> None:
        self.heads.append(head)

    def data(self, raw: bytes, _pieces: object, last: bool) -> None:
        self.raw += raw
        self.ended = last

    def failed(self, fault: str, _detail: str, _untouched: bool) -> None:
        self.fault = fault


def asked() -> tuple[EngineConnection, Leg, Pool]:
    """A connection with a request on it."""
    pool, leg = Pool(), Leg()
    connection = EngineConnection(pool)  # type: ignore[arg-type]
    transport: Any = Transport()
    connection.connection_made(transport)
    connection.send(leg, (b"GET / HTTP/1.1\r\n\r\n",))  # type: ignore[arg-type]
    return connection, leg, pool


@pytest.mark.parametrize("cut", range(len(ANSWER), len(ANSWER + TRAILERS) + 1))
def test_trailers_are_known_wherever_they_are_cut_and_are_no_headers(cut: int) -> None:
    connection, leg, pool = asked()
    for piece in ((ANSWER + TRAILERS)[:cut], (ANSWER + TRAILERS)[cut:]):
        if piece:
            connection.data_received(piece)
    (head,) = leg.heads
    assert head.headers == [(b"Transfer-Encoding", b"chunked"), (b"X-A", b"1")]
    assert head.trailers == [(b"X-Sum", b"1"), (b"x-other", b"two words")]
    assert leg.ended
    assert pool.idle == 1


def test_the_trailers_of_one_answer_are_not_those_of_the_next() -> None:
    connection, leg, _ = asked()
    connection.data_received(ANSWER + TRAILERS)
    connection.send(leg, (b"GET / HTTP/1.1\r\n\r\n",))  # type: ignore[arg-type]
    connection.data_received(ANSWER + b"0\r\n\r\n")
    assert [len(head.trailers) for head in leg.heads] == [2, 0]


def test_endless_trailers_are_no_answer() -> None:
    connection, leg, pool = asked()
    connection.data_received(ANSWER + b"0\r\n")
    line = b"X-T: %b\r\n" % (b"y" * 1000)
    for _ in range(MAX_HEAD_BYTES // len(line) + 2):
        connection.data_received(line)
    assert leg.fault == "garbage"
    assert not pool.idle
