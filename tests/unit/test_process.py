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
    ("old_ones", "every_s", "collected"),
    [
        pytest.param(True, 3600.0, True, id="many have grown old"),
        pytest.param(False, 0.0, True, id="the hour is over"),
        pytest.param(False, 3600.0, False, id="neither: all that lives need not be looked through"),
    ],
)
def test_now_and_then(monkeypatch: pytest.MonkeyPatch, old_ones: bool, every_s: float, collected: bool) -> None:
    times: list[None] = []
    paused: list[str] = []

    def note() -> None:
        times.append(None)
        if len(times) == 3:
            raise InterruptedError

    monkeypatch.setattr(process, "GIVE_BACK_EVERY_S", 0.001)
    monkeypatch.setattr(process, "COLLECT_ALL_EVERY_S", every_s)
    monkeypatch.setattr(process, "give_free_memory_back", note)
    gc.collect()
    gone = cycle()
    if old_ones:
        gc.collect(1)
        assert gone() is None, "a young one is found by itself"
        gone = cycle()
    with pytest.raises(InterruptedError):
        asyncio.run(
            asyncio.wait_for(process.keep_giving_back(lambda labels, seconds: paused.append(labels[0])), 10)
        )
    assert (gone() is None) is collected
    assert paused == ["trim", "trim"]


def test_collections_are_timed() -> None:
    found: list[tuple[str, float]] = []
    process.time_collections(lambda labels, seconds: found.append((labels[0], seconds)))
    try:
        gc.collect(1)
        gc.collect()
    finally:
        gc.callbacks.pop()
    assert [cause for cause, _ in found] == ["generation_1", "generation_2"]
    assert all(0 < seconds < 10 for _, seconds in found)
