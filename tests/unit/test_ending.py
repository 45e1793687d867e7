"""Runs that start processes end them, also when they are ended themselves."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = """
import subprocess, sys, time
from e2e.ending import end_what_was_started
end_what_was_started()
child = subprocess.Popen(["sleep", "60"])
try:
    print(child.pid, flush=True)
    time.sleep(60)
finally:
    child.kill()
    print(child.wait(), flush=True)
"""


@pytest.mark.parametrize(("sign", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_what_was_started_is_ended_first(sign: signal.Signals, code: int) -> None:
    command = [sys.executable, "-c", RUN]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert run.stdout is not None
    assert int(run.stdout.readline())
    run.send_signal(sign)
    rest, _ = run.communicate(timeout=20)
    assert (rest.strip(), run.returncode) == ("-9", code)


RUNS = ("bench/__main__", "bench/growth", "bench/troubles", "decide/__main__", "latency/__main__", "side_channel")


@pytest.mark.parametrize("run", RUNS)
def test_a_run_says_so(run: str) -> None:
    assert "end_what_was_started()" in (ROOT / "e2e" / f"{run}.py").read_text(encoding="utf-8")
