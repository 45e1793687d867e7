"""What the source of endpoints last said, how old that is, and what was wrong since; tells `Endpoints` of changes.

A source that fails takes nothing away: the last good set stays, with its age. Knows no kind of source.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple, Protocol

from sidecar.prefill.address import Address
from sidecar.prefill.endpoints import MAX_DISCOVERED, Endpoints

_log = logging.getLogger("sidecar")

RESTART_AFTER_S = 5.0
SAY_EVERY_S = 1.0
"""Changes of membership within this time are one line of the log."""


class Standing(StrEnum):
    """What a source says of an endpoint. Only `ready` ones get requests."""

    READY = "ready"
    NOT_READY = "not_ready"
    TERMINATING = "terminating"


class Member(NamedTuple):
    """`detail` is for people: the pod's name, the line of the file."""

    standing: Standing = Standing.READY
    detail: str = ""


class Report(Protocol):
    """What a source tells. `part` names one of several things that it has to keep in touch with."""

    def found(self, members: Mapping[Address, Member]) -> None:
        """The whole set."""

    def heard(self, part: str = "") -> None:
        """What was found last is still so."""

    def failed(self, reason: str, message: str, part: str = "") -> None:
        """`reason` is a label value; `message` says what to do. What was found last stays."""


class Source(Protocol):
    """Finds endpoints for as long as it runs."""

    @property
    def name(self) -> str:
        """As `--discovery` says it."""

    async def run(self, report: Report) -> None:
        """Ends only by being cancelled."""


class Discovery:
    """The state of the one source of a process. `now` is a monotonic clock in seconds."""

    def __init__(
        self, source: Source, endpoints: Endpoints, now: Callable[[], float], counted: Callable[[str], None]
    ) -> None:
        """`counted` hears the reason of every failure."""
        self._source = source
        self._endpoints = endpoints
        self._now = now
        self._counted = counted
        self._heard_at = now()
        self._problems: dict[str, tuple[str, str, float]] = {}
        """Part -> reason, message and since when."""
        self._joined: set[Address] = set()
        self._left: set[Address] = set()
        self._say_at: asyncio.TimerHandle | None = None
        self._said_at = float("-inf")
        self._is_over_limit = False
        self.members: Mapping[Address, Member] = {}
        self.is_known = False
        """Whether the source has ever told of a set."""

    @property
    def source(self) -> str:
        return self._source.name

    @property
    def age_s(self) -> float:
        """Seconds since the source last told or confirmed anything; since the start if it never did."""
        return self._now() - self._heard_at

    @property
    def problem(self) -> str:
        """What is wrong at present, or ""."""
        return "; ".join(message for _, message, _ in self._problems.values())

    def counts(self) -> Iterable[tuple[Standing, int]]:
        """How many members of each standing."""
        standings = [member.standing for member in self.members.values()]
        return [(standing, standings.count(standing)) for standing in Standing]

    async def run(self) -> None:
        """Runs the source, again if it ends by an error of ours."""
        try:
            while True:
                try:
                    await self._source.run(self)
                except Exception:
                    _log.exception("discovery %s", self.source)
                self.failed("internal", "an unexpected error, see the log")
                await asyncio.sleep(RESTART_AFTER_S)
        finally:
            if self._say_at is not None:
                self._say_at.cancel()

    # -- Report --

    def found(self, members: Mapping[Address, Member]) -> None:
        self._heard_at = self._now()
        self.members = members
        joined, left = self._endpoints.discovered(
            {address: member.standing is Standing.READY for address, member in members.items()}
        )
        self._note(joined, left)
        is_first, self.is_known = not self.is_known, True
        self._check_limit(members)
        if is_first and not joined:
            _log.warning("discovery %s: no endpoint that is ready", self.source)
        if self._joined or self._left:
            self._say_soon()

    def heard(self, part: str = "") -> None:
        self._heard_at = self._now()
        problem = self._problems.pop(part, None)
        if problem is not None:
            _log.info("discovery %s: works again after %.0f s", self.source, self._now() - problem[2])

    def failed(self, reason: str, message: str, part: str = "") -> None:
        self._counted(reason)
        was = self._problems.get(part)
        self._problems[part] = (reason, message, was[2] if was else self._now())
        if was is None or was[:2] != (reason, message):
            _log.warning("discovery %s: %s; %s", self.source, message, self._consequence())

    def _consequence(self) -> str:
        if not self.is_known:
            return "no endpoint is known from it"
        ready = sum(member.standing is Standing.READY for member in self.members.values())
        return f"the {ready} endpoints that it told of {self.age_s:.0f} s ago stay in use"

    # -- one line for each change --

    def _check_limit(self, members: Mapping[Address, Member]) -> None:
        is_over = len(members) > MAX_DISCOVERED
        if is_over and not self._is_over_limit:
            _log.warning(
                "discovery %s: %d endpoints, of which %d are used: narrow it down",
                self.source,
                len(members),
                MAX_DISCOVERED,
            )
        self._is_over_limit = is_over

    def _note(self, joined: list[Address], left: list[Address]) -> None:
        for address in joined:
            if address in self._left:
                self._left.discard(address)
            else:
                self._joined.add(address)
        for address in left:
            if address in self._joined:
                self._joined.discard(address)
            else:
                self._left.add(address)

    def _say_soon(self) -> None:
        if self._say_at is not None:
            return
        wait_s = self._said_at + SAY_EVERY_S - self._now()
        if wait_s <= 0:
            self._say()
        else:
            self._say_at = asyncio.get_running_loop().call_later(wait_s, self._say)

    def _say(self) -> None:
        self._say_at = None
        self._said_at = self._now()
        changes = [f"+{address}" for address in sorted(self._joined)] + [f"-{one}" for one in sorted(self._left)]
        self._joined.clear()
        self._left.clear()
        if not changes:  # what came has gone again
            return
        ready = sum(member.standing is Standing.READY for member in self.members.values())
        shown = " ".join(changes[:8]) + (f" and {len(changes) - 8} more" if len(changes) > 8 else "")
        _log.info("discovery %s: %d endpoints (%s)", self.source, ready, shown)
