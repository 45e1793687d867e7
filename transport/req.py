"""A REQ socket: one question at a time to a ROUTER, every one answered or known to be unanswered. No meaning."""

import asyncio
from collections.abc import Callable
from typing import Self

from transport import zmtp
from transport.link import Link, Unanswered, dial


class Req(Link):
    """Use `Req.connect`, then `ask` as often as wanted, one after the other, then `abort`."""

    socket_type = zmtp.REQ
    peers = frozenset({zmtp.ROUTER})

    def __init__(self, *, frame_bytes_max: int) -> None:
        super().__init__(frame_bytes_max=frame_bytes_max)
        self._question: bytes | None = None
        self._reply: asyncio.Future[tuple[bytes, ...]] | None = None
        self.on_end: Callable[[], None] | None = None
        """Called once, when the other side is gone or `abort` was called."""

    @classmethod
    async def connect(cls, host: str, port: int, *, frame_bytes_max: int, timeout_seconds: float) -> Self:
        """Raises Unanswered after at most `timeout_seconds`."""
        return await dial(cls(frame_bytes_max=frame_bytes_max), host, port, timeout_seconds)

    async def ask(self, question: bytes, *, timeout_seconds: float) -> tuple[bytes, ...]:
        """Send one frame behind REQ's empty delimiter; the frames behind the reply's.

        Raises Unanswered, and this Req is then of no further use: a late reply would be taken for the next one's.
        """
        if self.end is not None:
            raise self.end
        assert self._reply is None, "REQ asks one question at a time"
        self._reply = asyncio.get_running_loop().create_future()
        self._question = question
        if self.wire.peer is not None:
            self.ready()
        try:
            async with asyncio.timeout(timeout_seconds):
                return await self._reply
        except TimeoutError:
            detail = self._silence()
            self.fail("silent", detail)
            raise Unanswered("silent", detail) from None
        finally:
            self._reply = None

    def ready(self) -> None:
        if self._question is not None:
            self.send(b"", self._question)
            self._question = None

    def received(self, message: tuple[bytes, ...]) -> None:
        if self._reply is None or self._reply.done() or self._question is not None or message[0]:
            self.fail("garbage", "a message that nobody asked for")
            return
        self._reply.set_result(message[1:])

    def ended(self, end: Unanswered) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(end)
        if self.on_end is not None:
            self.on_end()
            self.on_end = None

    def _silence(self) -> str:
        if not self.wire.greeted:
            return "connected, but nothing spoke ZMQ within the time"
        return "the ZMQ port answers, but the listener behind it did not within the time"
