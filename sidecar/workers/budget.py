"""The recompute budget of several processes, exact among them: in shared memory, under a lock of the kernel's.

It is asked in the middle of a decision, so it must answer at once: a question to another process could not. Each
process writes its own row only. The kernel releases the lock of a process that dies, and the hub clears its row, so
nothing that a killed worker held is lost.
"""

import fcntl
import mmap
import os
import time
from typing import Final

LOCK_WITHIN_S: Final = 0.02
"""A lock is held for microseconds; a process that is stopped while it holds it must not stop the others. Longer
than a busy machine lets a process wait for its turn; after that the answer is no, and the client comes again."""
_PAUSE_S = 0.0002
_ROW: Final = 2
_WORD_BYTES: Final = 8


def make_memory(rows: int) -> int:
    """Descriptor of memory for so many processes, all rows empty. Linux only. Inherited only by who is told to."""
    descriptor = os.memfd_create("pd-sidecar budget")
    os.ftruncate(descriptor, rows * _ROW * _WORD_BYTES)
    return descriptor


class SharedBudget:
    """As `sidecar.exchange.budget.Budget`, for row `own` of `rows`. A process makes one of a memory: the kernel's
    locks end with the first descriptor that it closes."""

    def __init__(self, descriptor: int, rows: int, own: int, max_concurrent: int, max_tokens: int) -> None:
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, rows * _ROW * _WORD_BYTES)
        self._words = memoryview(self._map).cast("q")
        self._rows = rows
        self._own = own * _ROW
        self.max_concurrent = max_concurrent
        self.max_tokens = max_tokens

    @property
    def in_flight(self) -> int:
        """Of all processes."""
        return sum(self._words[0 : self._rows * _ROW : _ROW])

    @property
    def tokens(self) -> int:
        return sum(self._words[1 : self._rows * _ROW : _ROW])

    def take(self, tokens: int) -> bool:
        if not self._lock():
            return False
        try:
            in_flight = self.in_flight
            if in_flight >= self.max_concurrent:
                return False
            if self.max_tokens and in_flight and self.tokens + tokens > self.max_tokens:
                return False
            self._words[self._own + 1] += tokens
            self._words[self._own] += 1
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
        return True

    def give_back(self, tokens: int) -> None:
        # Nobody else writes this row. Who reads it in between sees more in use than there is, never less.
        self._words[self._own + 1] -= tokens
        self._words[self._own] -= 1

    def clear(self, row: int) -> None:
        """The process of that row is gone."""
        self._words[row * _ROW] = self._words[row * _ROW + 1] = 0

    def held(self, row: int) -> int:
        """Recomputes of that row's process."""
        return self._words[row * _ROW]

    def _lock(self) -> bool:
        deadline = 0.0
        while True:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                now = time.monotonic()
                deadline = deadline or now + LOCK_WITHIN_S
                if now >= deadline:
                    return False
                time.sleep(_PAUSE_S)
            else:
                return True

    def close(self) -> None:
        self._words.release()
        self._map.close()
        os.close(self._descriptor)
