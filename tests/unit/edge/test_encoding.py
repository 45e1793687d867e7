"""Compressed bodies: what is inflated is what was deflated, and nothing costs more than its bound."""

import asyncio
import bz2
import contextlib
import gzip
import random
import sys
import time
import tracemalloc
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.edge import encoding as module
from sidecar.edge.encoding import Buffer, Decoding, Undecodable

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MB = 1 << 20
BODY = b'{"prompt":"' + b"The capital of France is " * 200 + b'"}'


def raw_deflate(data: bytes) -> bytes:
    squeeze = zlib.compressobj(wbits=-15)
    return squeeze.compress(data) + squeeze.flush()


def streamed_zstd(data: bytes) -> bytes:
    """As a client writes that does not know the size beforehand: it announces its encoder's whole window."""
    squeeze = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 23})
    return squeeze.compress(data) + squeeze.flush()


ENCODERS = {
    b"gzip": gzip.compress,
    b"x-gzip": gzip.compress,
    b"deflate": zlib.compress,
    b"zstd": zstd.compress,
    b"identity": bytes,
}


def decoded(body: Buffer, encoding: bytes, max_bytes: int) -> Buffer:
    steps = module.decoded(body, encoding, max_bytes)
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value


def refusal(body: bytes, encoding: bytes, max_bytes: int = MB) -> str:
    with pytest.raises(Undecodable) as caught:
        decoded(body, encoding, max_bytes)
    return caught.value.row.fault


@pytest.mark.parametrize("encoding", ENCODERS)
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("data", [b"", b"{}", BODY, random.Random(0).randbytes(70_000)], ids=len)
def test_what_was_deflated(encoding: bytes, kind: type, data: bytes) -> None:
    body = kind(ENCODERS[encoding](data))
    assert bytes(decoded(body, encoding, MB)) == data
    assert bytes(decoded(body, encoding.upper() + b" ", MB)) == data


@settings(max_examples=100, deadline=None, database=None)
@given(st.binary(max_size=500), st.lists(st.sampled_from([b"gzip", b"deflate", b"zstd", b"identity"]), max_size=3))
def test_stacks(data: bytes, names: list[bytes]) -> None:
    """Applied from left to right, undone from right to left."""
    body = data
    for name in names:
        body = ENCODERS[name](body)
    assert decoded(body, b", ".join(names), MB) == data


def test_no_encoding_is_no_work() -> None:
    body = b"x" * 1000
    assert decoded(body, b"", 10) is body
    assert decoded(body, b"identity, ,", 10) is body


# -- the dialects ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0, 1, 6, 9])
@pytest.mark.parametrize("data", [b"", b"a", BODY, random.Random(1).randbytes(100_000)], ids=len)
def test_deflate_with_and_without_its_frame(level: int, data: bytes) -> None:
    squeeze = zlib.compressobj(level, wbits=-15)
    assert decoded(squeeze.compress(data) + squeeze.flush(), b"deflate", MB) == data
    for window in (9, 12, 15):
        squeeze = zlib.compressobj(level, wbits=window)
        assert decoded(squeeze.compress(data) + squeeze.flush(), b"deflate", MB) == data


