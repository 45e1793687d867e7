"""One ZMTP connection on the event loop, dialled or accepted: what REQ, DEALER, ROUTER and SUB have in common.

Knows frames, not what they mean. Never reconnects: whoever is on the other side of a `Link` is one process from the
first frame to the last, and its end is always noticed. Every end is an `Unanswered` that says how it came about.
"""

import asyncio
import socket
from typing import Final, Literal, TypeVar, cast

from transport import zmtp
from transport.descriptors import shortage

Kind = Literal["name", "refused", "unreachable", "closed", "silent", "garbage", "unasked"]
"""How a question went unanswered.

`refused` and `closed` are answers of the other machine's kernel: nothing listens there (any more). `silent` is no
answer within the time: frozen, black-holed or hopelessly busy. `name`: the host has no address. `garbage`:
something else than the protocol came back. `unasked`: this process may open no connection, which says nothing about
the other side.
"""


class Unanswered(Exception):
    """`kind` is a bounded label; the text is one clause for a log line, without the address."""

    def __init__(self, kind: Kind, detail: str) -> None:
        super().__init__(detail)
        self.kind: Kind = kind


class Link(asyncio.Protocol):
    """A subclass says what it is (`socket_type`), who may be on the other side (`peers`), and what it does when the
    peer is `ready`, when a message is `received`, and when the connection has `ended` (each called by the loop)."""

    socket_type: bytes
    peers: frozenset[bytes]

    def __init__(self, *, frame_bytes_max: int, parts_max: int = 8, message_bytes_max: int | None = None) -> None:
        self.wire: Final = zmtp.Wire(
            self.peers,
            frame_bytes_max=frame_bytes_max,
            parts_max=parts_max,
            message_bytes_max=message_bytes_max,
        )
        self.transport: asyncio.Transport | None = None
        self.end: Unanswered | None = None
        """Why the connection is over; None while it stands."""

    @property
    def over(self) -> bool:
        return self.end is not None

    def ready(self) -> None:
        """The peer has said who it is: from now on messages may be sent."""

    def received(self, message: tuple[bytes, ...]) -> None:
        raise NotImplementedError

    def ended(self, end: Unanswered) -> None:
        """Called once, however it ended."""

    def send(self, *parts: bytes) -> None:
        """Nothing happens on a connection that is over."""
        if self.end is None and self.transport is not None:
            self.transport.write(zmtp.encode_message(*parts))

    def abort(self) -> None:
        """Close without waiting for anything to be sent."""
        self.fail("closed", "closed by this side")

    def fail(self, kind: Kind, detail: str) -> None:
        if self.end is None:
            self.end = Unanswered(kind, detail)
            if self.transport is not None:
                self.transport.abort()
            self.ended(self.end)

    # What the loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        if self.end is not None:
            self.transport.abort()
            return
        self.transport.write(zmtp.GREETING + zmtp.encode_ready(self.socket_type))

    def data_received(self, data: bytes) -> None:
        if self.end is not None:
            return
        wire = self.wire
        greeting = wire.peer is None
        try:
            messages = wire.feed(data)
        except zmtp.ProtocolError as error:
            self.fail("garbage", str(error))
            return
        if wire.answer and self.transport is not None:
            self.transport.write(wire.answer)
            wire.answer = b""
        if greeting and wire.peer is not None:
            self.ready()
        for message in messages:
            if self.over:
                return
            self.received(message)

    def eof_received(self) -> None:
        self.fail("closed", "the other side closed the connection")

    def connection_lost(self, exc: Exception | None) -> None:
        self.fail("closed", "the connection was reset" if exc else "the other side closed the connection")


L = TypeVar("L", bound=Link)


async def dial(link: L, host: str, port: int, timeout_seconds: float) -> L:
    """Connect. `host` is an address or a name. Raises Unanswered after at most `timeout_seconds`."""
    if not 0 < port < 65536:  # the loop would take it modulo 65,536
        raise Unanswered("name", "not a port")
    try:
        async with asyncio.timeout(timeout_seconds):
            await asyncio.get_running_loop().create_connection(lambda: link, host, port)
    except TimeoutError:
        link.abort()
        raise Unanswered("silent", "no TCP connection within the time") from None
    except ConnectionRefusedError:
        raise Unanswered("refused", "connection refused") from None
    except OSError as error:
        if problem := shortage(error):
            raise Unanswered("unasked", problem) from None
        if isinstance(error, socket.gaierror):
            raise Unanswered("name", error.strerror or "the name does not resolve") from None
        raise Unanswered("unreachable", error.strerror or type(error).__name__) from None
    except (UnicodeError, ValueError, OverflowError, TypeError):  # what no resolver would take
        raise Unanswered("name", "not a host and port") from None
    except BaseException:  # cancelled, perhaps in the very turn in which the connection was made
        link.abort()
        raise
    return link
