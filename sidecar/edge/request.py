"""A client's request head: what its fields mean to us, and the header blocks for the two legs. No I/O."""

import re
import secrets
from collections.abc import Container
from urllib.parse import unquote_to_bytes

from sidecar.exchange.apis import APIS
from sidecar.exchange.failures import TABLE, Row, Stage

MAX_HEAD_BYTES = 65536
MAX_FIELDS = 256
LARGE_BYTES = 262_144
"""Of a body that comes in pieces."""

Headers = list[tuple[bytes, bytes]]

# RFC 9110 7.6.1: fields for this connection alone. Transfer-Encoding and Content-Length are written anew.
_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"upgrade", b"transfer-encoding"}
)
_OURS = frozenset({b"x-prefiller-host-port", b"x-data-parallel-host-port", b"x-kv-cache-source-host-port"})
_REWRITTEN = frozenset({b"content-length", b"expect"})
_NEVER_FORWARDED = _HOP_BY_HOP | _OURS | _REWRITTEN
_RELAYED_WITHOUT = {
    (inflated, with_id): _NEVER_FORWARDED
    | (frozenset({b"content-encoding"}) if inflated else frozenset())
    | (frozenset({b"x-request-id"}) if with_id else frozenset())
    for inflated in (False, True)
    for with_id in (False, True)
}
_NOT_TO_PREFILL = _NEVER_FORWARDED | {
    b"cookie",
    b"proxy-authorization",
    b"accept-encoding",
    b"host",
    b"content-encoding",
    b"x-data-parallel-rank",  # written anew: what decode is told of and what prefill reads must be one rank
    b"x-request-id",
}

_READ = frozenset(
    {
        b"connection",
        b"content-encoding",
        b"content-length",
        b"content-type",
        b"expect",
        b"host",
        b"transfer-encoding",
        b"upgrade",
        b"x-data-parallel-host-port",
        b"x-data-parallel-rank",
        b"x-kv-cache-source-host-port",
        b"x-prefiller-host-port",
        b"x-request-id",
    }
)

_CONTROL = re.compile(rb"[\x00-\x1f\x7f]")
"""The engine's router takes a path with a line feed behind it for the path without."""
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
ALWAYS_READ = (*APIS, b"/invocations")
"""Paths whose bodies the engine takes for JSON whatever Content-Type says (vLLM 0.32, `raw_request.json()`)."""

_STREAMED_TYPES = (b"multipart/", b"audio/", b"video/", b"image/", b"application/octet-stream")


