"""Faults as data: what goes wrong with which answers.

`Faults` only decides whether a request is struck; `sender.py` carries it out. Knows neither sockets nor engines.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from tests.engine.http_messages import Received


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One way in which an answer goes wrong; the fields may be combined.

    With `silence`, `status`, `raw` or `reset="before_head"` the engine is never asked. All others change the
    engine's own answer on its way out.
    """

    # Before anything is sent.
    delay_head_seconds: float = 0.0
    # The engine is not asked before this is set.
    hold: threading.Event | None = None
    # At the end of the headers already, without reading the body (with `status`, `raw`, `reset`, `silence`).
    early: bool = False
    # Never answer; the connection stays open until the client leaves.
    silence: bool = False
    # This answer instead of the engine's.
    status: int | None = None
    headers: Sequence[tuple[str, str]] = ()
    body: bytes | None = None
    # These bytes instead of an answer, then the end of the connection (or not).
    raw: bytes | None = None
    raw_close: bool = True
    # A TCP reset: before any byte, after the head, or where `cut_after_*` says.
    reset: Literal["before_head", "after_head", "at_cut"] | None = None
    # End the connection without an end of the body, after so many events or bytes of it.
    cut_after_events: int | None = None
    cut_after_bytes: int | None = None
    # Keep the connection and say no more, after so many events or bytes of the body.
    stall_after_events: int | None = None
    stall_after_bytes: int | None = None
    # Send the body in small pieces with pauses.
    drip_bytes: int | None = None
    drip_seconds: float = 0.0
    # Send the same stream in pieces that do not end where events end.
    ragged: bool = False
    # Change the JSON of a whole answer (not of a stream): the handoff alone, or all of it.
    handoff: Callable[[dict[str, Any]], Any] | None = None
    handoff_absent: bool = False
    edit: Callable[[dict[str, Any]], Any] | None = None
    # A 200 stream whose first event is an error, then [DONE], as with kv_load_failure_policy `fail`.
    error_event_first: bool = False
    # An error event after so many events, then [DONE].
    error_event_after: int | None = None
    # Framing.
    interim: bytes = b""
    content_length_delta: int = 0
    close_delimited: bool = False
    http_1_0: bool = False
    trailers: Sequence[tuple[str, str]] = ()
    extra_after_end: bytes = b""
    gzip: bool = False
    pad_bytes: int = 0
    # Close the connection after the answer without having announced it.
    close_after: bool = False

    @property
    def replaces_answer(self) -> bool:
        return self.silence or self.status is not None or self.raw is not None or self.reset == "before_head"


@dataclass
class Rule:
    """A fault and the requests that it strikes."""

    fault: Fault
    path: str | None = None
    when: Callable[[Received], bool] | None = None
    # Only the nth request that matches, counted from 1.
    nth: int | None = None
    # At most so many times.
    times: int | None = None
    probability: float = 1.0
    seen: int = 0
    struck: int = 0

    def strikes(self, received: Received, chance: float) -> bool:
        if self.path is not None and received.path != self.path:
            return False
        if self.times is not None and self.struck >= self.times:
            return False
        if self.when is not None and not self.when(received):
            return False
        self.seen += 1
        if self.nth is not None and self.seen != self.nth:
            return False
        if chance >= self.probability:
            return False
        self.struck += 1
        return True


@dataclass
class Faults:
    """The faults of one engine, in the order in which they were added; the first that strikes counts."""

    seed: int = 0
    rules: list[Rule] = field(default_factory=list)
    # Accept connections and close them with a reset, or never read from them.
    reset_on_accept: bool = False
    silent_on_accept: bool = False

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._lock = threading.Lock()

    def add(
        self,
        fault: Fault,
        *,
        path: str | None = None,
        when: Callable[[Received], bool] | None = None,
        nth: int | None = None,
        times: int | None = None,
        probability: float = 1.0,
    ) -> Rule:
        rule = Rule(fault, path, when, nth, times, probability)
        with self._lock:
            self.rules.append(rule)
        return rule

    def once(self, fault: Fault, **where: Any) -> Rule:
        return self.add(fault, times=1, **where)

    def clear(self) -> None:
        with self._lock:
            self.rules.clear()
        self.reset_on_accept = self.silent_on_accept = False

    def choose(self, received: Received) -> Fault | None:
        with self._lock:
            for rule in self.rules:
                if rule.strikes(received, self._random.random()):
                    return rule.fault
        return None
