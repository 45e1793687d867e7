"""Our own answers: one shape for all, worded by the failure table."""

import json

import httptools
import pytest

from sidecar.edge import errors
from sidecar.exchange.apis import APIS, MESSAGES, RESPONSES, Api
from sidecar.exchange.failures import ROWS, TABLE, Row, Stage

ANSWERED = [row for row in ROWS if row.status]
KINDS = [None, *APIS.values()]


class Parsed:
    """An answer as a client's parser sees it."""

    def __init__(self, raw: bytes) -> None:
        self.headers: dict[str, str] = {}
        self.body = b""
        self.complete = False
        self.reason = b""
        self._parser = httptools.HttpResponseParser(self)
        self._parser.feed_data(raw)
        self.status = self._parser.get_status_code()

    def on_status(self, reason: bytes) -> None:
        self.reason = reason

    def on_header(self, name: bytes, value: bytes) -> None:
        assert name.decode() not in self.headers
        self.headers[name.decode()] = value.decode()

    def on_body(self, piece: bytes) -> None:
        self.body += piece

    def on_message_complete(self) -> None:
        self.complete = True
        self.keep_alive = self._parser.should_keep_alive()


@pytest.mark.parametrize("row", ANSWERED, ids=lambda row: row.reason)
@pytest.mark.parametrize("api", KINDS, ids=lambda api: api.name if api else "none")
def test_answers(row: Row, api: Api | None) -> None:
    answer = Parsed(errors.answer(row, "10.0.0.5:8000: gone", api, b"x-request-id: 1\r\n", close=False))
    assert answer.complete
    assert answer.status == row.status
    assert answer.reason
    assert answer.keep_alive
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"] == "1"
    assert answer.headers.get("retry-after") == (str(row.retry_after_s) if row.retry_after_s else None)
    content = json.loads(answer.body)
    error = content["error"]
    assert error["code"] == row.status
    assert (error["stage"], error["reason"]) == (row.stage, row.reason)
    assert error["message"] == f"{row.message} (10.0.0.5:8000: gone)"
    assert error["type"]
    assert error["param"] is None
    assert ("type" in content) is (api is MESSAGES)


def test_without_detail() -> None:
    row = TABLE[Stage.PREFILL, "timeout"]
    answer = Parsed(errors.answer(row, "", None, b"", close=True))
    assert json.loads(answer.body)["error"]["message"] == row.message
    assert answer.headers["connection"] == "close"
    assert not answer.keep_alive


def test_details_cannot_break_out_of_the_body() -> None:
    nasty = 'a"\r\n\r\nHTTP/1.1 200 OK\r\n\ud83d'.encode("utf-8", "replace").decode()
    answer = Parsed(errors.answer(TABLE[Stage.READING, "bad_target"], nasty, None, b"", close=False))
    assert nasty in json.loads(answer.body)["error"]["message"]


def test_head_requests_get_no_body() -> None:
    whole = errors.answer(TABLE[Stage.DECODE, "refused"], "", None, b"", close=False)
    head = errors.answer(TABLE[Stage.DECODE, "refused"], "", None, b"", close=False, head_only=True)
    assert head.endswith(b"\r\n\r\n")
    assert whole.startswith(head)
    assert b"content-length: 0" not in head, "the length is that of the body which a GET would get"


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("row", [row for row in ROWS if row.stage is Stage.STREAMING], ids=lambda row: row.reason)
@pytest.mark.parametrize("api", KINDS, ids=lambda api: api.name if api else "none")
def test_event(row: Row, api: Api | None, partial: bool) -> None:
    """Case 24: an error event and no [DONE]."""
    event = errors.event(row, api, after_partial_event=partial)
    assert event.startswith(b"\n\n") is partial
    assert event.endswith(b"\n\n")
    text = event.strip(b"\n")
    assert b"\n\n" not in text
    assert b"[DONE]" not in text
    fields = dict(line.split(b": ", 1) for line in text.split(b"\n"))
    content = json.loads(fields[b"data"])
    if api is RESPONSES:
        assert fields[b"event"] == b"error"
        assert content["type"] == "error"
        error = content
    else:
        error = content["error"]
        assert (b"event" in fields) is (api is MESSAGES)
    assert (error["reason"], error["stage"]) == (row.reason, row.stage)
    assert error["message"] == row.message
