"""W3C trace context: which requests are traced, and what their legs are told. No I/O.

https://www.w3.org/TR/trace-context/: `traceparent` is version-traceid-parentid-flags. Where the client's context is
sampled the request is traced, where it is not it is not; without one a share is chosen by chance.
"""

import random
import re
import secrets

_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED, _RANDOM = 0x01, 0x02


class Trace:
    """The spans of one traced request, as far as their ids go."""

    __slots__ = ("_flags", "decode_ids", "parent_id", "prefill_id", "span_id", "trace_id")

    def __init__(self, trace_id: str, parent_id: str, flags: int) -> None:
        """`parent_id` is "" where the trace begins here."""
        self.trace_id, self.parent_id = trace_id, parent_id
        self.span_id = secrets.token_hex(8)
        self.prefill_id = ""
        """Of the prefill stage, whichever endpoints are tried in it."""
        self.decode_ids: list[str] = []
        """Of the decode legs: a second one follows where a pull failed."""
        self._flags = flags

    def for_prefill(self) -> bytes:
        """The header line for a prefill leg."""
        self.prefill_id = self.prefill_id or secrets.token_hex(8)
        return self._line(self.prefill_id)

    def for_decode(self) -> bytes:
        """The header line for a decode leg."""
        self.decode_ids.append(secrets.token_hex(8))
        return self._line(self.decode_ids[-1])

    def _line(self, span_id: str) -> bytes:
        return f"traceparent: 00-{self.trace_id}-{span_id}-{self._flags:02x}\r\n".encode("ascii")


def parsed(values: list[bytes]) -> tuple[str, str, int] | None:
    """Trace id, parent id and flags of a client's `traceparent`; None for none that is valid."""
    found = _PARENT.fullmatch(values[0].strip()) if len(values) == 1 else None
    if found is None:
        return None
    version, trace_id, parent_id, flags, more = found.groups()
    if version == b"ff" or (version == b"00" and more) or not trace_id.strip(b"0") or not parent_id.strip(b"0"):
        return None
    return trace_id.decode(), parent_id.decode(), int(flags, 16)


class Sampler:
    """Parent-based; requests without a valid context are traced with probability `ratio`."""

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._random = random.Random()  # noqa: S311

    def begin(self, context: tuple[str, str, int] | None) -> Trace | None:
        """A new span in the client's context, or in a new trace; None: not traced."""
        if context is None:
            if self._random.random() >= self._ratio:
                return None
            return Trace(secrets.token_hex(16), "", _SAMPLED | _RANDOM)
        trace_id, parent_id, flags = context
        if not flags & _SAMPLED:
            return None
        return Trace(trace_id, parent_id, _SAMPLED | (flags & _RANDOM))
