"""What a cluster does around pods: the kubelet's probes, the list of decode pods that the gateway gets, and what
sidecars read of pods in the Kubernetes API. News takes `LAG_S` to the gateway, as in a cluster.

It must not know why pods come and go.
"""

from __future__ import annotations

import http.client
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from e2e.cluster.pods import ADMIN_PORT, SCALE, START_S, VALUES, Pod
from tests.integration.sidecar import eventually
from tests.kube import objects

if TYPE_CHECKING:
    from e2e.cluster.gateway import Gateway
    from e2e.cluster.network import Network
    from tests.kube.api import ThreadedApi

LAG_S = 5.0 / SCALE
TICK_S = 0.05


class Probe:
    """One readiness probe of a container, with the chart's period and threshold."""

    def __init__(self, where: tuple[str, int, str], settings: dict[str, int]) -> None:
        self.where = where
        self._period_s = settings["periodSeconds"] / SCALE
        self._threshold = settings["failureThreshold"]
        self._timeout_s = settings["timeoutSeconds"] / SCALE
        self._due = self._failures = 0.0
        self.good = False

    def look(self, now: float) -> None:
        """Asks, if it is time to."""
        if now < self._due:
            return
        self._due = now + self._period_s
        if self._asks():
            self.good, self._failures = True, 0
            return
        self._failures += 1
        if self._failures >= self._threshold:
            self.good = False

    def _asks(self) -> bool:
        host, port, path = self.where
        connection = http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        try:
            connection.request("GET", path)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


class Cluster:
    """Pods, and who is told of them."""

    def __init__(self, network: Network, gateway: Gateway, api: ThreadedApi, behind_lines: str = "") -> None:
        """`behind_lines`: the role whose pods are (`Network.lines`)."""
        self._behind_lines = behind_lines
        self.pods: list[Pod] = []
        """Those that are there, and those that have ended."""
        self._network, self._gateway, self._api = network, gateway, api
        self._probes: dict[Pod, list[Probe]] = {}
        self._applied: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._blind: set[Pod] = set()
        self._told: list[str] = []
        self._news: list[tuple[float, list[str]]] = []
        self._numbers = {"decode": 0, "prefill": 0}
        self._goes_on = True
        self._thread = threading.Thread(target=self._watch, name="kubelet", daemon=True)
        with network.node.entered():
            self._thread.start()

    def add(self, role: str) -> Pod:
        """A new pod; it is started here, and ready some time later."""
        self._numbers[role] += 1
        pod = Pod(f"{role}-{self._numbers[role]}", role, self._network.pod(role == self._behind_lines), self._api)
        self.pods.append(pod)
        pod.start()
        self.watch(pod)
        return pod

    def watch(self, pod: Pod) -> None:
        """From here on it is probed. A pod that was restarted begins as not ready."""
        probes = [Probe(pod.health, VALUES["engine"]["readinessProbe"])]
        if pod.role == "decode":
            probes.append(Probe((pod.ip, ADMIN_PORT, "/readyz"), VALUES["sidecar"]["readinessProbe"]))
        with self._lock:
            self._probes[pod] = probes

    def forget(self, pod: Pod) -> None:
        """Nobody probes it any more; what the cluster says of it stays as it is."""
        with self._lock:
            self._blind.add(pod)

    def remember(self, pod: Pod) -> None:
        with self._lock:
            self._blind.discard(pod)

    def wait_ready(self, *pods: Pod) -> None:
        """Until the gateway has heard of them too."""
        eventually(lambda: all(pod.ready for pod in pods), START_S)
        eventually(lambda: not self._news, START_S)

    def remove(self, pod: Pod) -> str:
        """As a rollout does: Terminating, then what the kubelet does, then gone. What went wrong."""
        pod.terminating = True
        problem = pod.end()
        self._forget(pod)
        return problem

    def _forget(self, pod: Pod) -> None:
        with self._lock:
            self._probes.pop(pod)
            pod.ready = False
            self._api.do(partial(self._api.delete, "pods", pod.name))

    def close(self) -> None:
        self._goes_on = False
        self._thread.join()
        for pod in self.pods:
            pod.close()

    # -- the loop

    def _watch(self) -> None:
        while self._goes_on:
            now = time.monotonic()
            with self._lock:
                watched = [one for one in self._probes.items() if one[0] not in self._blind]
            for pod, probes in watched:
                for probe in probes:
                    probe.look(now)
                if pod in self._probes:
                    pod.ready = all(probe.good for probe in probes)
            with self._lock:
                self._publish(now)
            time.sleep(TICK_S)

    def _publish(self, now: float) -> None:
        for pod in self._probes:
            one = objects.pod(
                pod.name,
                pod.ip,
                ready=pod.ready,
                terminating=pod.terminating,
                labels={"llm-d.ai/role": pod.role},
            )
            if one != self._applied.get(pod.name):
                self._applied[pod.name] = one
                self._api.do(partial(self._api.apply, "pods", one))
        usable = [pod.address for pod in self._probes if pod.role == "decode" and pod.ready and not pod.terminating]
        if usable != self._told:
            self._told = usable
            self._news.append((now + LAG_S, usable))
        while self._news and self._news[0][0] <= now:
            self._gateway.tell(self._news[0][1])
            del self._news[0]
