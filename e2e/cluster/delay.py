"""A line that takes its time: frames between a bridge and a pod, each held back for as long as one likes.

Two TAP devices and a thread between them, for kernels without netem. Must not know what the frames hold.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from e2e.cluster.network import Namespace

TUNSETIFF = 0x400454CA  # linux/if_tun.h
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
FRAME = 65536


def _tap(namespace: Namespace, name: str) -> int:
    """A new device in there; what is written comes out of it."""
    with namespace.entered():
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return descriptor


class Line:
    """Between a device `outer` there and a device `inner` here."""

    def __init__(self, there: Namespace, outer: str, here: Namespace, inner: str) -> None:
        self.seconds = 0.0
        """That a frame takes, either way."""
        self._ends = (_tap(there, outer), _tap(here, inner))
        self._wakes, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._carry, name=f"line {outer}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.close(self._waker)
        self._thread.join()
        for descriptor in (*self._ends, self._wakes):
            os.close(descriptor)

    def _carry(self) -> None:
        other = dict(zip(self._ends, reversed(self._ends), strict=True))
        under_way: deque[tuple[float, int, bytes]] = deque()
        while True:
            wait = max(under_way[0][0] - time.monotonic(), 0.0) if under_way else None
            ready = select.select([*self._ends, self._wakes], [], [], wait)[0]
            if self._wakes in ready:
                return
            for descriptor in ready:
                with contextlib.suppress(BlockingIOError):
                    while True:
                        under_way.append(
                            (time.monotonic() + self.seconds, other[descriptor], os.read(descriptor, FRAME))
                        )
            while under_way and under_way[0][0] <= time.monotonic():
                _, out, frame = under_way.popleft()
                with contextlib.suppress(OSError):  # a queue that is full loses frames, as lines do
                    os.write(out, frame)
