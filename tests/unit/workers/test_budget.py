"""The budget of several processes: exact, and not lost with a process that is killed or stopped."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from sidecar.workers.budget import LOCK_WITHIN_S, SharedBudget, make_memory

ROWS = 3
_TAKER = """
import sys
from sidecar.workers.budget import SharedBudget
budget = SharedBudget(int(sys.argv[1]), 3, int(sys.argv[2]), 50, 0)
taken = sum(budget.take(10) for _ in range(1000))
print(taken, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = make_memory(ROWS)
    yield descriptor
    os.close(descriptor)


def test_limits(memory: int) -> None:
    one = SharedBudget(memory, ROWS, 0, 2, 100)
    other = SharedBudget(memory, ROWS, 1, 2, 100)
    assert one.take(500), "one is always let through"
    assert not other.take(1)
    one.give_back(500)
    assert other.take(60)
    assert not one.take(41)
    assert one.take(40)
    assert not one.take(0)
    assert (one.in_flight, one.tokens) == (other.in_flight, other.tokens) == (2, 100)
    one.clear(1)
    assert (one.in_flight, one.tokens) == (1, 40)
    assert one.held(0) == 1


def test_exact_among_processes(memory: int) -> None:
    takers = [
        subprocess.Popen(
            [sys.executable, "-c", _TAKER, str(memory), str(row)],
            pass_fds=(memory,),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for row in (1, 2)
    ]
    try:
        taken = [int(taker.stdout.readline()) for taker in takers if taker.stdout]
        budget = SharedBudget(memory, ROWS, 0, 50, 0)
        assert sum(taken) == budget.in_flight == 50
        assert budget.tokens == 500
        assert not budget.take(1)
        takers[0].kill()
        takers[0].wait()
        budget.clear(1)
        assert budget.in_flight == 50 - taken[0] == taken[1]
    finally:
        for taker in takers:
            taker.kill()
            taker.communicate()


def test_stopped_with_the_lock(memory: int) -> None:
    """Who is stopped in the wrong microsecond costs others a refusal, not their loop; who is killed, nothing."""
    code = "import fcntl, sys, time; fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX); print(flush=True); time.sleep(9)"
    holder = subprocess.Popen([sys.executable, "-c", code, str(memory)], pass_fds=(memory,), stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        holder.send_signal(signal.SIGSTOP)
        budget = SharedBudget(memory, ROWS, 0, 5, 0)
        began = time.monotonic()
        assert not budget.take(1)
        assert LOCK_WITHIN_S <= time.monotonic() - began < 1
        holder.kill()
        holder.wait()
        assert budget.take(1)
        fcntl.lockf(memory, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it was let go
    finally:
        holder.kill()
        holder.communicate()
