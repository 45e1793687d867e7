"""The breaker of one prefill endpoint: when to stop paying for an endpoint that brings nothing. No I/O."""

import random
from enum import IntEnum

FAILURES_TO_OPEN = 3
"""In a row. A connection that cannot be made opens at once: waiting for it again costs the connect timeout."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


class State(IntEnum):
    """Also the value of the metric `breaker_state`."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


Standing = tuple[int, int, float, float]
"""State, failures in a row, the present pause and when it ends."""
ANOTHERS = -1
"""In place of a trial's number: it is another process's."""


class Breaker:
    """Closed: used. Open: not used until a pause is over, which doubles with every failed trial.
    Half open: one request at a time tries."""

    __slots__ = ("_failures", "_pause_s", "_random", "_reopens_at", "_trial", "_trials", "state")

    def __init__(self, random_: random.Random | None = None) -> None:
        self.state = State.CLOSED
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._reopens_at = 0.0
        self._trial = 0
        """Number of the trial under way, 0 if there is none."""
        self._trials = 0
        self._random = random_ or random.Random()  # noqa: S311

    def admits(self, now: float) -> bool:
        """Whether a request may use the endpoint now. Does not reserve the trial: `begin` does."""
        if self.state is State.CLOSED:
            return True
        if self.state is State.OPEN:
            return now >= self._reopens_at
        return not self._trial

    def begin(self) -> int:
        """A request that `admits` let through uses the endpoint. Returns the number by which it speaks as the trial
        in the end, 0 if it is none."""
        if self.state is State.CLOSED:
            return 0
        self.state = State.HALF_OPEN
        self._trials += 1
        self._trial = self._trials
        return self._trial

    def succeeded(self) -> None:
        self.state = State.CLOSED
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._trial = 0

    def failed(self, now: float, *, at_once: bool = False, trial: int = 0) -> None:
        """`at_once` opens without waiting for more. Requests that began before it opened, and trials of an earlier
        opening, tell nothing new."""
        if self.state is not State.CLOSED and (not trial or trial != self._trial):
            return
        self._failures += 1
        if self.state is State.CLOSED and not at_once and self._failures < FAILURES_TO_OPEN:
            return
        if self.state is State.HALF_OPEN:
            self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)
        self.state = State.OPEN
        self._trial = 0
        # Up to a fifth later, so that many sidecars do not try a returning endpoint in the same instant.
        self._reopens_at = now + self._pause_s * (1 + 0.2 * self._random.random())

    @property
    def standing(self) -> Standing:
        return int(self.state), self._failures, self._pause_s, self._reopens_at

    @property
    def is_clean(self) -> bool:
        """A success would tell nothing new."""
        return self.state is State.CLOSED and not self._failures

    def take_over(self, standing: Standing, *, trial: bool, own: bool) -> None:
        """As another process counts, on the same clock. `trial`: one is under way; `own`: it is one of ours."""
        state, self._failures, self._pause_s, self._reopens_at = standing
        self.state = State(state)
        if not trial:
            self._trial = 0
        elif not own:
            self._trial = ANOTHERS

    def abandoned(self, trial: int) -> None:
        """The trial ended without saying anything about the endpoint (the client left, a 4xx)."""
        if trial == self._trial:
            self._trial = 0
