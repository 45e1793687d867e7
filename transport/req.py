"""A REQ socket on the event loop: one TCP connection to a ROUTER, one question at a time, its end always noticed.

Knows frames, not what they mean. Never reconnects: whoever is on the other side of one `Req` is one process, the
same from the first question to the last. Every failure is an `Unanswered` that says how far it got.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import Final, Literal, Self, cast

from transport import zmtp

Kind = Literal["name", "refused", "unreachable", "closed", "silent", "garbage"]
"""How a question went unanswered.

`refused` and `closed` are answers of the other machine's kernel: nothing listens there (any more). `silent` is no
answer within the time: frozen, black-holed or hopelessly busy. `name`: the host has no address. `garbage`:
something else than the protocol came back.
"""

_SERVERS: Final = frozenset({zmtp.ROUTER})


class Unanswered(Exception):
    """`kind` is a bounded label; the text is one clause for a log line, without the address."""

    def __init__(self, kind: Kind, detail: str) -> None:
        super().__init__(detail)
        self.kind: Kind = kind


class Req(asyncio.Protocol):
    """Use `Req.connect`, then `ask` as often as wanted, one after the other, then `abort`."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, frame_bytes_max: int, socket_type: bytes = zmtp.REQ
    ) -> None:
        self._loop = loop
        self._socket_type = socket_type
        self._wire = zmtp.Wire(_SERVERS, frame_bytes_max=frame_bytes_max)
        self._transport: asyncio.Transport | None = None
        self._question = b""
        self._reply: asyncio.Future[tuple[bytes, ...]] | None = None
        self._end: Unanswered | None = None
        self.on_end: Callable[[], None] | None = None
        """Called once, when the other side is gone or `abort` was called."""

    @classmethod
    async def connect(cls, host: str, port: int, *, frame_bytes_max: int, timeout_seconds: float) -> Self:
        """`host` is an address or a name. Raises Unanswered after at most `timeout_seconds`."""
        if not 0 < port < 65536:  # the loop would take it modulo 65,536
            raise Unanswered("name", "not a port")
        loop = asyncio.get_running_loop()
        req = cls(loop, frame_bytes_max)
        try:
            async with asyncio.timeout(timeout_seconds):
                await loop.create_connection(lambda: req, host, port)
        except TimeoutError:
            req.abort()
            raise Unanswered("silent", "no TCP connection within the time") from None
        except ConnectionRefusedError:
            raise Unanswered("refused", "connection refused") from None
        except socket.gaierror as error:
            raise Unanswered("name", error.strerror or "the name does not resolve") from None
        except OSError as error:
            raise Unanswered("unreachable", error.strerror or type(error).__name__) from None
        except (UnicodeError, ValueError, OverflowError, TypeError):  # what no resolver would take
            raise Unanswered("name", "not a host and port") from None
        except BaseException:  # cancelled, perhaps in the very turn in which the connection was made
            req.abort()
            raise
        return req

    async def ask(self, question: bytes, *, timeout_seconds: float) -> tuple[bytes, ...]:
        """Send one frame behind REQ's empty delimiter; the frames behind the reply's.

        Raises Unanswered, and this Req is then of no further use: a late reply would be taken for the next one's.
        """
        if self._end is not None:
            raise self._end
        assert self._reply is None, "REQ asks one question at a time"
        self._reply = self._loop.create_future()
        self._question = zmtp.encode_message(b"", question)
        if self._wire.peer is not None:
            self._send()
        try:
            async with asyncio.timeout(timeout_seconds):
                return await self._reply
        except TimeoutError:
            self._fail("silent", self._silence())
            raise cast("Unanswered", self._end) from None
        finally:
            self._reply = None

    @property
    def end(self) -> Unanswered | None:
        """Why this connection is over; None while it stands."""
        return self._end

    def abort(self) -> None:
        """Close without waiting for anything to be sent."""
        self._fail("closed", "closed by this side")

    # What the loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self._end is not None:
            self._transport.abort()
            return
        self._transport.write(zmtp.GREETING + zmtp.encode_ready(self._socket_type))

    def data_received(self, data: bytes) -> None:
        if self._end is not None:
            return
        wire = self._wire
        greeting = wire.peer is None
        try:
            messages = wire.feed(data)
        except zmtp.ProtocolError as error:
            self._fail("garbage", str(error))
            return
        if wire.answer and self._transport is not None:
            self._transport.write(wire.answer)
            wire.answer = b""
        if greeting and wire.peer is not None and self._question:
            self._send()
        for message in messages:
            self._answered(message)

    def eof_received(self) -> None:
        self._fail("closed", "the other side closed the connection")

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("closed", "the connection was reset" if exc else "the other side closed the connection")

    def _send(self) -> None:
        assert self._transport is not None
        self._transport.write(self._question)
        self._question = b""

    def _answered(self, message: tuple[bytes, ...]) -> None:
        if self._end is not None:
            return
        if self._reply is None or self._reply.done() or self._question or message[0]:
            self._fail("garbage", "a message that nobody asked for")
            return
        self._reply.set_result(message[1:])

    def _fail(self, kind: Kind, detail: str) -> None:
        if self._end is not None:
            return
        self._end = Unanswered(kind, detail)
        if self._transport is not None:
            self._transport.abort()
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(self._end)
        if self.on_end is not None:
            self.on_end()
            self.on_end = None

    def _silence(self) -> str:
        if not self._wire.greeted:
            return "connected, but nothing spoke ZMQ within the time"
        return "the ZMQ port answers, but the listener behind it did not within the time"