@pytest.mark.parametrize("pieces", [1, 2, 3, 100])
def test_gzip_of_several_members(pieces: int) -> None:
    size = -(-len(BODY) // pieces)
    body = b"".join(gzip.compress(BODY[at : at + size]) for at in range(0, len(BODY), size))
    assert decoded(body, b"gzip", MB) == BODY


def test_gzip_members_across_slices() -> None:
    data = random.Random(2).randbytes(200_000)
    body = b"".join(gzip.compress(data[at : at + 7919]) for at in range(0, len(data), 7919))
    assert decoded(body, b"gzip", MB) == data


def test_gzip_header_with_everything_in_it() -> None:
    plain = gzip.compress(BODY)
    header = plain[:3] + b"\x0c" + plain[4:10] + b"\x05\x00extra" + b"name.json\x00"
    assert decoded(header + plain[10:], b"gzip", MB) == BODY


def test_zstd_of_several_frames() -> None:
    skippable = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"skip"
    body = zstd.compress(BODY) + skippable + zstd.compress(b"x" * 1000)
    assert decoded(body, b"zstd", MB) == BODY + b"x" * 1000


@pytest.mark.parametrize("max_bytes", [1024, 65536, MB])
def test_small_bound_does_not_refuse_a_small_body(max_bytes: int) -> None:
    """Encoders that stream announce their whole window, up to 8 MiB (RFC 9659), whatever the body's size."""
    assert decoded(streamed_zstd(b'{"a":1}'), b"zstd", max_bytes) == b'{"a":1}'


# -- what cannot be read ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate", b"zstd"])
def test_truncated_anywhere(encoding: bytes) -> None:
    body = ENCODERS[encoding](b'{"a":1}' * 3)
    for size in range(len(body)):
        assert refusal(body[:size], encoding) == "bad_encoding"


def test_truncated_raw_deflate() -> None:
    body = raw_deflate(BODY)
    for size in range(len(body)):
        assert refusal(body[:size], b"deflate") == "bad_encoding"


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate", b"zstd"])
@pytest.mark.parametrize("garbage", [b"\x00", b"x", b"garbage behind it", b"\x1f\x8b", b"{}"])
def test_something_behind_the_end(encoding: bytes, garbage: bytes) -> None:
    assert refusal(ENCODERS[encoding](BODY) + garbage, encoding) == "bad_encoding"


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate", b"zstd"])
@settings(max_examples=60, deadline=None, database=None)
@given(data=st.binary(max_size=300))
def test_garbage(encoding: bytes, data: bytes) -> None:
    with contextlib.suppress(Undecodable):
        decoded(data, encoding, MB)


def test_damaged_checksum() -> None:
    body = bytearray(gzip.compress(BODY))
    body[-6] ^= 1
    assert refusal(bytes(body), b"gzip") == "bad_encoding"
    body = bytearray(zlib.compress(BODY))
    body[-1] ^= 1
    assert refusal(bytes(body), b"deflate") == "bad_encoding"


@pytest.mark.parametrize(
    "encoding",
    [
        b"br",
        b"compress",
        b"bzip2",
        b"gzip, br",
        b"br, gzip",
        b"*",
        b"gzip;q=1",
        b"\xff",
        b"gzip gzip",
        b"aws-chunked",
    ],
)
def test_unknown_encodings(encoding: bytes) -> None:
    body = bz2.compress(BODY) if b"gzip" not in encoding else gzip.compress(gzip.compress(BODY))
    assert refusal(body, encoding) == "unknown_encoding"


def test_too_many_encodings() -> None:
    assert refusal(b"", b"gzip, gzip, gzip, gzip") == "unknown_encoding"


def test_detail_of_an_unknown_encoding_is_short() -> None:
    with pytest.raises(Undecodable) as caught:
        decoded(b"", b"x" * 10_000, MB)
    assert len(caught.value.detail) < 100


# -- bounds ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate", b"zstd"])
def test_bound_to_the_byte(encoding: bytes) -> None:
    body = ENCODERS[encoding](b"x" * 5000)
    assert decoded(body, encoding, 5000) == b"x" * 5000
    assert refusal(body, encoding, 4999) == "too_large"


def test_bound_over_all_members() -> None:
    body = gzip.compress(b"x" * 3000) * 2
    assert len(decoded(body, b"gzip", 6000)) == 6000
    assert refusal(body, b"gzip", 5999) == "too_large"
    assert refusal(zstd.compress(b"x" * 3000) * 2, b"zstd", 5999) == "too_large"


BOMBS = {
    "gzip": (b"gzip", gzip.compress(bytes(64 * MB))),
    "deflate": (b"deflate", zlib.compress(bytes(64 * MB))),
    "zstd": (b"zstd", zstd.compress(bytes(64 * MB))),
    "gzip in gzip": (b"gzip, gzip", gzip.compress(gzip.compress(bytes(64 * MB)))),
    "zstd in gzip": (b"zstd, gzip", gzip.compress(zstd.compress(bytes(64 * MB)))),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_cost_no_more_than_the_bound(name: str) -> None:
    encoding, body = BOMBS[name]
    tracemalloc.start()
    try:
        start = time.process_time()
        assert refusal(body, encoding, MB) == "too_large"
        assert time.process_time() - start < 2.0
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 * MB


EMPTY_MEMBERS = {
    "gzip": (b"gzip", gzip.compress(b"") * 200_000),
    "zstd": (b"zstd", zstd.compress(b"") * 400_000),
    "zstd, skippable": (b"zstd", b"\x50\x2a\x4d\x18\x00\x00\x00\x00" * 500_000),
    "gzip, one large at the end": (
        b"gzip",
        gzip.compress(b"") * 1000 + gzip.compress(random.Random(3).randbytes(MB)),
    ),
}


@pytest.mark.parametrize("name", EMPTY_MEMBERS)
def test_many_empty_members_take_no_time(name: str) -> None:
    """4 MB of them: a copy of the rest for each one would stop the sidecar for minutes."""
    encoding, body = EMPTY_MEMBERS[name]
    start = time.process_time()
    with contextlib.suppress(Undecodable):
        decoded(body, encoding, 64 * MB)
    assert time.process_time() - start < 2.0


def test_window_that_no_decoder_need_offer() -> None:
    squeeze = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 27})
    body = squeeze.compress(b"x" * 1000) + squeeze.flush()
    assert refusal(body, b"zstd", 1 << 30) == "bad_encoding"


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate", b"zstd", b"gzip, zstd"])
def test_no_step_is_large(encoding: bytes) -> None:
    """However much a slice holds: all streams wait for a step."""
    body = b" " * (20 * MB)
    for name in encoding.split(b", "):
        body = ENCODERS[name](body)
    steps = module.decoded(body, encoding, 32 * MB)
    assert len(list(steps)) >= 20 * MB // (MB // 4)


def test_a_little_in_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    body = b"x" * (2 * MB)

    async def turns(over_after: int) -> tuple[list[Buffer | Undecodable], int]:
        found: list[Buffer | Undecodable] = []
        loop = asyncio.get_running_loop()
        count = 0
        steps = module.decoded(gzip.compress(body), b"gzip", 4 * MB)
        Decoding(loop, steps, lambda: count >= over_after, found.append)
        while not found and count < 100:
            await asyncio.sleep(0)
            count += 1
        return found, count

    monkeypatch.setattr(module, "TURN_S", 1e-9)
    found, count = asyncio.run(turns(1000))
    assert found == [body]
    assert 8 <= count < 100
    assert asyncio.run(turns(3)) == ([], 100), "nobody waits any more"
    monkeypatch.setattr(module, "TURN_S", 10.0)
    assert asyncio.run(turns(1000)) == ([body], 0)
