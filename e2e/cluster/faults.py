"""What networks do to pods under load: packets are late or lost, and a node vanishes without a word and comes back.

It must not know how a pod or the gateway is made.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from e2e.cluster import policy
from e2e.cluster.pods import HTTP_PORT
from e2e.cluster.rollout import under_way
from e2e.cluster.scene import BUDGET_ONLY, SETTLE_S, Result, Scene, end

if TYPE_CHECKING:
    from e2e.cluster.network import Namespace

LOST_OF_A_THOUSAND = 10
LOSS_S = LATE_S = 8.0
DELAY_S = 0.1
"""Each way."""
AWAY_S = 12.0
"""Longer than --pull-timeout, much shorter than a cluster takes to call a node's pods not ready."""


def _arm(namespace: Namespace, comes: str, goes: str = "accept") -> None:
    """What happens to packets on their way in and out."""
    chains = [
        f"chain {hook} {{ type filter hook {hook} priority -10; {rule}; }}"
        for hook, rule in (("input", comes), ("output", goes))
    ]
    namespace.run("nft", "-f", "-", given="\n".join(["table inet fault {", *chains, "}", ""]))


def _disarm(namespace: Namespace) -> None:
    namespace.run("nft", "delete", "table", "inet", "fault")


def _lose(it: Scene) -> None:
    """On their way into every pod, of gateway, pods and node."""
    with it.step(f"{LOST_OF_A_THOUSAND / 10:g} % of all packets to pods are lost", BUDGET_ONLY) as step:
        pods = [pod for role in ("decode", "prefill") for pod in it.pods(role)]
        for pod in pods:
            _arm(pod.namespace, f'iif "eth0" numgen random mod 1000 < {LOST_OF_A_THOUSAND} counter drop')
        time.sleep(LOSS_S)
        for pod in pods:
            told = pod.namespace.run("nft", "list", "table", "inet", "fault")
            if "packets 0 " in told:
                step.problems.append(f"{pod.name} lost no packet: this step shows nothing")
            _disarm(pod.namespace)


def _delay(it: Scene) -> None:
    """As if prefill were far away."""
    with it.step(f"{1000 * DELAY_S:g} ms to prefill pods, and back") as step:
        pods = it.pods("prefill")
        for pod in pods:
            it.network.lines[pod.ip].seconds = DELAY_S
        time.sleep(LATE_S)
        for pod in pods:
            with it.network.node.entered():
                began = time.monotonic()
                socket.create_connection((pod.ip, HTTP_PORT)).close()
            if time.monotonic() - began < 2 * DELAY_S:
                step.problems.append(f"{pod.name} is as near as before: this step shows nothing")
            it.network.lines[pod.ip].seconds = 0.0


def _vanish(it: Scene) -> None:
    """Power fails at the node of a prefill pod: no packet comes from it any more, not even one that ends a
    connection, and nobody says so. It comes back as another engine at the same address."""
    with it.step("the node of a prefill pod vanishes, and comes back", BUDGET_ONLY) as step:
        pod = it.pods("prefill")[0]
        if not under_way(pod):
            step.problems.append("it had nothing to do: this step shows nothing")
        it.cluster.forget(pod)
        _arm(pod.namespace, "drop", "drop")
        pod.kill()
        time.sleep(AWAY_S)
        pod.start()
        _disarm(pod.namespace)
        it.cluster.remember(pod)
        began = time.monotonic()
        while not pod.requests and time.monotonic() < began + 2 * SETTLE_S:
            time.sleep(0.1)
        if not pod.requests:
            step.problems.append(f"{pod.name} is back and is not used again within {2 * SETTLE_S:g} s")


def run(clients: int = 200, say: Callable[[str], None] = lambda _: None) -> Result:
    """All steps. Raises `NoEnvoy`."""
    with ExitStack() as stack:
        it = Scene(clients, stack, say, behind_lines="prefill")
        _delay(it)
        _lose(it)
        _vanish(it)
        return end(it)


def why_not() -> str:
    """Why there can be none of these faults here; "" if they can be made."""
    return policy.why_not() or ("" if os.access("/dev/net/tun", os.W_OK) else "needs TAP devices (/dev/net/tun)")