class Request:
    """One request as read so far."""

    __slots__ = (
        "_keys",
        "body",
        "expects_continue",
        "has_body",
        "headers",
        "http_1_0",
        "inflated",
        "is_complete",
        "is_streamed",
        "keep_alive",
        "length",
        "method",
        "parts",
        "path",
        "read",
        "request_id",
        "size",
        "started_at",
        "target",
        "trailers",
        "upgrade",
    )

    def __init__(
        self, method: bytes, target: bytes, headers: Headers, *, http_1_0: bool, started_at: float
    ) -> None:
        self.method = method
        self.target = target
        self.headers = headers
        self.http_1_0 = http_1_0
        self.started_at = started_at
        self.keep_alive = True
        self.path = _path(target)
        self._keys = [name.lower() for name, _ in headers]
        self.read: dict[bytes, list[bytes]] = {}
        """Values of the fields that mean something to us."""
        for key, (_, value) in zip(self._keys, headers, strict=True):
            if key in _READ:
                self.read.setdefault(key, []).append(value)
        self.has_body = b"content-length" in self.read or b"transfer-encoding" in self.read
        self.expects_continue = b"expect" in self.read
        self.upgrade = b"upgrade" in self.read
        self.is_streamed = self._streams()
        length = self.read.get(b"content-length")
        self.length = int(length[0]) if length else 0
        """Content-Length, 0 if the body has none."""
        self.parts: list[bytes | bytearray] = []
        self.size = 0
        """Bytes of the body that have been read."""
        self.body: bytes | bytearray | memoryview = b""
        self.trailers = b""
        """Complete lines."""
        self.is_complete = False
        """It has been read to its end."""
        self.request_id = b""
        self.inflated = False
        """The body lost its content encoding on the way in."""

    def add(self, piece: bytes) -> None:
        """A piece of the body. What is large grows where it is: to join its pieces at the end would take one long
        turn of the loop, and as much memory again."""
        parts = self.parts
        if self.size < LARGE_BYTES:
            parts.append(piece)
        elif len(parts) == 1 and isinstance(parts[0], bytearray):
            parts[0] += piece
        else:
            self.parts = [bytearray().join((*parts, piece))]

    def refusal(self, max_body_bytes: int) -> tuple[Row, str] | None:
        """Why this head cannot be accepted."""
        fault = self._fault(max_body_bytes)
        return (TABLE[Stage.READING, fault[0]], fault[1]) if fault else None

    def _fault(self, max_body_bytes: int) -> tuple[str, str] | None:
        read = self.read
        if len(self.headers) > MAX_FIELDS or self.head_bytes > MAX_HEAD_BYTES:
            return "head_too_large", ""
        hosts = read.get(b"host", ())
        if len(hosts) > 1 or (not hosts and not self.http_1_0):
            return "malformed", "one Host field is needed"
        if b"transfer-encoding" in read and (b"content-length" in read or self.http_1_0):
            return "two_framings", ""
        if b"transfer-encoding" in read and [v.strip().lower() for v in read[b"transfer-encoding"]] != [b"chunked"]:
            return "malformed", "Transfer-Encoding other than chunked"
        if self.expects_continue and [v.strip().lower() for v in read[b"expect"]] != [b"100-continue"]:
            return "unknown_expectation", ""
        if _CONTROL.search(self.path):
            return "malformed", "a control character in the path"
        if self.method == b"CONNECT":
            return "malformed", "CONNECT is not served here"
        if self.length > max_body_bytes:
            return "too_large", f"{max_body_bytes} bytes"
        return None

    @property
    def head_bytes(self) -> int:
        return len(self.target) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _streams(self) -> bool:
        """Bodies that are no JSON are relayed as they arrive; all others are looked into first. On the paths where
        the engine takes every body for JSON, whatever its type says, so do we."""
        types = self.read.get(b"content-type")
        return (
            self.has_body
            and types is not None
            and types[0].lower().startswith(_STREAMED_TYPES)
            and not self.is_always_read
        )

    @property
    def is_always_read(self) -> bool:
        """Whether the engine takes the body for JSON whatever its type says, also behind a `--root-path`."""
        return self.method == b"POST" and self.path.endswith(ALWAYS_READ)

    @property
    def is_chunked(self) -> bool:
        return b"transfer-encoding" in self.read

    def own_framing(self) -> bytes:
        """The framing of a streamed body, as it came."""
        if self.is_chunked:
            return b"transfer-encoding: chunked\r\n"
        return b"content-length: %b\r\n" % self.read[b"content-length"][0]

    @property
    def is_encoded(self) -> bool:
        """Whether the body has to be decoded before it can be looked into."""
        return (
            b"content-encoding" in self.read
            and self.has_body
            and self.is_always_read
            and any(self.content_encoding)
        )

    @property
    def content_encoding(self) -> bytes:
        return b",".join(self.read.get(b"content-encoding", ()))

    def take_request_id(self) -> bytes:
        """The client's request id if the engines can live with it, else a new one; the same at every call.

        The engines build peer-visible names from it, and a comma in it breaks lease renewal (vLLM 0.32,
        nixl/pull_worker.py)."""
        if not self.request_id:
            given = self.read.get(b"x-request-id", (b"",))[0]
            self.request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16).encode()
        return self.request_id

    # -- header blocks for the legs --

    def values(self, key: bytes) -> list[bytes]:
        """All values of a field, by its name in lower case."""
        return [value for name, (_, value) in zip(self._keys, self.headers, strict=True) if name == key]

    def remove(self, keys: Container[bytes]) -> None:
        """Takes fields out, so that neither leg gets them."""
        self.headers = [header for key, header in zip(self._keys, self.headers, strict=True) if key not in keys]
        self._keys = [name.lower() for name, _ in self.headers]

    def _named_by_connection(self) -> frozenset[bytes]:
        values = self.read.get(b"connection")
        if not values:
            return frozenset()
        names = {name.strip().lower() for value in values for name in value.split(b",")}
        # What frames or addresses the message is not the client's to take away.
        return frozenset(names - {b"close", b"keep-alive", b"upgrade", b"host", b"content-length", b"content-type"})

    def _block(self, drop: frozenset[bytes]) -> bytes:
        if b"connection" in self.read and (named := self._named_by_connection()):
            drop |= named
        lines = [
            b": ".join(header) for key, header in zip(self._keys, self.headers, strict=True) if key not in drop
        ]
        return b"\r\n".join((*lines, b"")) if lines else b""

    def relay_block(self, *, inflated: bool, with_id: bool) -> bytes:
        """Fields for the local engine, as they came. `inflated`: the body lost its content encoding;
        `with_id`: x-request-id is ours."""
        block = self._block(_RELAYED_WITHOUT[inflated, with_id])
        return block + b"x-request-id: %b\r\n" % self.take_request_id() if with_id else block

    def prefill_block(self, host: bytes) -> bytes:
        """Fields for a prefill endpoint."""
        block = self._block(_NOT_TO_PREFILL)
        return b"host: %b\r\n%bx-request-id: %b\r\n" % (host, block, self.take_request_id())

    def without_upgrade(self) -> bytes:
        """The head again, as bytes, without its wish to upgrade (RFC 9110 7.8: a server may ignore it)."""
        wish = (b"upgrade", b"http2-settings")
        lines = b"".join(
            [
                b"%b: %b\r\n" % header
                for key, header in zip(self._keys, self.headers, strict=True)
                if key != b"connection" and key not in wish
            ]
        )
        options = [option.strip() for value in self.values(b"connection") for option in value.split(b",")]
        if kept := [option for option in options if option and option.lower() not in wish]:
            lines += b"connection: %b\r\n" % b", ".join(kept)
        version = b"1.0" if self.http_1_0 else b"1.1"
        return b"%b %b HTTP/%b\r\n%b\r\n" % (self.method, self.target, version, lines)


def _path(target: bytes) -> bytes:
    """The path that the engine's router will see: without query, unquoted, of an absolute target its path."""
    path = target.split(b"?", 1)[0].split(b"#", 1)[0]
    if b"%" in path:
        path = unquote_to_bytes(path)
    if not path.startswith(b"/"):
        _, scheme, rest = path.partition(b"://")
        if scheme:
            path = b"/" + rest.partition(b"/")[2]
    return path
