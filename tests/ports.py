"""Ports for what tests and rigs start: nobody listens on them, and none is given twice by one process.

They lie below the kernel's ephemeral ones: while an engine is away no outgoing connection can take its port. And
what a sidecar remembers of an engine that has gone does not meet another at its address. Standard library only.
"""

from __future__ import annotations

import random
import socket
import threading
from pathlib import Path

PORTS = range(10000, 32000)
HAS_IPV6 = Path("/proc/net/if_inet6").exists()
_ATTEMPTS = 1000
_given: set[int] = set()
_lock = threading.Lock()
_draw = random.Random()  # another order in every process, whatever tests seed


def free_ports(count: int = 1) -> int:
    """The first of `count` ports in a row. RuntimeError if there are none."""
    with _lock:
        if len(_given) > len(PORTS) // 2:
            _given.clear()  # those of long ago
        for _ in range(_ATTEMPTS):
            first = _draw.choice(PORTS[:-count])
            ports = range(first, first + count)
            if _given.isdisjoint(ports) and all(map(bindable, ports)):
                _given.update(ports)
                return first
    raise RuntimeError(f"ports: no {count} in a row are free between {PORTS.start} and {PORTS.stop}")


def bindable(port: int) -> bool:
    """Whether nobody listens on it, at any address of this machine."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            probe = socket.socket(family)
        except OSError:  # a machine without that family
            continue
        with probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind(("", port))
            except OSError:
                return False
    return True
