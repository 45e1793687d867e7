"""dnspython's questions on plain sockets of the running loop.

Not dnspython's own asyncio backend: it waits by asyncio.wait_for, which before Python 3.12 now and then swallows
that it is cancelled, so that the task around it never ends; and a lookup that is cancelled leaves something that
uvloop waits for when the loop is closed. Here a lookup that is cancelled closes its socket, and that is all.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any, Self

import dns._asyncbackend
import dns.exception


class Connection(dns._asyncbackend.DatagramSocket, dns._asyncbackend.StreamSocket):
    """A connected socket, UDP or TCP; a connected UDP socket gets answers of its peer alone, and its refusal."""

    def __init__(self, sock: socket.socket, peer: Any) -> None:
        super().__init__(sock.family, sock.type)
        self._sock = sock
        self._peer = peer
        self._loop = asyncio.get_running_loop()

    async def __aenter__(self) -> Self:
        return self

    async def close(self) -> None:
        self._sock.close()

    async def getpeername(self) -> Any:
        return self._peer

    async def getsockname(self) -> Any:
        return self._sock.getsockname()

    async def sendto(self, what: bytes, _destination: Any, timeout: float | None) -> int:  # noqa: ASYNC109 dnspython's
        await self.sendall(what, timeout)
        return len(what)

    async def recvfrom(self, size: int, timeout: float | None) -> tuple[bytes, Any]:  # noqa: ASYNC109
        return await self.recv(size, timeout), self._peer

    async def sendall(self, what: bytes, timeout: float | None) -> None:  # noqa: ASYNC109
        async with _limit(timeout):
            await self._loop.sock_sendall(self._sock, what)

    async def recv(self, size: int, timeout: float | None) -> bytes:  # noqa: ASYNC109
        async with _limit(timeout):
            return await self._loop.sock_recv(self._sock, size)


@contextlib.asynccontextmanager
async def _limit(seconds: float | None) -> AsyncIterator[None]:
    """A time limit that dnspython understands."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise dns.exception.Timeout from None


class Backend(dns._asyncbackend.Backend):
    """What dnspython asks for sockets and pauses."""

    def name(self) -> str:
        return "asyncio"

    def datagram_connection_required(self) -> bool:
        return True  # so that it tells whom a socket is for

    async def sleep(self, interval: float) -> None:
        await asyncio.sleep(interval)

    async def make_socket(
        self,
        af: int,
        socktype: int,
        proto: int = 0,
        source: Any = None,
        destination: Any = None,
        timeout: float | None = None,  # noqa: ASYNC109
        ssl_context: Any = None,
        server_hostname: Any = None,
    ) -> Connection:
        """Raises `OSError` and `dns.exception.Timeout`."""
        sock = socket.socket(af, socktype, proto)
        try:
            sock.setblocking(False)
            async with _limit(timeout):
                await asyncio.get_running_loop().sock_connect(sock, destination)
            return Connection(sock, destination)
        except BaseException:
            sock.close()
            raise
