"""The WebSocket that an engine's realtime API stands for: it echoes. Knows frames and a transport, no HTTP."""

from __future__ import annotations

import base64
import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, section 1.3


def accepted(key: str) -> bytes:
    """The answer to a client's `Sec-WebSocket-Key`."""
    return base64.b64encode(hashlib.sha1(key.encode() + _GUID).digest())


class WebSocket:
    """Echoes text and binary frames (RFC 6455), answers pings, ends with the client's close."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._buffer = bytearray()
        self._is_open = False

    def open(self) -> None:
        self._is_open = True
        self.feed(b"")

    def feed(self, data: bytes) -> None:
        self._buffer += data
        while self._is_open and self._frame():
            pass

    def _frame(self) -> bool:
        buffer = self._buffer
        if len(buffer) < 2:
            return False
        first, length, at = buffer[0], buffer[1] & 0x7F, 2
        masked = buffer[1] & 0x80
        if length == 126:
            length, at = int.from_bytes(buffer[2:4], "big"), 4
        elif length == 127:
            length, at = int.from_bytes(buffer[2:10], "big"), 10
        mask = bytes(buffer[at : at + 4]) if masked else bytes(4)
        at += 4 if masked else 0
        if len(buffer) < at + length:
            return False
        payload = bytes(byte ^ mask[i % 4] for i, byte in enumerate(buffer[at : at + length]))
        del buffer[: at + length]
        opcode = first & 0x0F
        answer = {0x9: 0x8A, 0x8: 0x88}.get(opcode, first)
        if opcode == 0xA:
            return True
        if length < 126:
            head = bytes([answer, length])
        elif length < 65536:
            head = bytes([answer, 126]) + length.to_bytes(2, "big")
        else:
            head = bytes([answer, 127]) + length.to_bytes(8, "big")
        self._transport.write(head + payload)
        if opcode == 0x8:
            self._transport.close()
            return False
        return True
