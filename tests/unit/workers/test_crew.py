"""What the hub does about workers that hang, without waiting for one."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from sidecar.background import Background
from sidecar.workers import crew, messages
from sidecar.workers.crew import Crew, Seat, Standing
from sidecar.workers.totals import Totals


class Process:
    pid = 7
    killed = 0

    def poll(self) -> int:
        return -9

    def kill(self) -> None:
        self.killed += 1


class Ears:
    """Hears nothing."""

    def closed(self, worker: int) -> None: ...


def hung(standing: Standing, silent_s: float, missed: int) -> int:
    """How often a worker that last answered so long ago, and not so many questions since, is ended."""
    process = Process()
    seat = Seat(1, process=process, standing=standing, missed=missed)  # type: ignore[arg-type]
    seat.answered_at = time.monotonic() - silent_s
    Crew._end_if_hung(None, seat)  # type: ignore[arg-type]
    return process.killed


@pytest.mark.parametrize(
    ("standing", "silent_s", "missed", "ended"),
    [
        (Standing.SERVING, crew.SILENT_FOR_S + 1, 9, 0),
        (Standing.SILENT, crew.SILENT_FOR_S - 5, 9, 0),
        (Standing.SILENT, crew.SILENT_FOR_S + 1, crew.MISSED_TO_END, 1),
        (Standing.SILENT, 3600, 1, 0),  # the whole container was frozen: the hub did not ask either
        (Standing.DOWN, crew.SILENT_FOR_S + 1, 9, 0),
    ],
)
def test_only_who_is_silent_for_long_is_ended(standing: Standing, silent_s: float, missed: int, ended: int) -> None:
    assert hung(standing, silent_s, missed) == ended


def test_questions_missed_in_a_row_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "ANSWER_WITHIN_S", 0.01)

    async def scene() -> list[int]:
        ears: Any = Ears()
        link: Any = type("Link", (), {"send": lambda _self, _message: None})()
        one = Crew(Background(), ears, 1, 0, 1.0)
        seat = one.seats[0]
        seat.link, seat.standing = link, Standing.SERVING
        counts = []
        for _ in range(2):
            await one.ask(decisions=False)
            counts.append(seat.missed)
        one._heard(seat, messages.Report(0, Totals(), b""))
        return [*counts, seat.missed]

    assert asyncio.run(scene()) == [1, 2, 0]


def test_one_that_reads_nothing_is_ended_before_its_messages_fill_memory() -> None:
    class Full:
        unsent_bytes = crew.MAX_UNSENT_BYTES + 1

    process: Any = Process()
    link: Any = Full()
    seat = Seat(1, process=process, link=link, standing=Standing.SILENT, answered_at=time.monotonic())
    Crew._end_if_hung(None, seat)  # type: ignore[arg-type]
    assert process.killed == 1


def test_late_answers_are_not_for_a_successor() -> None:
    """A process that takes a dead one's seat counts its questions from one, too."""
    first, second = [], []
    old: Any = type("Old", (), {"send": staticmethod(first.append)})
    new: Any = type("New", (), {"send": staticmethod(second.append)})
    held: Any = type("Held", (), {"seats": [Seat(1, link=old)]})
    send = Crew.way_to(held, 1)
    held.seats[0].link = new
    send(messages.Answered(5, ""))
    assert (len(first), len(second)) == (1, 0)
    held.seats[0].link = None
    Crew.way_to(held, 1)(messages.Answered(5, ""))
    assert not second


def hung_crew(*seats: Seat) -> Any:
    return type("Held", (), {"seats": seats, "_has_served": True})


def test_readiness_outlives_a_late_answer() -> None:
    """Not ready only if nobody serves: all are down, or have been silent for long."""
    now = time.monotonic()
    problem = Crew.problem.fget
    assert problem is not None
    down = Seat(1)
    late = Seat(2, standing=Standing.SILENT, answered_at=now - 1)
    stopped = Seat(2, standing=Standing.SILENT, answered_at=now - crew.UNREADY_AFTER_S - 1)
    assert problem(hung_crew(down, Seat(2, standing=Standing.SERVING))) == ""
    assert problem(hung_crew(down, late)) == ""
    assert problem(hung_crew(down, stopped)) == "no worker answers"
    assert problem(hung_crew(down, down)) == "no worker serves"


def test_names_of_ends() -> None:
    assert crew._told(3) == "exit code 3"
    assert crew._told(-9) == "SIGKILL"
    assert crew._told(-63) == "signal 63"


def test_nobody_is_started_while_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that had died just before the signal, and whose pause is over after it."""
    spawned = []
    ears: Any = Ears()

    async def scene() -> None:
        one = Crew(Background(), ears, 1, 0, 1.0)
        seat = one.seats[0]
        process: Any = Process()
        seat.process = process
        seat.gone.set()

        async def spawn(_self: Crew, seat: Seat) -> None:
            spawned.append(seat.number)
            raise OSError(0, "not here")

        monkeypatch.setattr(Crew, "_spawn", spawn)
        monkeypatch.setattr(crew, "FIRST_PAUSE_S", 0.05)
        care = asyncio.ensure_future(one._care(seat))
        await asyncio.sleep(0.02)
        await one.drain(lambda: None)
        await asyncio.sleep(0.1)
        care.cancel()

    asyncio.run(scene())
    assert not spawned
