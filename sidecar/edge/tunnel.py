"""After a 101: bytes both ways until either side ends. Knows nothing of what they mean."""

import asyncio
from collections.abc import Callable


class TunnelEnd(asyncio.Protocol):
    """One end; writes what it receives to the other, with back-pressure and half-close."""

    def __init__(self, own: asyncio.Transport, ended: Callable[[], None]) -> None:
        self._own = own
        self._ended = ended
        self.peer: TunnelEnd | None = None
        self._half_closed = False
        """Nothing more comes from this side."""

    def write(self, data: bytes) -> None:
        if not self._own.is_closing():
            self._own.write(data)

    def data_received(self, data: bytes) -> None:
        if self.peer is not None:
            self.peer.write(data)

    def eof_received(self) -> bool:
        self._half_closed = True
        peer = self.peer
        if peer is None or peer._half_closed or not (self._own.can_write_eof() and peer._own.can_write_eof()):
            # Both sides have ended, or one speaks TLS, which knows no half-closed connection: closes this one, and
            # `connection_lost` the other.
            return False
        peer.half_close()
        return True

    def half_close(self) -> None:
        if self._own.can_write_eof() and not self._own.is_closing():
            self._own.write_eof()

    def connection_lost(self, exc: Exception | None) -> None:
        peer, self.peer = self.peer, None
        if peer is not None:
            peer.close(at_once=exc is not None)
        self._ended()

    def close(self, *, at_once: bool) -> None:
        if at_once:
            self._own.abort()
        else:
            self._own.close()

    def pause_writing(self) -> None:
        if self.peer is not None:
            self.peer._own.pause_reading()

    def resume_writing(self) -> None:
        if self.peer is not None:
            self.peer._own.resume_reading()


def join(client: asyncio.Transport, engine: asyncio.Transport, ended: Callable[[], None]) -> None:
    """Makes one tunnel of two connections. `ended` is called once for each end."""
    near, far = TunnelEnd(client, ended), TunnelEnd(engine, ended)
    near.peer, far.peer = far, near
    client.set_protocol(near)
    engine.set_protocol(far)
