"""Compressed request bodies: inflated before they are looked into, within a bound. No I/O."""

import zlib

import zstandard

from sidecar.exchange.failures import TABLE, Row, Stage

_TOO_LARGE = TABLE[Stage.READING, "too_large"]
_BAD = TABLE[Stage.READING, "bad_encoding"]
_UNKNOWN = TABLE[Stage.READING, "unknown_encoding"]


class Undecodable(ValueError):
    """The body cannot be read; `row` is the failure table's answer."""

    def __init__(self, row: Row, detail: str = "") -> None:
        super().__init__(detail)
        self.row = row
        self.detail = detail


def decoded(body: bytes, content_encoding: bytes, max_bytes: int) -> bytes:
    """`body` without its content encodings (applied right to left, RFC 9110 8.4). Raises `Undecodable`."""
    names = [name.strip().lower() for name in content_encoding.split(b",") if name.strip()]
    if len(names) > 3:
        raise Undecodable(_UNKNOWN, "more than three encodings")
    for name in reversed(names):
        if name in (b"gzip", b"x-gzip"):
            body = _inflate(body, 31, max_bytes)
        elif name == b"deflate":
            # Meant is zlib's format, but raw deflate is sent as well; the first byte tells them apart.
            body = _inflate(body, 15 if body[:1] and body[0] & 0x0F == 8 else -15, max_bytes)
        elif name == b"zstd":
            body = _zstd(body, max_bytes)
        elif name != b"identity":
            raise Undecodable(_UNKNOWN, repr(name.decode("latin-1"))[:40])
    return body


def _inflate(body: bytes, window_bits: int, max_bytes: int) -> bytes:
    out: list[bytes] = []
    left = max_bytes
    try:
        while True:  # a gzip body may be several members
            inflate = zlib.decompressobj(window_bits)
            out.append(inflate.decompress(body, left + 1))
            left -= len(out[-1])
            if left < 0:
                raise Undecodable(_TOO_LARGE)
            if not inflate.eof:
                raise Undecodable(_BAD, "it ends too early")
            body = inflate.unused_data
            if not body:
                return b"".join(out)
            if window_bits != 31:
                raise Undecodable(_BAD, "bytes after its end")
    except zlib.error as error:
        raise Undecodable(_BAD, str(error)) from None


def _zstd(body: bytes, max_bytes: int) -> bytes:
    out: list[bytes] = []
    left = max_bytes
    try:
        # A window larger than the bound would be allocated before a byte is decoded.
        window = max(1 << 10, min(max_bytes, 1 << 27))
        with zstandard.ZstdDecompressor(max_window_size=window).stream_reader(
            body, read_across_frames=True
        ) as reader:
            while piece := reader.read(min(left + 1, 1 << 20)):
                out.append(piece)
                left -= len(piece)
                if left < 0:
                    raise Undecodable(_TOO_LARGE)
    except zstandard.ZstdError as error:
        raise Undecodable(_BAD, str(error)) from None
    return b"".join(out)
