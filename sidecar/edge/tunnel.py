"""After a 101: bytes both ways until either side ends. Knows nothing of what they mean."""

import asyncio
from collections.abc import Callable


class TunnelEnd(asyncio.Protocol):
    """One end; writes what it receives to the other, with back-pressure and half-close."""

    def __init__(self, own: asyncio.Transport, peer: asyncio.Transport, ended: Callable[[], None]) -> None:
        self._own = own
        self._peer = peer
        self._ended = ended

    def data_received(self, data: bytes) -> None:
        self._peer.write(data)

    def eof_received(self) -> bool:
        if self._peer.can_write_eof() and not self._peer.is_closing():
            self._peer.write_eof()
            return True
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None:
            self._peer.close()
        else:
            self._peer.abort()
        self._ended()

    def pause_writing(self) -> None:
        self._peer.pause_reading()

    def resume_writing(self) -> None:
        self._peer.resume_reading()


def join(client: asyncio.Transport, engine: asyncio.Transport, ended: Callable[[], None]) -> None:
    """Makes one tunnel of two connections. `ended` is called once for each end."""
    client.set_protocol(TunnelEnd(client, engine, ended))
    engine.set_protocol(TunnelEnd(engine, client, ended))
