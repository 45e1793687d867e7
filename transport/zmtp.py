"""ZMTP 3.0 (the wire protocol of ZeroMQ, RFC 23), NULL mechanism, without any I/O: bytes in, messages out.

Knows neither NIXL nor sockets, loops or clocks. Everything a peer can send is bounded before it is buffered.

Why not libzmq. Measured on this sidecar's one event loop, a handshake relayed through a fresh REQ, CPU each:
pyzmq sockets watched by the loop 840-1,000 us, zmq.asyncio 1,140-1,280 us, a thread of its own 520-780 us (2,000
and more once it listens on 400 addresses), this module 460-550 us; 400 listening addresses cost 3.4, 4.9, 3.1 and
0.7 MB, importing zmq 3 MB more; the engine waits 1.3, 1.7, 1.2-2.2 and 1.1 ms (0.7 ms without a relay). Idle cost
is nil in all four. What decides is that libzmq hides the connection: a refused or closed peer looks like a slow
one, and a question may be repeated to a process that started meanwhile, whose listener dies of it if it has fewer
ranks. Here one connection is one process, and its end is seen at once.
"""

from typing import Final

REQ: Final = b"REQ"
ROUTER: Final = b"ROUTER"
DEALER: Final = b"DEALER"
PUB: Final = b"PUB"
SUB: Final = b"SUB"

# RFC 23: signature (10 octets), version (2), mechanism (20), as-server (1), filler (31).
GREETING: Final = b"\xff" + bytes(7) + b"\x01\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_GREETING_BYTES: Final = 64
_MECHANISM: Final = slice(12, 32)

_MORE: Final = 0x01
_LONG: Final = 0x02
_COMMAND: Final = 0x04
_KNOWN_FLAGS: Final = _MORE | _LONG | _COMMAND

_COMMAND_BYTES_MAX: Final = 4096  # READY carries two short properties; libzmq's is under 64 bytes


