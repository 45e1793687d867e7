"""A request's head: what its fields mean, and what of them goes where."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.edge.request import ALWAYS_READ, MAX_FIELDS, MAX_HEAD_BYTES, Headers, Request
from sidecar.exchange.apis import APIS

HOST = (b"Host", b"sidecar")


def request(
    *headers: tuple[bytes, bytes],
    method: bytes = b"POST",
    target: bytes = b"/v1/completions",
    http_1_0: bool = False,
    host: bool = True,
) -> Request:
    fields: Headers = [*([HOST] if host else []), *headers]
    return Request(method, target, fields, http_1_0=http_1_0, started_at=0.0)


def fault(*headers: tuple[bytes, bytes], max_body_bytes: int = 1024, **more: object) -> str:
    refusal = request(*headers, **more).refusal(max_body_bytes)  # type: ignore[arg-type]
    return refusal[0].fault if refusal else ""


# -- the path --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"/v1/completions", b"/v1/completions"),
        (b"/v1/completions?a=b", b"/v1/completions"),
        (b"/v1/completions?", b"/v1/completions"),
        (b"/v1/completions#f", b"/v1/completions"),
        (b"/v1/completions?a=/../b#c", b"/v1/completions"),
        (b"/v1/%63ompletions", b"/v1/completions"),
        (b"/v1%2Fcompletions", b"/v1/completions"),
        (b"/v1%2fcompletion%73", b"/v1/completions"),
        (b"/v1/completions%3Fa", b"/v1/completions?a"),
        (b"/v1/completions%23", b"/v1/completions#"),
        (b"/v1/%2563ompletions", b"/v1/%63ompletions"),
        (b"/v1/completions%", b"/v1/completions%"),
        (b"/v1/completions%zz", b"/v1/completions%zz"),
        (b"http://sidecar/v1/completions", b"/v1/completions"),
        (b"http://sidecar:8000/v1/completions?x", b"/v1/completions"),
        (b"HTTP://sidecar/v1/completions", b"/v1/completions"),
        (b"https://user@sidecar/v1/%63ompletions", b"/v1/completions"),
        (b"http://sidecar", b"/"),
        (b"http://sidecar/", b"/"),
        (b"/", b"/"),
        (b"*", b"*"),
        (b"//v1/completions", b"//v1/completions"),
        (b"/v1//completions", b"/v1//completions"),
        (b"/v1/completions/", b"/v1/completions/"),
        (b"/V1/completions", b"/V1/completions"),
        (b"/v1/./completions", b"/v1/./completions"),
        (b"/v1/x/../completions", b"/v1/x/../completions"),
    ],
)
def test_path_is_what_the_engines_router_sees(target: bytes, path: bytes) -> None:
    assert request(target=target).path == path


def test_target_is_kept_as_it_came() -> None:
    target = b"http://sidecar/v1/%63ompletions?a=%2F#f"
    assert request(target=target).target == target


@pytest.mark.parametrize("char", [b"%0A", b"%0D", b"%00", b"%09", b"%7F", b"%1F", b"%0a"])
@pytest.mark.parametrize("path", [*APIS, b"/invocations", b"/metrics"])
def test_control_characters_in_the_path(path: bytes, char: bytes) -> None:
    """The engine's router takes `/invocations%0A` for `/invocations`."""
    for target in (path + char, char + path, path[:3] + char + path[3:]):
        assert fault(target=target) == "malformed"
    assert fault(target=path + b"?a=" + char) == ""


# -- refusals --------------------------------------------------------------------------------------------------

