"""The cached-token count is corrected in place: same length, whatever the cuts, and nothing else is touched."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sidecar.exchange.apis import APIS, CHAT, COMPLETIONS, MESSAGES, RESPONSES, Api
from sidecar.exchange.usage import CachedTokens

# As vLLM 0.32 writes them: compact in SSE, with pydantic's separators in JSON.
CHAT_JSON = (
    b'{"id":"chatcmpl-1","choices":[{"index":0,"message":{"role":"assistant","content":"hi"}}],"usage":'
    b'{"prompt_tokens":833,"total_tokens":843,"completion_tokens":10,"prompt_tokens_details":{"cached_tokens":833}}}'
)
CHAT_SSE = (
    b'data: {"id":"1","choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
    b'data: {"id":"1","choices":[],"usage":{"prompt_tokens":833,"prompt_tokens_details":{"cached_tokens":833}}}\n\n'
    b"data: [DONE]\n\n"
)
RESPONSES_SSE = (
    b'event: response.completed\ndata: {"response":{"usage":{"input_tokens":833,"input_tokens_details":'
    b'{"cached_tokens":833,"input_tokens_per_turn":[]},"output_tokens":10}},"type":"response.completed"}\n\n'
)
MESSAGES_SSE = (
    b'event: message_start\ndata: {"type":"message_start","message":{"usage":{"input_tokens":0,"output_tokens":0,'
    b'"cache_read_input_tokens":833}}}\n\nevent: message_delta\ndata: {"type":"message_delta","usage":'
    b'{"input_tokens":1,"output_tokens":10,"cache_read_input_tokens": 832}}\n\n'
)
ANSWERS: list[tuple[Api, bytes]] = [
    (CHAT, CHAT_JSON),
    (CHAT, CHAT_SSE),
    (COMPLETIONS, CHAT_SSE),
    (RESPONSES, RESPONSES_SSE),
    (MESSAGES, MESSAGES_SSE),
]


def whole(api: Api, cached: int, pieces: list[bytes]) -> bytes:
    correct = CachedTokens(api, cached)
    return b"".join([*map(correct.feed, pieces), correct.flush()])


def cut(data: bytes, at: list[int]) -> list[bytes]:
    places = sorted({place % (len(data) + 1) for place in at})
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


@pytest.mark.parametrize(("api", "answer"), ANSWERS)
@pytest.mark.parametrize("cached", [0, 7, 768, 832, 833])
def test_count_is_replaced(api: Api, answer: bytes, cached: int) -> None:
    out = whole(api, cached, [answer])
    name = api.cached_tokens
    assert len(out) == len(answer)
    assert out.count(name + b"%d" % cached) + out.count(name + b" %d" % cached) == answer.count(name)
    documents = [line.removeprefix(b"data: ") for line in out.split(b"\n") if line[:1] != b"e" and b"{" in line]
    for document in documents:
        json.loads(document)  # still JSON: white space may follow a number


@pytest.mark.parametrize(("api", "answer"), ANSWERS)
def test_only_the_counts_bytes_change(api: Api, answer: bytes) -> None:
    out = whole(api, 5, [answer])
    changed = [at for at, (a, b) in enumerate(zip(answer, out, strict=True)) if a != b]
    spans = [at + len(api.cached_tokens) for at in range(len(answer)) if answer.startswith(api.cached_tokens, at)]
    assert changed
    assert all(any(span <= at < span + 4 for span in spans) for at in changed)


@settings(max_examples=200, deadline=None, database=None)
@given(st.sampled_from(ANSWERS), st.lists(st.integers(0, 10_000), max_size=12), st.integers(0, 1000))
@example(ANSWERS[1], list(range(400)), 7)
@example(ANSWERS[4], list(range(400)), 7)
def test_cuts_make_no_difference(answer: tuple[Api, bytes], at: list[int], cached: int) -> None:
    api, body = answer
    assert whole(api, cached, cut(body, at)) == whole(api, cached, [body])


PARTS = (
    *(
        b'"cached_tokens":',
        b'"cached',
        b'_tokens":',
        b"8",
        b"33",
        b" ",
        b'"',
        b"}",
        b"\n\n",
        b"data: ",
        b".5",
        b"x",
    ),
    *(b"9" * 25, b"null", b"-1", b'"cached_tokens" :', b'\\"cached_tokens\\":7', b"1e3", b" " * 30),
)


@settings(max_examples=300, deadline=None, database=None)
@given(
    st.lists(
        st.sampled_from(PARTS),
        max_size=14,
    ),
    st.lists(st.integers(0, 400), max_size=6),
    st.integers(0, 12),
)
def test_nothing_is_lost_whatever_the_stream_holds(parts: list[bytes], at: list[int], cached: int) -> None:
    body = b"".join(parts)
    correct = CachedTokens(CHAT, cached)
    out = b""
    fed = 0
    for piece in cut(body, at):
        out += correct.feed(piece)
        fed += len(piece)
        assert fed - len(out) < 200, "held back without bound"
    out += correct.flush()
    assert len(out) == len(body)
    if body.count(b" ") < 90:
        assert out == whole(CHAT, cached, [body])
    if b'"cached_tokens":' not in body:
        assert out == body


@pytest.mark.parametrize(
    "value", [b"null", b'"833"', b"-833", b"12.5", b"1e3", b"9" * 25, b"{}", b"[833]", b"6", b"", b"true"]
)
def test_what_is_no_longer_count_is_left_alone(value: bytes) -> None:
    """7 does not fit into less, and a number must not be torn."""
    body = b'{"cached_tokens":' + value + b',"b":1}'
    for pieces in ([body], cut(body, list(range(len(body))))):
        out = whole(CHAT, 77 if value == b"6" else 7, pieces)
        assert out == body


def test_numbers_of_the_answers_text_are_left_alone() -> None:
    """Quotes inside a string are escaped, so the field's name cannot stand there."""
    body = json.dumps({"content": 'usage: {"cached_tokens":833}', "args": '{"cached_tokens": 12}'}).encode()
    assert whole(CHAT, 7, [body]) == body


def test_other_apis_names_are_left_alone() -> None:
    assert whole(MESSAGES, 7, [CHAT_JSON]) == CHAT_JSON
    assert whole(CHAT, 7, [MESSAGES_SSE]) == MESSAGES_SSE


def test_correcting_twice_is_correcting_once() -> None:
    once = whole(CHAT, 7, [CHAT_SSE])
    assert whole(CHAT, 7, [once]) == once


def test_events_are_not_held_back() -> None:
    """A complete event leaves in the piece in which it came (case 25)."""
    correct = CachedTokens(CHAT, 7)
    for event in CHAT_SSE.split(b"\n\n"):
        assert len(correct.feed(event + b"\n\n")) == len(event) + 2


@pytest.mark.parametrize("api", APIS.values(), ids=lambda api: api.name)
def test_every_api_names_its_field(api: Api) -> None:
    assert api.cached_tokens.startswith(b'"')
    assert api.cached_tokens.endswith(b'":')
