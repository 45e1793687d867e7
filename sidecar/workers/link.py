"""One end of the socket between hub and worker: length-prefixed MessagePack. Knows no message."""

import asyncio
import logging
from collections.abc import Callable
from typing import Generic, TypeVar, cast

import msgspec

_log = logging.getLogger("sidecar")

_LENGTH_BYTES = 4
MAX_FRAME_BYTES = 64 << 20
"""More than any message: what says so is not the other end."""

Incoming = TypeVar("Incoming")

_encode = msgspec.msgpack.Encoder().encode


class Link(asyncio.Protocol, Generic[Incoming]):
    """`received` hears each message, `lost` once that no more will come."""

    def __init__(
        self,
        decoder: msgspec.msgpack.Decoder[Incoming],
        received: Callable[[Incoming], None],
        lost: Callable[[], None],
    ) -> None:
        self._decode = decoder.decode
        self._received = received
        self._lost = lost
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= _LENGTH_BYTES:
            size = int.from_bytes(buffer[start : start + _LENGTH_BYTES], "little")
            if size > MAX_FRAME_BYTES:
                self.close()
                return
            end = start + _LENGTH_BYTES + size
            if len(buffer) < end:
                break
            self._hand_on(bytes(buffer[start + _LENGTH_BYTES : end]))
            start = end
        del buffer[:start]

    def _hand_on(self, frame: bytes) -> None:
        try:
            self._received(self._decode(frame))
        except Exception:  # one message's trouble must not cost the worker
            _log.exception("a message between hub and worker")

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost()

    def send(self, message: msgspec.Struct) -> None:
        """Nothing happens if the other end is gone: `lost` has said so, or will."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            frame = _encode(message)
            transport.write(len(frame).to_bytes(_LENGTH_BYTES, "little") + frame)

    @property
    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def close(self) -> None:
        """What has been sent is still written."""
        if self._transport is not None:
            self._transport.close()
