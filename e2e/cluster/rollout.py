"""A rolling restart under load, and pods that get SIGKILL.

Pods are replaced without one to spare (maxSurge 0), as where GPUs are rare. It must not know how a pod or the
gateway is made.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from e2e.cluster.control import LAG_S
from e2e.cluster.scene import BUDGET_ONLY, SETTLE_S, Result, Scene, end

if TYPE_CHECKING:
    from e2e.cluster.pods import Pod


def _replace(it: Scene, role: str) -> None:
    with it.step(f"{len(it.pods(role))} {role} pods replaced, one after the other") as step:
        for old in it.pods(role):
            if problem := it.cluster.remove(old):
                step.problems.append(f"{old.name}: {problem}")
            new = it.cluster.add(role)
            it.cluster.wait_ready(new)


def under_way(pod: Pod) -> int:
    """Requests in its engine, once there are any."""
    until = time.monotonic() + SETTLE_S
    while pod.engine is not None and not pod.engine.running and time.monotonic() < until:
        time.sleep(0.01)
    return pod.engine.running if pod.engine else 0


def _kill(it: Scene, role: str, allowed: str) -> None:
    with it.step(f"a {role} pod gets kill -9", allowed) as step:
        pod = it.pods(role)[0]
        if not under_way(pod):
            step.problems.append("it had nothing to do: this step shows nothing")
        pod.kill()
        if role == "decode":
            step.victim, step.killed_at = pod.address, time.monotonic()
        time.sleep(2 * LAG_S)
        pod.start()
        it.cluster.watch(pod)
        it.cluster.wait_ready(pod)


def run(clients: int = 200, say: Callable[[str], None] = lambda _: None) -> Result:
    """All steps. Raises `NoEnvoy`."""
    with ExitStack() as stack:
        it = Scene(clients, stack, say)
        with it.step("nothing happens"):
            pass
        _replace(it, "decode")
        _replace(it, "prefill")
        _kill(it, "prefill", BUDGET_ONLY)
        _kill(it, "decode", "its own requests: cut, or 503 before the first byte")
        return end(it)
