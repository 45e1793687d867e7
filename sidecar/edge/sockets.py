"""What the kernel is told of a client's socket."""

import asyncio
import socket
import struct

KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 60, 15, 4

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


def keep_alive(transport: asyncio.BaseTransport) -> None:
    """A client whose host vanished sends nothing: without probes its stream would go on for ever."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        for option, value in (
            (socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S),
            (socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S),
            (socket.TCP_KEEPCNT, KEEPALIVE_PROBES),
        ):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def reset_on_close(transport: asyncio.BaseTransport) -> None:
    """Closing will look like breaking off (RST), not like an orderly end."""
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
