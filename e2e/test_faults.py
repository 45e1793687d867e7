"""The short form of `make faults`: the scenarios that no other test plays, with one seed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from e2e.faults import wire
from e2e.faults.__main__ import QUICK
from e2e.faults.scenarios import SCENARIOS

LONGEST_S = 900
"""On a machine that has a lot else to do; alone it takes two minutes."""


def test_the_quick_ones_hold() -> None:
    command = [sys.executable, "-m", "e2e.faults", "--quick", "--rounds", "1", "--seed", "11"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    playable = [name for name in QUICK if not (SCENARIOS[name].network and wire.missing())]
    assert f"{len(playable)} of {len(playable)} hold" in done.stdout
    if len(playable) < len(QUICK):
        pytest.skip(f"played without the network's scenarios: {wire.missing()}")