LENGTH = (b"content-length", b"5")
CHUNKED = (b"transfer-encoding", b"chunked")


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], ""),
        ([LENGTH], ""),
        ([CHUNKED], ""),
        ([(b"Transfer-Encoding", b" Chunked ")], ""),
        ([LENGTH, CHUNKED], "two_framings"),
        ([CHUNKED, (b"Content-LENGTH", b"0")], "two_framings"),
        ([(b"transfer-encoding", b"gzip, chunked")], "malformed"),
        ([(b"transfer-encoding", b"identity")], "malformed"),
        ([(b"transfer-encoding", b"")], "malformed"),
        ([CHUNKED, CHUNKED], "malformed"),
        ([(b"transfer-encoding", b"xchunked")], "malformed"),
        ([HOST], "malformed"),
        ([(b"HOST", b"other")], "malformed"),
        ([(b"expect", b"100-continue")], ""),
        ([(b"Expect", b"100-Continue")], ""),
        ([(b"expect", b"something")], "unknown_expectation"),
        ([(b"expect", b"100-continue"), (b"expect", b"100-continue")], "unknown_expectation"),
        ([(b"expect", b"")], "unknown_expectation"),
        ([(b"content-length", b"1024")], ""),
        ([(b"content-length", b"1025")], "too_large"),
        ([(b"content-length", b"9" * 18)], "too_large"),
        ([(b"content-length", b"0")], ""),
        ([(b"x-%d" % n, b"") for n in range(MAX_FIELDS - 1)], ""),
        ([(b"x-%d" % n, b"") for n in range(MAX_FIELDS)], "head_too_large"),
        ([(b"x", b"y" * (MAX_HEAD_BYTES - 100))], ""),
        ([(b"x", b"y" * MAX_HEAD_BYTES)], "head_too_large"),
        ([(b"x" * MAX_HEAD_BYTES, b"")], "head_too_large"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_refusals(headers: Headers, expected: str) -> None:
    assert fault(*headers) == expected


def test_long_target() -> None:
    assert fault(target=b"/" + b"a" * MAX_HEAD_BYTES) == "head_too_large"


def test_host_is_needed_in_http_1_1() -> None:
    assert fault(host=False) == "malformed"
    assert fault(host=False, http_1_0=True) == ""


def test_http_1_0_knows_no_chunks() -> None:
    assert fault(CHUNKED, http_1_0=True) == "two_framings"
    assert fault(LENGTH, http_1_0=True) == ""


def test_connect_is_not_served() -> None:
    assert fault(method=b"CONNECT", target=b"example.com:443") == "malformed"


# -- the body --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content_type", "target", "streamed"),
    [
        (b"multipart/form-data; boundary=x", b"/v1/audio/transcriptions", True),
        (b"Audio/WAV", b"/v1/audio", True),
        (b"application/octet-stream", b"/x", True),
        (b"image/png", b"/x", True),
        (b"video/mp4", b"/x", True),
        (b"application/json", b"/x", False),
        (b"text/plain", b"/x", False),
        (b"", b"/x", False),
        (b"application/x-www-form-urlencoded", b"/x", False),
    ],
)
def test_what_is_no_json_is_streamed(content_type: bytes, target: bytes, streamed: bool) -> None:
    assert request(LENGTH, (b"Content-Type", content_type), target=target).is_streamed is streamed
    assert not request((b"content-type", content_type), target=target).is_streamed, "there is no body"


def test_without_a_type_the_body_is_read() -> None:
    assert not request(LENGTH, target=b"/x").is_streamed


@pytest.mark.parametrize("path", ALWAYS_READ)
@pytest.mark.parametrize("prefix", [b"", b"/root", b"/a/b", b"http://sidecar", b"http://sidecar/root"])
@pytest.mark.parametrize("suffix", [b"", b"?a=b"])
def test_types_do_not_hide_what_the_engine_reads_as_json(path: bytes, prefix: bytes, suffix: bytes) -> None:
    """Also behind the engine's `--root-path`, and in any spelling."""
    for spelled in (path, path.replace(b"o", b"%6f"), path.replace(b"/", b"%2F", 1) if not prefix else path):
        for content_type in (b"multipart/form-data", b"application/octet-stream", b"audio/x"):
            one = request(CHUNKED, (b"content-type", content_type), target=prefix + spelled + suffix)
            assert one.is_always_read
            assert not one.is_streamed


def test_first_type_counts() -> None:
    types = ((b"content-type", b"application/json"), (b"content-type", b"audio/wav"))
    assert not request(LENGTH, *types, target=b"/x").is_streamed
    assert request(LENGTH, *reversed(types), target=b"/x").is_streamed


def test_framing_of_a_streamed_body() -> None:
    assert request(CHUNKED).own_framing() == b"transfer-encoding: chunked\r\n"
    assert request(LENGTH).own_framing() == b"content-length: 5\r\n"
    assert request(CHUNKED).is_chunked
    assert request(LENGTH).length == 5


