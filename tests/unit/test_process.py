"""What is asked of the C library."""

import asyncio
import subprocess
import sys
import weakref

import pytest

from sidecar import process

HOLES = """
from pathlib import Path
from sidecar import process

def rss_kib():
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])

kept = [bytearray(60_000 if number % 2 else 700) for number in range(600)]
for number in range(1, 600, 2):
    kept[number] = None
before = rss_kib()
process.give_free_memory_back()
print(before - rss_kib())
"""


def test_holes_in_the_heap_are_given_back() -> None:
    """18 MB of them, each behind something that stays."""
    done = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 10_000


class Cycle:
    """Keeps itself."""

    itself: object


def test_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[None] = []
    cycle = Cycle()
    cycle.itself, gone = cycle, weakref.ref(cycle)
    del cycle

    def note() -> None:
        times.append(None)
        if len(times) == 3:
            raise InterruptedError

    monkeypatch.setattr(process, "GIVE_BACK_EVERY_S", 0.001)
    monkeypatch.setattr(process, "give_free_memory_back", note)
    with pytest.raises(InterruptedError):
        asyncio.run(asyncio.wait_for(process.keep_giving_back(), 10))
    assert gone() is None
