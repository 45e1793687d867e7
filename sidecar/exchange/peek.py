"""Looks at the first events of an SSE stream to tell a working pull from a failed one.

With `kv_load_failure_policy: fail` (its default) vLLM sends status 200 at once and, when the KV cannot be
loaded, an error as first event, or behind one that says nothing yet (the role, `message_start`). Until that is seen
the client gets nothing, so a local try stays possible.
"""

import re
from enum import Enum, auto

from sidecar.exchange.apis import Api

MAX_PEEK_BYTES = 65536
"""More than any preamble; a stream that says nothing within it is taken as good."""

_END_OF_EVENT = re.compile(rb"\r?\n\r?\n")
_ERROR_DATA = (b'{"error"', b'{"object":"error"', b'{"type":"error"')
_ERROR_EVENTS = (b"error", b"response.failed")


class Verdict(Enum):
    """What the stream's beginning says."""

    UNDECIDED = auto()
    GOOD = auto()
    ERROR = auto()


class FirstEvents:
    """Feed it the body as it arrives (chunk framing removed)."""

    __slots__ = ("_buffer", "_preamble", "_preamble_data", "_skipping")

    def __init__(self, api: Api) -> None:
        self._buffer = bytearray()
        self._preamble = api.preamble
        self._preamble_data = api.preamble_data
        self._skipping = False

    def feed(self, data: bytes) -> Verdict:
        self._buffer += data
        while True:
            end = _END_OF_EVENT.search(self._buffer)
            if end is None:
                return self._without_end()
            verdict = Verdict.UNDECIDED if self._skipping else self._judge(bytes(self._buffer[: end.start()]))
            self._skipping = False
            if verdict is not Verdict.UNDECIDED:
                return verdict
            del self._buffer[: end.end()]

    def _without_end(self) -> Verdict:
        """The event at hand is not complete. A preamble may be as large as the request that it repeats: of it only
        what may be the beginning of its end is kept."""
        if not self._skipping and self._is_preamble_so_far():
            self._skipping = True
        if self._skipping:
            del self._buffer[:-3]
            return Verdict.UNDECIDED
        return Verdict.GOOD if len(self._buffer) > MAX_PEEK_BYTES else Verdict.UNDECIDED

    def _is_preamble_so_far(self) -> bool:
        line, newline, _ = bytes(self._buffer[:256]).partition(b"\n")
        name, _, value = line.partition(b":")
        return bool(newline) and name == b"event" and value.strip() in self._preamble

    def _judge(self, event: bytes) -> Verdict:
        kind, data = b"", b""
        for line in event.splitlines():
            name, _, value = line.partition(b":")
            if name == b"event":
                kind = value.strip()
            elif name == b"data" and not data:
                data = value.strip()
        if not kind and not data:
            return Verdict.UNDECIDED  # a comment, sent to keep the connection alive
        if kind in self._preamble or (self._preamble_data and self._preamble_data in data):
            return Verdict.UNDECIDED
        if kind in _ERROR_EVENTS or data.replace(b" ", b"").startswith(_ERROR_DATA):
            return Verdict.ERROR
        return Verdict.GOOD