def test_content_encodings_are_one_list() -> None:
    assert request((b"Content-Encoding", b"gzip"), (b"content-encoding", b"zstd")).content_encoding == b"gzip,zstd"
    assert request().content_encoding == b""


# -- the request id --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given_id", [b"a", b"A-z_0.9", b"x" * 128, b"3f2504e0-4f89-11d3-9a0c-0305e82c3301"])
def test_good_id_is_kept(given_id: bytes) -> None:
    assert request((b"X-Request-Id", given_id)).take_request_id() == given_id


@pytest.mark.parametrize(
    "given_id", [b"", b"a,b", b"a b", b"x" * 129, b"a\xff", b"a/b", b"a:b", b"a\n", b"\na", b"a;b", b'"a"', b" "]
)
def test_bad_id_is_replaced(given_id: bytes) -> None:
    """A comma in it breaks the renewal of leases; anything else unusual is not worth the risk."""
    made = request((b"x-request-id", given_id)).take_request_id()
    assert re.fullmatch(rb"[0-9a-f]{32}", made)


def test_id_is_the_same_at_every_call_and_differs_between_requests() -> None:
    """Case 13 wants each request to have one of its own."""
    one = request()
    assert one.take_request_id() == one.take_request_id()
    assert len({request().take_request_id() for _ in range(100)}) == 100


def test_first_of_several_ids() -> None:
    assert request((b"x-request-id", b"a"), (b"x-request-id", b"b")).take_request_id() == b"a"


# -- header blocks ---------------------------------------------------------------------------------------------

CLIENT: Headers = [
    (b"Authorization", b"Bearer k"),
    (b"User-Agent", b"curl/8"),
    (b"ACCEPT", b"*/*"),
    (b"Accept-Encoding", b"gzip"),
    (b"Content-Type", b"application/json"),
    (b"Content-Length", b"5"),
    (b"Cookie", b"a=b"),
    (b"Proxy-Authorization", b"Basic x"),
    (b"Proxy-Connection", b"keep-alive"),
    (b"Connection", b"keep-alive, X-Hop ,close"),
    (b"Keep-Alive", b"timeout=5"),
    (b"X-Hop", b"1"),
    (b"TE", b"trailers"),
    (b"Expect", b"100-continue"),
    (b"X-Prefiller-Host-Port", b"10.0.0.5:8000"),
    (b"x-data-parallel-host-port", b"10.0.0.6:8000"),
    (b"X-KV-Cache-Source-Host-Port", b"10.0.0.7:8000"),
    (b"X-Data-Parallel-Rank", b"3"),
    (b"traceparent", b"00-1-2-01"),
    (b"tracestate", b"a=b"),
    (b"X-Request-Id", b"id-1"),
    (b"X-Odd", b"  \xe4 two  words "),
    (b"X-Odd", b""),
]


def lines(block: bytes) -> list[bytes]:
    assert block.endswith(b"\r\n")
    return block.removesuffix(b"\r\n").split(b"\r\n")


def names(block: bytes) -> list[str]:
    return [line.partition(b":")[0].decode().lower() for line in lines(block)]


HOP = {"connection", "keep-alive", "proxy-connection", "te", "upgrade", "transfer-encoding", "x-hop", "expect"}
OURS = {"x-prefiller-host-port", "x-data-parallel-host-port", "x-kv-cache-source-host-port"}


def test_relayed_fields_are_as_they_came() -> None:
    block = request(*CLIENT).relay_block(inflated=False, with_id=False)
    dropped = HOP | OURS | {"content-length"}
    expected = [b"%b: %b" % field for field in [HOST, *CLIENT] if field[0].decode().lower() not in dropped]
    assert lines(block) == expected
    assert {"cookie", "proxy-authorization", "authorization", "x-data-parallel-rank"} <= set(names(block))


def test_relayed_id_is_ours_once() -> None:
    for given_id, sent in ((b"id-1", b"id-1"), (b"a,b", None)):
        one = request((b"X-Request-ID", given_id), (b"x-request-id", b"second"))
        block = one.relay_block(inflated=False, with_id=True)
        assert names(block).count("x-request-id") == 1
        assert lines(block)[-1] == b"x-request-id: " + (sent or one.take_request_id())


