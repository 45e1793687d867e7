"""What the process asks of its kernel and its C library. Knows nothing of requests."""

import asyncio
import contextlib
import ctypes
import gc
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transport import descriptors

Paused = Callable[[tuple[str], float], None]
"""Hears for how many seconds the loop stood still for `generation_0`, `generation_1` or `generation_2` of the
collector of cycles, or for `trim`, the giving back of free pages."""

M_MMAP_THRESHOLD = -3  # glibc's malloc.h
GIVE_BACK_EVERY_S = 60.0
COLLECT_ALL_EVERY_S = 3600.0
MANY_CYCLES = 5_000
YOUNG = 10_000
"""Objects of which the youngest generation is collected: 1.3 ms if all of them live on."""
YOUNG_TO_MIDDLE = 25
NEVER = 1 << 30
LOOK_AT_DESCRIPTORS_EVERY_S = 1.0
"""3 µs for a look."""


def raise_descriptor_limit() -> None:
    """Every stream needs two descriptors; the soft limit of a container is often 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def give_large_blocks_back() -> None:
    """For TLS, of which uvloop keeps 256 KiB for each connection. glibc would soon serve them from the heap
    (mallopt(3): its threshold for blocks of their own grows), where they leave holes: 84 MiB and rising after
    12,000 requests of a storm, in place of 57."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 131072)


def unfilled(size: int) -> bytearray:
    """`size` bytes of whatever was there before, for one who fills all of them: zeroes written first would cost a
    twentieth of an 8 MB request's CPU, and memory for what may never come."""
    return _new_bytearray(None, size)  # type: ignore[no-any-return]


_new_bytearray = ctypes.pythonapi.PyByteArray_FromStringAndSize
_new_bytearray.argtypes = (ctypes.c_char_p, ctypes.c_ssize_t)
_new_bytearray.restype = ctypes.py_object


def give_free_memory_back() -> None:
    """Pages of the heap that hold nothing. glibc gives back its end only (malloc_trim(3)): what bodies of all sizes
    leave between what lives longer would stay, 1 MiB more with every hour of a storm and 25 after a large body."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


class Tidying:
    """Looks after what the collector and the C library keep, and tells how long that took."""

    def __init__(self, paused: Paused) -> None:
        self._paused = paused
        self._began = 0.0
        self._cycles = 0
        """Objects that the collector has found to be garbage since it last looked at all."""

    async def run(self) -> None:
        """0.3 ms a minute where there is little to give, about 1 ms for each megabyte.

        Cycles first, where faults have made many: those that grew old (a sawtooth of 1.5 MiB in five minutes of a
        storm, and what it reaches once stays resident). A full collection looks at all that lives: with 2,000
        streams all of them would wait for it, 65 ms.
        """
        gc.callbacks.append(self._collecting)
        try:
            collected_at = time.monotonic()
            while True:
                await asyncio.sleep(GIVE_BACK_EVERY_S)
                if self._cycles >= MANY_CYCLES or time.monotonic() - collected_at >= COLLECT_ALL_EVERY_S:
                    gc.collect()
                    collected_at, self._cycles = time.monotonic(), 0
                began = time.perf_counter()
                give_free_memory_back()
                self._paused(("trim",), time.perf_counter() - began)
        finally:
            gc.callbacks.remove(self._collecting)

    def _collecting(self, phase: str, info: dict[str, Any]) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._began = now
        else:
            self._cycles += info["collected"]
            self._paused((f"generation_{info['generation']}",), now - self._began)


async def watch_descriptors() -> None:
    """Where none is left, nobody but this says so of clients that are turned away."""
    while True:
        descriptors.look()
        await asyncio.sleep(LOOK_AT_DESCRIPTORS_EVERY_S)


def settle() -> None:
    """Everything that lives as long as the process has been made."""
    gc.collect()
    give_free_memory_back()  # what reading the code took
    gc.freeze()  # what lives as long as the process need not be looked through again
    # Requests free themselves, cycles are the exception (faults). What is under way during a collection grows
    # old by it, so the old must be looked at too, or memory creeps (e2e/soak.py): `Tidying` does it.
    gc.set_threshold(YOUNG, YOUNG_TO_MIDDLE, NEVER)


def resident_bytes(pid: int | str = "self") -> int:
    """What a process has in memory, 0 if the kernel does not tell (Linux: proc(5), statm)."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * resource.getpagesize()