class ProtocolError(Exception):
    """The peer does not speak ZMTP 3 with the NULL mechanism, or goes beyond a bound. `kind` is a short label."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


def encode_ready(socket_type: bytes) -> bytes:
    """The READY command: what we are. Sent together with `GREETING`, before anything was heard from the peer.

    Messages have to wait for the peer's READY: libzmq closes a connection on which a message overtakes it.
    """
    body = b"\x05READY" + _property(b"Socket-Type", socket_type) + _property(b"Identity", b"")
    return bytes((_COMMAND, len(body))) + body


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value


def encode_message(*parts: bytes) -> bytes:
    """One message of one or more frames. Those of REQ begin with an empty one, which the caller adds."""
    out = bytearray()
    last = len(parts) - 1
    for index, part in enumerate(parts):
        more = _MORE if index < last else 0
        if len(part) < 256:
            out += bytes((more, len(part)))
        else:
            out += bytes((more | _LONG,)) + len(part).to_bytes(8, "big")
        out += part
    return bytes(out)


class Wire:
    """The incoming half of one connection.

    `peers`: socket types that the other side may be. `frame_bytes_max`, `parts_max`, `message_bytes_max` bound one
    message; the buffer never holds more than one frame plus what one read brought.
    """

    __slots__ = (
        "_buffer",
        "_frame_bytes_max",
        "_greeted",
        "_message_bytes",
        "_message_bytes_max",
        "_parts",
        "_parts_max",
        "_peers",
        "answer",
        "peer",
    )

    def __init__(
        self,
        peers: frozenset[bytes],
        *,
        frame_bytes_max: int,
        parts_max: int = 8,
        message_bytes_max: int | None = None,
    ) -> None:
        self._peers = peers
        self._frame_bytes_max = frame_bytes_max
        self._parts_max = parts_max
        self._message_bytes_max = message_bytes_max or frame_bytes_max * 2
        self._buffer = bytearray()
        self._greeted = False
        self._parts: list[bytes] = []
        self._message_bytes = 0
        self.peer: bytes | None = None
        """The peer's socket type, once its READY has come: from then on messages may be sent."""
        self.answer = b""
        """Bytes that the protocol itself wants sent (PONG). The caller writes and clears them."""

    @property
    def greeted(self) -> bool:
        """Whether the peer's whole greeting has come."""
        return self._greeted

    def feed(self, data: bytes) -> list[tuple[bytes, ...]]:
        """Take what a read brought and return the messages that are complete with it, in order.

        Raises ProtocolError; the connection is then to be dropped, nothing after it may be fed.
        """
        buffer = self._buffer
        buffer += data
        position = 0
        if not self._greeted:
            position = self._greeting()
            if not self._greeted:
                return []
        messages: list[tuple[bytes, ...]] = []
        while len(buffer) - position >= 2:
            flags = buffer[position]
            start, size = self._head(flags, position)
            if start == 0 or len(buffer) < start + size:
                break
            body = bytes(memoryview(buffer)[start : start + size])
            position = start + size
            if flags & _COMMAND:
                self._command(body)
            elif (message := self._frame(body, more=bool(flags & _MORE))) is not None:
                messages.append(message)
        if position:
            del buffer[:position]
        return messages

    def _greeting(self) -> int:
        """Check as much of the greeting as there is, so that another protocol is refused at its first byte."""
        buffer = self._buffer
        if buffer and buffer[0] != 0xFF:
            raise ProtocolError("not_zmtp", "the first byte is not ZMTP's")
        if len(buffer) > 9 and not buffer[9] & 1:
            raise ProtocolError("not_zmtp", "the signature is not ZMTP's")
        if len(buffer) > 10 and buffer[10] < 3:
            raise ProtocolError("old_version", f"ZMTP {buffer[10]} is older than 3")
        if len(buffer) < _GREETING_BYTES:
            return 0
        if buffer[_MECHANISM] != GREETING[_MECHANISM]:
            raise ProtocolError("mechanism", "the peer wants another security mechanism than NULL")
        self._greeted = True
        return _GREETING_BYTES

    def _head(self, flags: int, position: int) -> tuple[int, int]:
        """Where the body starts and how long it is; (0, 0) while the head itself is incomplete."""
        if flags & ~_KNOWN_FLAGS or (flags & _COMMAND and flags & _MORE):
            raise ProtocolError("flags", f"impossible frame flags 0x{flags:02x}")
        if flags & _LONG:
            start = position + 9
            if len(self._buffer) < start:
                return 0, 0
            size = int.from_bytes(self._buffer[position + 1 : start], "big")
        else:
            start = position + 2
            size = self._buffer[position + 1]
        if size > (_COMMAND_BYTES_MAX if flags & _COMMAND else self._frame_bytes_max):
            raise ProtocolError("too_large", f"a frame of {size} bytes")
        return start, size

    def _frame(self, body: bytes, *, more: bool) -> tuple[bytes, ...] | None:
        if self.peer is None:
            raise ProtocolError("order", "a message came before READY")
        self._message_bytes += len(body)
        if len(self._parts) >= self._parts_max or self._message_bytes > self._message_bytes_max:
            raise ProtocolError("too_large", "a message of too many frames or bytes")
        self._parts.append(body)
        if more:
            return None
        message = tuple(self._parts)
        self._parts.clear()
        self._message_bytes = 0
        return message

    def _command(self, body: bytes) -> None:
        name_bytes = body[0] if body else 0
        name, rest = body[1 : 1 + name_bytes], body[1 + name_bytes :]
        if self.peer is None:
            if name != b"READY":
                raise ProtocolError("order", "the first command is not READY")
            peer = _properties(rest).get(b"socket-type", b"")
            if peer not in self._peers:
                raise ProtocolError("socket_type", f"a {peer[:16]!r} socket has no business here")
            self.peer = peer
        elif name == b"ERROR":
            raise ProtocolError("refused", "the peer sent ERROR")
        elif name == b"PING":  # ZMTP 3.1 heartbeat: two bytes of time to live, up to 16 bytes of context
            pong = b"\x04PONG" + rest[2:18]
            self.answer = bytes((_COMMAND, len(pong))) + pong  # a second PING of the same read needs no second


def _properties(rest: bytes) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    while rest:
        name_bytes = rest[0]
        name, rest = rest[1 : 1 + name_bytes], rest[1 + name_bytes :]
        value_bytes = int.from_bytes(rest[:4], "big")
        if len(name) < name_bytes or len(rest) < 4 + value_bytes:
            raise ProtocolError("ready", "READY is cut short")
        found[name.lower()] = rest[4 : 4 + value_bytes]
        rest = rest[4 + value_bytes :]
    return found
