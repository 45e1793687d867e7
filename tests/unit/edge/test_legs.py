"""What a leg makes of a connection's faults before it has sent anything."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from sidecar.connectors.connector import Handoff
from sidecar.edge.head import Head
from sidecar.edge.legs import DecodeLeg
from sidecar.exchange.apis import APIS, Api
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


class Client:
    def __init__(self) -> None:
        self.writes: list[tuple[bytes, ...]] = []

    def write(self, parts: Sequence[bytes]) -> None:
        self.writes.append(tuple(parts))

    def must_close(self, _request: object) -> bool:
        return False


@pytest.fixture
def client() -> Client:
    return Client()


def relaying(client: Client, api: Api | None, handoff: Handoff | None) -> DecodeLeg:
    """One that relays whatever head comes."""
    runner: Any = SimpleNamespace(
        client=client,
        api=api,
        request=SimpleNamespace(http_1_0=False),
        write_head=lambda _head, **_framing: b"head;",
        first_byte=lambda: None,
        finish=lambda _pieces: None,
        decode_answered=lambda _head: leg.relay(),
    )
    leg = DecodeLeg(runner, (), handoff, streams_body=False)
    return leg


@pytest.fixture
def leg(client: Client) -> DecodeLeg:
    return relaying(client, None, None)


def head(*, with_more: bool) -> Head:
    made = Head(200, b"OK", [(b"transfer-encoding", b"chunked")], http_1_0=False)
    made.with_more = with_more
    return made


def test_head_and_body_that_came_together_go_out_in_one_write(leg: DecodeLeg, client: Client) -> None:
    leg.head(head(with_more=True))
    assert not client.writes
    leg.data(b"2\r\nok\r\n", (b"ok",), False)
    leg.data(b"0\r\n\r\n", (), True)
    assert client.writes == [(b"head;", b"2\r\nok\r\n"), (b"0\r\n\r\n",)]


@pytest.mark.parametrize("last", [False, True])
def test_a_head_with_nothing_to_write_behind_it_goes_out(leg: DecodeLeg, client: Client, last: bool) -> None:
    leg.head(head(with_more=True))
    leg.data(b"", (), last)
    assert client.writes == [(b"head;",)]


def test_a_head_alone_does_not_wait(leg: DecodeLeg, client: Client) -> None:
    leg.head(head(with_more=False))
    assert client.writes == [(b"head;",)]


def test_a_head_that_waits_is_among_the_last_words(leg: DecodeLeg) -> None:
    leg.head(head(with_more=True))
    assert leg.last_words(TABLE[Stage.DECODE, "reset"]) == b"head;"


def test_trailers_follow_an_answer_that_is_framed_anew(client: Client) -> None:
    """RFC 9112, 7.1.2: they stand behind the last chunk."""
    api = APIS[b"/v1/chat/completions"]
    leg = relaying(client, api, Handoff(params=b"{}", prompt_tokens=1, cached_tokens=7))
    answer = head(with_more=True)
    leg.head(answer)
    field = api.cached_tokens
    leg.data(b"", (b"{" + field,), False)
    leg.data(b"", (b"123",), False)
    answer.trailers += [(b"X-Sum", b"1"), (b"x-other", b"2")]
    leg.data(b"", (), True)
    written = b"".join([part for parts in client.writes for part in parts])
    assert written.endswith(b"\r\n0\r\nX-Sum: 1\r\nx-other: 2\r\n\r\n")
    assert b"123" in written
