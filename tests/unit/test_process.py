"""What is asked of the C library and of the collector."""

import asyncio
import gc
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


def cycle() -> weakref.ref[Cycle]:
    one = Cycle()
    one.itself = one
    return weakref.ref(one)


@pytest.mark.parametrize(
    ("cycles", "every_s", "collected"),
    [
        pytest.param(3, 3600.0, True, id="there were cycles"),
        pytest.param(0, 0.0, True, id="the hour is over"),
        pytest.param(0, 3600.0, False, id="neither: all that lives need not be looked through"),
    ],
)
def test_now_and_then(monkeypatch: pytest.MonkeyPatch, cycles: int, every_s: float, collected: bool) -> None:
    found: list[tuple[str, float]] = []

    async def three_times() -> None:
        enough = asyncio.Event()

        def paused(labels: tuple[str], seconds: float) -> None:
            found.append((labels[0], seconds))
            if sum(cause == "trim" for cause, _ in found) == 3:
                enough.set()

        tidying = asyncio.ensure_future(process.Tidying(paused).run())
        await asyncio.sleep(0)  # it begins
        for _ in range(cycles):
            cycle()
        gc.collect(0)
        await enough.wait()
        tidying.cancel()
        await asyncio.wait([tidying])

    monkeypatch.setattr(process, "GIVE_BACK_EVERY_S", 0.001)
    monkeypatch.setattr(process, "MANY_CYCLES", 3)
    monkeypatch.setattr(process, "COLLECT_ALL_EVERY_S", every_s)
    old = cycle()
    gc.freeze()
    gc.unfreeze()  # into the oldest generation
    callbacks = list(gc.callbacks)
    asyncio.run(three_times())
    assert (old() is None) is collected
    assert gc.callbacks == callbacks
    causes = [cause for cause, _ in found]
    assert "generation_0" in causes
    assert ("generation_2" in causes) is collected
    assert all(0 < seconds < 10 for _, seconds in found)
