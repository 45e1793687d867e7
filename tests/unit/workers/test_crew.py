"""What the hub does about workers that hang, without waiting for one."""

from __future__ import annotations

import time
from typing import Any

import pytest

from sidecar.workers import crew
from sidecar.workers.crew import Crew, Seat, Standing


class Process:
    pid = 7
    killed = 0

    def kill(self) -> None:
        self.killed += 1


def hung(standing: Standing, silent_s: float) -> int:
    """How often a worker that last answered so long ago is ended."""
    process = Process()
    seat = Seat(1, process=process, standing=standing, answered_at=time.monotonic() - silent_s)  # type: ignore[arg-type]
    Crew._end_if_hung(None, seat)  # type: ignore[arg-type]
    return process.killed


@pytest.mark.parametrize(
    ("standing", "silent_s", "ended"),
    [
        (Standing.SERVING, crew.SILENT_FOR_S + 1, 0),
        (Standing.SILENT, crew.SILENT_FOR_S - 5, 0),
        (Standing.SILENT, crew.SILENT_FOR_S + 1, 1),
        (Standing.DOWN, crew.SILENT_FOR_S + 1, 0),
    ],
)
def test_only_who_is_silent_for_long_is_ended(standing: Standing, silent_s: float, ended: int) -> None:
    assert hung(standing, silent_s) == ended


def test_one_that_reads_nothing_is_ended_before_its_messages_fill_memory() -> None:
    class Full:
        unsent_bytes = crew.MAX_UNSENT_BYTES + 1

    process: Any = Process()
    link: Any = Full()
    seat = Seat(1, process=process, link=link, standing=Standing.SILENT, answered_at=time.monotonic())
    Crew._end_if_hung(None, seat)  # type: ignore[arg-type]
    assert process.killed == 1


def test_names_of_ends() -> None:
    assert crew._told(3) == "exit code 3"
    assert crew._told(-9) == "SIGKILL"
    assert crew._told(-63) == "signal 63"
