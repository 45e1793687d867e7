"""The head of an engine's answer, and what it says of where the body ends (RFC 9112, section 6.3). No I/O.

What becomes of the fields on their way to the client is not known here (messages.py).
"""

Headers = list[tuple[bytes, bytes]]


class Head:
    """An answer's head."""

    __slots__ = (
        "_values",
        "chunked",
        "coding",
        "headers",
        "http_1_0",
        "length",
        "no_body",
        "reason",
        "status",
        "trailers",
        "with_more",
    )

    def __init__(self, status: int, reason: bytes, headers: Headers, *, http_1_0: bool) -> None:
        self.status = status
        self.reason = reason
        self.headers = headers
        self.trailers: Headers = []
        """What follows the body's last chunk; complete when the body is. Never merged with the fields before it."""
        self.http_1_0 = http_1_0
        self.length = -1
        self.no_body = False
        self.with_more = False
        """What follows it came with it: the leg hears of that next."""
        values = self._values = {name.lower(): value for name, value in reversed(headers)}
        length = values.get(b"content-length")
        if length is not None:
            self.length = int(length)
        self.coding = b""
        if b"transfer-encoding" in values:
            codings = [value for name, value in headers if name.lower() == b"transfer-encoding"]
            self.coding = b",".join(codings).lower()
        self.chunked = self.coding == b"chunked"

    def value(self, key: bytes) -> bytes:
        """The first value of a field (key in lower case), or b""."""
        return self._values.get(key, b"")

    @property
    def until_close(self) -> bool:
        """The body has no stated end but that of the connection."""
        return not self.chunked and self.length < 0 and not self.no_body
