"""The first events of a stream: an error among them means that the KV could not be loaded."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sidecar.exchange.apis import APIS, CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES, Api
from sidecar.exchange.peek import MAX_PEEK_BYTES, FirstEvents, Verdict

CREATED = (
    b'event: response.created\ndata: {"response":{"id":"resp_1","instructions":"%b"},"type":"response.created"}\n\n'
)
IN_PROGRESS = b'event: response.in_progress\ndata: {"type":"response.in_progress"}\n\n'
ITEM = b'event: response.output_item.added\ndata: {"type":"response.output_item.added"}\n\n'
FAILED = b'event: response.failed\ndata: {"type":"response.failed"}\n\n'
CHUNK = b'data: {"id":"cmpl-1","object":"text_completion","choices":[{"text":" a"}]}\n\n'
ERROR = b'data: {"error": {"message": "Internal server error", "type": "InternalServerError", "code": 500}}\n\n'
OLD_ERROR = b'data: {"object":"error","message":"Internal server error","code":500}\n\n'
MESSAGES_ERROR = b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"x"}}\n\n'
MESSAGE_START = b'event: message_start\ndata: {"type":"message_start","message":{}}\n\n'
CHAT_ROLE = b'data: {"id":"x","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"

STREAMS: list[tuple[Api, bytes, Verdict]] = [
    (COMPLETIONS, CHUNK + DONE, Verdict.GOOD),
    (COMPLETIONS, ERROR + DONE, Verdict.ERROR),
    (CHAT, ERROR.replace(b"\n", b"\r\n") + DONE, Verdict.ERROR),
    (CHAT, CHUNK.replace(b"\n", b"\r\n"), Verdict.GOOD),
    (CHAT, OLD_ERROR, Verdict.ERROR),
    (CHAT, CHUNK + ERROR, Verdict.GOOD),
    (CHAT, COMMENT + COMMENT + ERROR, Verdict.ERROR),
    (CHAT, COMMENT + CHUNK, Verdict.GOOD),
    (CHAT, COMMENT, Verdict.UNDECIDED),
    (CHAT, b"", Verdict.UNDECIDED),
    (CHAT, CHUNK[:-1], Verdict.UNDECIDED),
    (CHAT, ERROR[:-1], Verdict.UNDECIDED),
    (CHAT, DONE, Verdict.GOOD),
    (CHAT, b'data:{"error":{}}\n\n', Verdict.ERROR),
    (CHAT, b'id: 1\ndata: {"error":{}}\n\n', Verdict.ERROR),
    (CHAT, b'data: {"errors":[]}\n\n', Verdict.GOOD),
    (CHAT, b'data: {"choices":[{"delta":{"content":"{\\"error\\":1}"}}]}\n\n', Verdict.GOOD),
    (MESSAGES, MESSAGES_ERROR, Verdict.ERROR),
    (MESSAGES, MESSAGE_START + MESSAGES_ERROR, Verdict.ERROR),
    (MESSAGES, MESSAGE_START, Verdict.UNDECIDED),
    (CHAT, CHAT_ROLE, Verdict.UNDECIDED),
    (CHAT, CHAT_ROLE + ERROR, Verdict.ERROR),
    (CHAT, CHAT_ROLE + CHAT_ROLE.replace(b'"content":""', b'"content":"x"'), Verdict.GOOD),
    (RESPONSES, CREATED % b"" + IN_PROGRESS + ITEM, Verdict.GOOD),
    (RESPONSES, CREATED % b"" + IN_PROGRESS + FAILED, Verdict.ERROR),
    (RESPONSES, CREATED % b"" + IN_PROGRESS + ERROR, Verdict.ERROR),
    (RESPONSES, CREATED % b"" + IN_PROGRESS + b'event: error\ndata: {"type":"error"}\n\n', Verdict.ERROR),
    (RESPONSES, CREATED % b"" + IN_PROGRESS, Verdict.UNDECIDED),
    (RESPONSES, CREATED % (b"x" * 150_000) + ERROR, Verdict.ERROR),
    (RESPONSES, CREATED % (b"x" * 150_000) + ITEM, Verdict.GOOD),
    (RESPONSES, (CREATED % (b"y" * 150_000)).replace(b"\n", b"\r\n") + ERROR, Verdict.ERROR),
    (CHAT, CREATED % b"", Verdict.GOOD),
    (GENERATE, ERROR, Verdict.ERROR),
    (CHAT, b"x" * (MAX_PEEK_BYTES + 1), Verdict.GOOD),
]


def verdict(api: Api, pieces: list[bytes]) -> Verdict:
    """The first verdict, as the leg takes it."""
    events = FirstEvents(api)
    for piece in pieces:
        if (found := events.feed(piece)) is not Verdict.UNDECIDED:
            return found
    return Verdict.UNDECIDED


@pytest.mark.parametrize(("api", "stream", "expected"), STREAMS, ids=lambda value: repr(value)[:40])
def test_verdicts(api: Api, stream: bytes, expected: Verdict) -> None:
    assert verdict(api, [stream]) is expected


@settings(max_examples=200, deadline=None, database=None)
@given(st.sampled_from(STREAMS), st.lists(st.integers(0, 400_000), max_size=12))
@example(STREAMS[24], list(range(0, 160_000, 1000)))
def test_cuts_make_no_difference(stream: tuple[Api, bytes, Verdict], at: list[int]) -> None:
    api, body, expected = stream
    places = sorted({place % (len(body) + 1) for place in at})
    pieces = [body[a:b] for a, b in zip([0, *places], [*places, len(body)], strict=True)]
    assert verdict(api, pieces) is expected


@pytest.mark.parametrize(
    ("api", "stream", "expected"),
    [one for one in STREAMS if len(one[1]) < 1000],
    ids=lambda value: repr(value)[:40],
)
def test_byte_by_byte(api: Api, stream: bytes, expected: Verdict) -> None:
    assert verdict(api, [stream[at : at + 1] for at in range(len(stream))]) is expected


@pytest.mark.parametrize("api", APIS.values(), ids=lambda api: api.name)
def test_a_stream_that_says_nothing_is_not_held_for_ever(api: Api) -> None:
    events = FirstEvents(api)
    held = 0
    while events.feed(b"data: x" * 100) is Verdict.UNDECIDED:
        held += 700
        assert held <= MAX_PEEK_BYTES


def test_endless_comments_take_no_memory() -> None:
    events = FirstEvents(CHAT)
    for _ in range(10_000):
        assert events.feed(COMMENT) is Verdict.UNDECIDED
    assert len(events._buffer) < 100