def test_encoding_goes_with_the_encoded_body() -> None:
    one = request((b"Content-Encoding", b"gzip"))
    assert "content-encoding" in names(one.relay_block(inflated=False, with_id=False))
    assert "content-encoding" not in names(one.relay_block(inflated=True, with_id=False))
    assert "content-encoding" not in names(one.prefill_block(b"p:1"))


def test_prefill_fields() -> None:
    block = request(*CLIENT).prefill_block(b"10.0.0.5:8000")
    assert lines(block)[0] == b"host: 10.0.0.5:8000"
    assert lines(block)[-1] == b"x-request-id: id-1"
    assert names(block).count("host") == names(block).count("x-request-id") == 1
    kept = {"authorization", "traceparent", "tracestate", "content-type", "x-odd"}
    assert kept <= set(names(block))
    gone = (
        HOP | OURS | {"x-data-parallel-rank", "cookie", "proxy-authorization", "content-length", "accept-encoding"}
    )
    assert not gone & set(names(block))


@pytest.mark.parametrize(
    "named",
    [
        b"Host",
        b"content-length",
        b"Content-Type",
        b"close",
        b"keep-alive",
        b"upgrade",
        b"",
        b" , ,",
        b"x y",
        b"\xff",
    ],
)
def test_what_the_connection_field_cannot_take_away(named: bytes) -> None:
    one = request((b"Connection", named), (b"Content-Type", b"application/json"), (b"X-Kept", b"1"))
    assert names(one.relay_block(inflated=False, with_id=True)) == [
        "host",
        "content-type",
        "x-kept",
        "x-request-id",
    ]


def test_both_legs_lose_what_the_connection_field_names() -> None:
    one = request((b"connection", b"X-A"), (b"CONNECTION", b"x-b, x-request-id"), (b"x-a", b"1"), (b"X-B", b"2"))
    for block in (one.relay_block(inflated=False, with_id=True), one.prefill_block(b"p:1")):
        assert set(names(block)) == {"host", "x-request-id"}


FIELD = st.tuples(
    st.sampled_from(
        [b"X-A", b"x-b", b"Connection", b"Cookie", b"TE", b"X-Prefiller-Host-Port", b"Accept", b"Upgrade"]
    ),
    st.sampled_from([b"1", b"x-a", b"X-B, close", b"", b"upgrade", b"X-Prefiller-Host-Port"]),
)


@settings(max_examples=150, deadline=None, database=None)
@given(st.lists(FIELD, max_size=8))
def test_fields_that_stay_keep_their_order_case_and_value(headers: Headers) -> None:
    one = request(*headers)
    block = lines(one.relay_block(inflated=False, with_id=False))
    whole = [b"%b: %b" % field for field in [HOST, *headers]]
    remaining = iter(whole)
    assert all(line in remaining for line in block)
    named = {name.strip().lower() for key, value in headers if key == b"Connection" for name in value.split(b",")}
    for name, _ in headers:
        gone = name.lower() in named or name.decode().lower() in HOP | OURS
        assert (name.lower() in {line.partition(b":")[0].lower() for line in block}) is not gone


# -- upgrades --------------------------------------------------------------------------------------------------


def test_head_without_its_wish_to_upgrade() -> None:
    one = request(
        (b"Connection", b"Upgrade, HTTP2-Settings"),
        (b"Upgrade", b"h2c"),
        (b"HTTP2-Settings", b"AAA"),
        LENGTH,
        target=b"/v1/completions?x",
    )
    assert one.upgrade
    expected = b"POST /v1/completions?x HTTP/1.1\r\nHost: sidecar\r\ncontent-length: 5\r\n\r\n"
    assert one.without_upgrade() == expected


def test_what_else_concerns_the_connection_is_no_wish_to_upgrade() -> None:
    """A client that wants it closed waits for that, and a field for us alone stays one."""
    one = request(
        (b"Connection", b"close, Upgrade,X-Hop"),
        (b"Upgrade", b"h2c"),
        (b"X-Hop", b"1"),
        (b"connection", b"http2-settings"),
    )
    expected = b"POST /v1/completions HTTP/1.1\r\nHost: sidecar\r\nX-Hop: 1\r\nconnection: close, X-Hop\r\n\r\n"
    assert one.without_upgrade() == expected
