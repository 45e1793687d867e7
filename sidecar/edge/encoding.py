"""Compressed request bodies: inflated before they are looked into, within a bound. No I/O.

A little in each turn of the loop: a megabyte takes up to 10 ms, and all streams would wait for a large one.
"""

import asyncio
import sys
import time
import zlib
from collections.abc import Callable, Generator
from typing import Protocol

from sidecar.exchange.failures import TABLE, Row, Stage

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

Buffer = bytes | bytearray | memoryview

_GZIP = 31
_SLICE_BYTES = 16384
_PIECE_BYTES = 262_144
"""What comes out of a slice, which may be a thousand times as large as what went in."""
TURN_S = 0.001
_MAX_MEMBERS = 1024
# RFC 9659: a decoder need not, and for its memory's sake should not, offer more than 8 MiB.
_ZSTD_OPTIONS: dict[int, int] = {zstd.DecompressionParameter.window_log_max: 23}

_TOO_LARGE = TABLE[Stage.READING, "too_large"]
_BAD = TABLE[Stage.READING, "bad_encoding"]
_UNKNOWN = TABLE[Stage.READING, "unknown_encoding"]


class Undecodable(ValueError):
    """The body cannot be read; `row` is the failure table's answer."""

    def __init__(self, row: Row, detail: str = "") -> None:
        super().__init__(detail)
        self.row = row
        self.detail = detail


Steps = Generator[None, None, Buffer]
"""A little work at each step; returns what came of it."""


class Decoding:
    """One body on its way to being readable."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        steps: Steps,
        is_over: Callable[[], bool],
        done: Callable[["Buffer | Undecodable"], None],
    ) -> None:
        """Calls `done` at once if it takes no longer than `TURN_S`; not at all if nobody waits any more."""
        self._loop = loop
        self._steps = steps
        self._is_over = is_over
        self._done = done
        self._go_on()

    def _go_on(self) -> None:
        if self._is_over():
            return
        until = time.monotonic() + TURN_S
        try:
            next(self._steps)
            while time.monotonic() < until:
                next(self._steps)
        except StopIteration as stop:
            self._done(stop.value)
        except Undecodable as error:
            self._done(error)
        else:
            self._loop.call_soon(self._go_on)


def decoded(body: Buffer, content_encoding: bytes, max_bytes: int) -> Steps:
    """`body` without its content encodings (applied right to left, RFC 9110 8.4). Raises `Undecodable`."""
    names = [name.strip().lower() for name in content_encoding.split(b",") if name.strip()]
    if len(names) > 3:
        raise Undecodable(_UNKNOWN, "more than three encodings")
    for name in reversed(names):
        if name in (b"gzip", b"x-gzip"):
            body = yield from _inflate(body, _GZIP, max_bytes)
        elif name == b"deflate":
            # Meant is zlib's format, but raw deflate is sent as well; the first byte tells them apart.
            body = yield from _inflate(body, 15 if body[:1] and body[0] & 0x0F == 8 else -15, max_bytes)
        elif name == b"zstd":
            body = yield from _zstd(body, max_bytes)
        elif name != b"identity":
            raise Undecodable(_UNKNOWN, repr(name.decode("latin-1"))[:40])
    return body


def _inflate(body: Buffer, window_bits: int, max_bytes: int) -> Steps:
    return _decompressed(body, lambda: _Zlib(window_bits), max_bytes, several=window_bits == _GZIP)


def _zstd(body: Buffer, max_bytes: int) -> Steps:
    return _decompressed(body, lambda: zstd.ZstdDecompressor(options=_ZSTD_OPTIONS), max_bytes, several=True)


class _Decompressor(Protocol):
    """As in Python 3.14's `compression` package."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    @property
    def needs_input(self) -> bool: ...

    def decompress(self, data: Buffer, max_length: int) -> bytes: ...


class _Zlib:
    """zlib's decompressor with the interface of the newer ones."""

    def __init__(self, window_bits: int) -> None:
        self._inner = zlib.decompressobj(window_bits)

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    @property
    def needs_input(self) -> bool:
        return not self._inner.unconsumed_tail

    def decompress(self, data: Buffer, max_length: int) -> bytes:
        return self._inner.decompress(self._inner.unconsumed_tail + bytes(data), max_length)


def _decompressed(body: Buffer, make: Callable[[], _Decompressor], max_bytes: int, *, several: bool) -> Steps:
    """The content of `several` members one after the other, or of exactly one. Slices keep what a member leaves
    over small: it is copied for each member."""
    out = bytearray()  # which grows where it is: joining a large body's pieces would take a turn of its own
    left = max_bytes
    members = 1
    current = make()
    view = memoryview(body)
    data: Buffer = b""
    at = 0
    try:
        while True:
            if not data and (not current.eof and current.needs_input):
                data = view[at : at + _SLICE_BYTES]
                at += len(data)
                if not data:
                    raise Undecodable(_BAD, "it ends too early")
            piece = current.decompress(data, min(left + 1, _PIECE_BYTES))
            data = b""
            out += piece
            yield
            left -= len(piece)
            if left < 0:
                raise Undecodable(_TOO_LARGE)
            if not current.eof:
                continue
            data = current.unused_data or view[at : at + _SLICE_BYTES]
            at += 0 if current.unused_data else len(data)
            if not data:
                return out
            members += 1
            if not several or members > _MAX_MEMBERS:
                raise Undecodable(
                    _BAD, "bytes after its end" if not several else f"more than {_MAX_MEMBERS} members"
                )
            current = make()
    except (zlib.error, zstd.ZstdError) as error:
        raise Undecodable(_BAD, str(error)) from None
