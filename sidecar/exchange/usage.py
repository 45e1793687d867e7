"""Corrects the cached-token count in an answer's usage, in place and without changing its length.

A decode engine that pulled a prompt counts all of it as cached unless the handoff said how much the *prefill*
engine had cached (`remote_prefill_cached_tokens`, vLLM 0.32 output_processor.py). Engines that do not know the
key are corrected here: JSON allows white space after a number, and the true count is never the longer one, so
the digits are overwritten and padded. Nothing is re-framed, and no event waits for another.
"""

from sidecar.exchange.apis import Api

_DIGITS = b"0123456789"
_MORE_OF_A_NUMBER = (b"", *(bytes((char,)) for char in b"0123456789.eE"))
_MAX_DIGITS = 19
_MAX_HELD_BYTES = 128


class CachedTokens:
    """Feed it the body piece by piece; it returns the pieces to send on, never more than one behind.

    What is held back is a tail that may be the beginning of the field; `flush()` returns it at the end.
    """

    __slots__ = ("_field", "_held", "_value")

    def __init__(self, api: Api, cached_tokens: int) -> None:
        self._field = api.cached_tokens
        self._value = b"%d" % cached_tokens
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """What may be sent on; `data` itself where there is nothing to correct."""
        if not self._held and self._field not in data:
            keep = self._partial_field(data, 0)
            if keep == len(data):
                return data
        data = self._held + data
        out = bytearray()
        at = 0
        while True:
            begin = data.find(self._field, at)
            if begin < 0:
                keep = self._partial_field(data, at)
                break
            number = begin + len(self._field)
            while data[number : number + 1] == b" ":
                number += 1
            end = number
            while end < len(data) and data[end] in _DIGITS and end - number < _MAX_DIGITS:
                end += 1
            if end == len(data) and end - begin < _MAX_HELD_BYTES:  # the number may go on in the next piece
                keep = begin
                break
            out += data[at:number]
            width = end - number
            is_whole = len(self._value) <= width and data[end : end + 1] not in _MORE_OF_A_NUMBER
            out += self._value.ljust(width) if is_whole else data[number:end]
            at = end
        out += data[at:keep]
        self._held = data[keep:]
        return bytes(out)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held back."""
        return not self._held

    def flush(self) -> bytes:
        held, self._held = self._held, b""
        return held

    def _partial_field(self, data: bytes, at: int) -> int:
        """Offset from which `data` might be the beginning of the field, which begins with a quotation mark."""
        begin = max(at, len(data) - len(self._field) + 1)
        while (begin := data.find(b'"', begin)) >= 0:
            if self._field.startswith(data[begin:]):
                return begin
            begin += 1
        return len(data)
