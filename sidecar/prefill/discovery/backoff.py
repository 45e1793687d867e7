"""How long to wait after a failure: longer each time, and never in step with other sidecars."""

import random

FIRST_S = 0.2
LONGEST_S = 10.0


class Backoff:
    """Doubles from `FIRST_S` to `LONGEST_S`; between half of that and all of it is waited."""

    def __init__(self) -> None:
        self._next_s = FIRST_S

    def reset(self) -> None:
        self._next_s = FIRST_S

    def wait_s(self) -> float:
        """Seconds to wait now."""
        wait_s = self._next_s * random.uniform(0.5, 1.0)  # noqa: S311
        self._next_s = min(self._next_s * 2, LONGEST_S)
        return wait_s
