"""A network of one wire: here and the prefill engine's namespace, and between the two whatever a scenario wants.

Two TUN devices, joined by a process that passes packets on, late, not all, or not at all. (Kernels often come
without netem, and chance drawn here follows the seed.) It needs root, /dev/net/tun and `ip`. It must not know
scenarios.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

NEAR, FAR = "10.77.0.1", "10.77.0.2"
"""Addresses of this side and of the prefill engine."""
MTU = 1500  # as outside: a large one would make of 5 % of the packets much more of the bytes
TUN = Path("/dev/net/tun")
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
CLONE_NEWNET = 0x40000000
TCP = 6
QUEUE = 100_000
"""Packets that can be under way; more than a window of TCP."""
INSIDE = "PD_E2E_IN_NAMESPACE"


@dataclass(frozen=True)
class Weather:
    """What the wire does to packets, in both directions."""

    loss: float = 0.0
    """Share that is lost."""
    delay_s: float = 0.0
    """One way."""
    blocked: tuple[int, ...] = ()
    """TCP ports of the far side; nothing of theirs passes."""
    blocked_but: tuple[int, ...] | None = None
    """Nothing but these passes."""
    dead: bool = False
    """Nothing passes."""


CLEAR = Weather()


class Wire:
    """Both ends of the wire and the namespace of the far one, as long as the block lasts."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._process: subprocess.Popen[str] | None = None

    @property
    def netns(self) -> str:
        """The far side's namespace."""
        assert self._process is not None
        return f"/proc/{self._process.pid}/ns/net"

    def set(self, weather: Weather) -> None:
        """From now on."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(weather)) + "\n")
        self._process.stdin.flush()
        self._heard()

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "e2e.faults.wire", str(self._seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._heard()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _heard(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ok\n":
            raise RuntimeError(f"wire: it ended with {self._process.wait()}; its error is above")


def missing() -> str:
    """What a wire needs and is not here, "" if all is."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    if not TUN.exists():
        return f"needs {TUN}"
    if not (shutil.which("ip") and shutil.which("unshare")):
        return "needs ip and unshare (iproute2, util-linux)"
    return ""


def enter_namespace(command: list[str]) -> None:
    """This process becomes `command` in a network namespace of its own, if it is not that already."""
    if os.environ.get(INSIDE):
        return
    script = 'mount -t sysfs sysfs /sys && ip link set lo up && exec "$@"'  # UCX looks for devices in /sys
    inside = ["unshare", "--net", "--mount", "--", "sh", "-c", script, "sh", *command]
    sys.stdout.flush()
    os.execvpe(inside[0], inside, {**os.environ, INSIDE: "1"})


# ------------------------------------------------------------------- the process


def _tun(name: str, address: str) -> int:
    descriptor = os.open(TUN, os.O_RDWR)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22s", name.encode(), IFF_TUN | IFF_NO_PI, b""))
    for words in (["addr", "add", f"{address}/24", "dev", name], ["link", "set", name, "mtu", str(MTU), "up"]):
        subprocess.run(["ip", *words], check=True)
    return descriptor


def _ports(packet: bytes) -> tuple[int, int] | None:
    """Source and destination port of a TCP packet over IPv4."""
    if packet[0] >> 4 != 4 or packet[9] != TCP:
        return None
    at = (packet[0] & 15) * 4
    source, destination = struct.unpack_from("!HH", packet, at)
    return source, destination


def stops(weather: Weather, packet: bytes, *, from_far: bool) -> bool:
    """Whether a packet of that direction does not pass at all; the far side's ports count."""
    if weather.dead:
        return True
    ports = _ports(packet)
    if ports is None:
        return False
    port = ports[0] if from_far else ports[1]
    return port in weather.blocked or (weather.blocked_but is not None and port not in weather.blocked_but)


class _Passing:
    """What becomes of each packet."""

    def __init__(self, near: int, far: int, seed: int) -> None:
        self._other = {near: far, far: near}
        self._far = far
        self._chance = random.Random(seed)
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self._count = 0
        self.weather = CLEAR

    def run(self) -> None:
        """Until standard input ends."""
        ends = list(self._other)
        unread = b""
        while True:
            wait_s = max(0.0, self._under_way[0][0] - time.monotonic()) if self._under_way else None
            for one in select.select([0, *ends], [], [], wait_s)[0]:
                if one:
                    self._take(one)
                    continue
                if not (said := os.read(0, 65536)):
                    return
                *lines, unread = (unread + said).split(b"\n")
                for line in lines:
                    self.weather = Weather(**json.loads(line))
                    print("ok", flush=True)
            while self._under_way and self._under_way[0][0] <= time.monotonic():
                _, _, end, packet = heapq.heappop(self._under_way)
                _write(end, packet)

    def _take(self, end: int) -> None:
        packet = os.read(end, MTU + 100)
        weather = self.weather
        if stops(weather, packet, from_far=end == self._far) or self._chance.random() < weather.loss:
            return
        if not weather.delay_s and not self._under_way:
            _write(self._other[end], packet)
        elif len(self._under_way) < QUEUE:
            self._count += 1
            due = time.monotonic() + weather.delay_s
            heapq.heappush(self._under_way, (due, self._count, self._other[end], packet))


def _write(end: int, packet: bytes) -> None:
    try:
        os.write(end, packet)
    except OSError as error:  # a device without room is a packet lost, as everywhere
        print(f"wire: {error}", file=sys.stderr)


def main() -> None:
    near = _tun("pd-near", NEAR)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    far = _tun("pd-far", FAR)
    print("ok", flush=True)
    _Passing(near, far, int(sys.argv[1])).run()


if __name__ == "__main__":
    main()
