"""The worker processes as the hub sees them: started, heard, asked, started again when they die, ended.

Knows nothing of endpoints or requests: what workers tell goes to `Ears`.
"""

import asyncio
import logging
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, Protocol

import msgspec

from sidecar.background import Background
from sidecar.log import Limited
from sidecar.workers import messages
from sidecar.workers.link import Link
from sidecar.workers.totals import Totals, combined

_log = logging.getLogger("sidecar")

ANSWER_WITHIN_S = 0.5
"""Of a worker that is asked for its numbers. Whoever scrapes waits no longer than a few seconds for all."""
LOOK_EVERY_S = 5.0
UNREADY_AFTER_S = 10.0
"""All of them may be late once, on a machine that is busy with something else."""
SILENT_FOR_S = 20.0
"""A worker that has not answered for so long is ended: the kernel deals it connections for as long as it lives."""
MISSED_TO_END = 3
"""Questions in a row. The time alone says nothing where all of us were frozen: nobody had asked."""
START_WITHIN_S = 60.0
"""It takes one on an idle core."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 30.0
WELL_AFTER_S = 30.0
"""A worker that lived for so long is started again without delay."""
EXIT_WITHIN_S = 3.0
"""Of a worker that has closed its socket; the last traces may take two (tracing/tracer.py)."""
MAX_UNSENT_BYTES = 8 << 20
DECISIONS_SHOWN = 256

_DECODER = msgspec.msgpack.Decoder(messages.ToHub)


class Ears(Protocol):
    """Who hears the workers."""

    def welcome(self, worker: int) -> messages.Welcome: ...

    def opened(self, worker: int) -> None:
        """It has been welcomed."""

    def serves(self, worker: int) -> None:
        """Its ports are open."""

    def heard(self, worker: int, message: messages.ToHub) -> None: ...

    def closed(self, worker: int) -> None:
        """Its process has ended."""


class Standing(StrEnum):
    """Also the label of the metric `workers`."""

    SERVING = "serving"
    SILENT = "silent"
    """It has not answered when it was last asked."""
    DOWN = "down"
    """It is starting, or about to be started again."""


@dataclass(eq=False, slots=True)
class Seat:
    """The place of one worker; the processes that take it come and go."""

    number: int
    process: subprocess.Popen[bytes] | None = None
    link: Link[messages.ToHub] | None = None
    served: asyncio.Future[str] | None = None
    """"" once the process serves, or what is wrong."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """The process has closed its socket."""
    standing: Standing = Standing.DOWN
    answered_at: float = 0.0
    asked: dict[int, asyncio.Future[None]] = field(default_factory=dict)
    totals: Totals = field(default_factory=Totals)
    """What the process told last."""
    kept: Totals = field(default_factory=Totals)
    """What those before it had counted when they died."""
    decisions: bytes = b""
    deaths: int = 0
    silences: int = 0
    """Times that it was asked and did not answer."""
    missed: int = 0
    """The same in a row, by this process."""

    @property
    def name(self) -> str:
        return f"worker {self.number} (pid {self.process.pid})" if self.process else f"worker {self.number}"


class Crew:
    """`count` workers, numbered from 1. `inherited`: descriptor that they get."""

    def __init__(
        self, background: Background, ears: Ears, count: int, inherited: int, drain_timeout_s: float
    ) -> None:
        self._background = background
        self._ears = ears
        self._inherited = inherited
        self._drain_timeout_s = drain_timeout_s
        self._loop = asyncio.get_running_loop()
        self._questions = 0
        self._limited = Limited(_log)
        self._ending = False
        self._has_served = False
        self.seats = [Seat(number) for number in range(1, count + 1)]

    # -- start ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Returns when all of them serve. Raises `OSError` if one cannot."""
        for seat in self.seats:
            await self._spawn(seat)
        for seat in self.seats:
            problem = await self._served(seat)
            if self._ending:  # a signal came first
                return
            if problem:
                raise OSError(0, problem)
        self._has_served = True
        for seat in self.seats:
            self._background.keep(f"care for worker {seat.number}", partial(self._care, seat))
        self._background.keep("watch over workers", self._watch)

    async def _spawn(self, seat: Seat) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            seat.process = _launched(theirs.fileno(), self._inherited)
        seat.served = served = self._loop.create_future()
        seat.gone.clear()

        def heard(message: messages.ToHub) -> None:
            self._heard(seat, message)

        def lost() -> None:
            seat.gone.set()
            if not served.done():
                served.set_result(f"{seat.name} ended before it served")

        seat.link = link = Link(_DECODER, heard, lost)
        ours.setblocking(False)
        await self._loop.create_unix_connection(lambda: link, sock=ours)
        link.send(self._ears.welcome(seat.number))
        self._ears.opened(seat.number)

    def _heard(self, seat: Seat, message: messages.ToHub) -> None:
        match message:
            case messages.Serves():
                assert seat.served is not None
                if not message.problem:
                    seat.standing, seat.answered_at, seat.missed = Standing.SERVING, time.monotonic(), 0
                if not seat.served.done():
                    seat.served.set_result(message.problem)
                if not message.problem:
                    self._ears.serves(seat.number)
            case messages.Report():
                seat.totals, seat.answered_at, seat.missed = message.totals, time.monotonic(), 0
                if message.decisions:
                    seat.decisions = message.decisions
                if seat.standing is Standing.SILENT:
                    seat.standing = Standing.SERVING
                    _log.info("%s answers again", seat.name)
                asked = seat.asked.pop(message.question, None)
                if asked is not None and not asked.done():
                    asked.set_result(None)
            case _:
                self._ears.heard(seat.number, message)

    def send(self, worker: int, message: msgspec.Struct) -> None:
        seat = self.seats[worker - 1]
        if seat.link is not None:
            seat.link.send(message)

    def way_to(self, worker: int) -> Callable[[msgspec.Struct], None]:
        """How to send to the process that has the seat now, and never to its successor."""
        link = self.seats[worker - 1].link
        return link.send if link is not None else _unsent

    def send_all(self, message: msgspec.Struct) -> None:
        for seat in self.seats:
            self.send(seat.number, message)

    # -- while they live -----------------------------------------------------------------------------------

    async def _care(self, seat: Seat) -> None:
        """Waits for the end of each of the seat's processes and starts the next one."""
        pause_s = FIRST_PAUSE_S
        began = time.monotonic()
        while True:
            await seat.gone.wait()
            code = await self._ended(seat)
            if not self._ending:
                seat.deaths += 1
                pause_s = FIRST_PAUSE_S if time.monotonic() - began >= WELL_AFTER_S else pause_s
                said = seat.served.result() if seat.served is not None and seat.served.done() else ""
                _log.error("%s ended: %s; started again in %g s", seat.name, said or _told(code), pause_s)
                await asyncio.sleep(pause_s)
            if self._ending:
                return
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            began = time.monotonic()
            try:
                await self._spawn(seat)
            except OSError as error:
                _log.error("worker %d cannot be started: %s", seat.number, error.strerror or error)
                seat.gone.set()
                continue
            if not await self._served(seat):
                _log.info("%s serves", seat.name)

    @staticmethod
    async def _served(seat: Seat) -> str:
        """ "" once the seat's process serves, or why it never will."""
        assert seat.served is not None
        assert seat.process is not None
        try:
            async with asyncio.timeout(START_WITHIN_S):
                return await asyncio.shield(seat.served)
        except TimeoutError:
            seat.process.kill()
            return f"{seat.name} did not serve within {START_WITHIN_S:g} s"

    async def _ended(self, seat: Seat) -> int:
        """Waits for the process, whose socket is closed; everything that it had is given back. Returns its code."""
        process = seat.process
        assert process is not None
        code = await _ended(process, time.monotonic() + EXIT_WITHIN_S)
        seat.standing, seat.link = Standing.DOWN, None
        seat.kept = combined(seat.kept, seat.totals)
        seat.totals, seat.decisions = Totals(), b""
        for asked in seat.asked.values():
            asked.cancel()
        seat.asked.clear()
        self._ears.closed(seat.number)
        return code

    async def _watch(self) -> None:
        """Ends workers that do not turn their loop any more, and keeps what others have counted."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self.ask(decisions=False)
            for seat in self.seats:
                self._end_if_hung(seat)

    def _end_if_hung(self, seat: Seat) -> None:
        if seat.standing is not Standing.SILENT or seat.process is None:
            return
        silent_s = time.monotonic() - seat.answered_at
        unsent = seat.link.unsent_bytes if seat.link is not None else 0
        is_hung = silent_s >= SILENT_FOR_S and seat.missed >= MISSED_TO_END
        if is_hung or unsent > MAX_UNSENT_BYTES:
            _log.error("%s has not answered for %.0f s: ended", seat.name, silent_s)
            seat.process.kill()

    async def ask(self, *, decisions: bool) -> None:
        """Has every worker report; waits a limited time for those that do not."""
        asked: dict[asyncio.Future[None], Seat] = {}
        for seat in self.seats:
            if seat.standing is not Standing.DOWN and seat.link is not None:
                self._questions += 1
                answer = seat.asked[self._questions] = self._loop.create_future()
                asked[answer] = seat
                seat.link.send(messages.Tell(self._questions, decisions))
        if not asked:
            return
        _, late = await asyncio.wait(asked, timeout=ANSWER_WITHIN_S)
        for answer in late:
            seat = asked[answer]
            seat.asked = {number: one for number, one in seat.asked.items() if one is not answer}
            seat.decisions = b""
            if seat.standing is not Standing.DOWN:
                seat.silences += 1
                seat.missed += 1
                seat.standing = Standing.SILENT
                self._limited.warning(
                    f"silent {seat.number}",
                    "%s does not answer within %g s: its last numbers stand for it",
                    seat.name,
                    ANSWER_WITHIN_S,
                )

    # -- what is shown -------------------------------------------------------------------------------------

    @property
    def problem(self) -> str:
        """Why clients should wait, or ""."""
        standings = [seat.standing for seat in self.seats]
        if not self._has_served:
            return f"{standings.count(Standing.DOWN)} of {len(standings)} workers are yet to listen"
        if Standing.SERVING in standings:
            return ""
        now = time.monotonic()
        silent = [seat for seat in self.seats if seat.standing is Standing.SILENT]
        if any(now - seat.answered_at < UNREADY_AFTER_S for seat in silent):
            return ""
        return "no worker answers" if silent else "no worker serves"

    def totals(self) -> list[Totals]:
        """Of the living, as they told last, and of the dead."""
        return [one for seat in self.seats for one in (seat.totals, seat.kept)]

    def decisions(self) -> list[dict[str, Any]]:
        """Those that workers told last, newest first."""
        records: list[dict[str, Any]] = []
        for seat in self.seats:
            told = msgspec.json.decode(seat.decisions) if seat.decisions else []
            records += [record | {"worker": seat.number} for record in told]
        return sorted(records, key=lambda record: record["time"], reverse=True)[:DECISIONS_SHOWN]

    # -- the end -------------------------------------------------------------------------------------------

    async def drain(self, told: Callable[[], None]) -> None:
        """`told` says to the workers that they should end; returns when they have, or have been ended."""
        self._ending = True
        living = [seat for seat in self.seats if seat.process is not None and seat.link is not None]
        told()
        try:
            async with asyncio.timeout(self._drain_timeout_s + EXIT_WITHIN_S):
                for seat in living:
                    await seat.gone.wait()
        except TimeoutError:
            for seat in living:
                if not seat.gone.is_set():
                    _log.warning("drain timeout: %s did not end", seat.name)

    async def close(self) -> None:
        """No process is left."""
        self._ending = True
        processes = [seat.process for seat in self.seats if seat.process is not None]
        deadline = time.monotonic() + (EXIT_WITHIN_S if all(seat.gone.is_set() for seat in self.seats) else 0.0)
        for process in processes:
            await _ended(process, deadline)
        for seat in self.seats:
            if seat.link is not None:
                seat.link.close()


def _unsent(_message: msgspec.Struct) -> None:
    return None


def _launched(descriptor: int, inherited: int) -> subprocess.Popen[bytes]:
    """Executed anew and not forked: this process has a loop and threads. In a group of its own, because Ctrl-C in a
    terminal is for the hub, which lets open answers come to their end."""
    return subprocess.Popen(  # noqa: S603 our own module
        [sys.executable, "-m", "sidecar.workers", str(descriptor)],
        pass_fds=(descriptor, inherited),
        stdin=subprocess.DEVNULL,
        process_group=0,
    )


async def _ended(process: subprocess.Popen[bytes], deadline: float) -> int:
    """Waits for a process that is about to end, and ends it at `deadline` (`time.monotonic`). Returns its code."""
    while (code := process.poll()) is None:
        if time.monotonic() > deadline:
            process.kill()
        await asyncio.sleep(0.005)
    return code


def _told(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
