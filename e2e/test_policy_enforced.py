"""The chart's network policies, enforced by nftables between pods in network namespaces: prompts are prefilled
remotely through them, and every other connection is dropped, as the table of tests/chart/test_policy.py has it."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from e2e.cluster import network, policy
from e2e.cluster.pods import ADMIN_PORT, ENGINE_PORT, HTTP_PORT, SIDE_CHANNEL_PORT, START_S, Pod
from e2e.cluster.policy import Member
from tests.chart.policy import allowed
from tests.chart.render import Object, template_of, with_values, workload
from tests.integration.client import Client
from tests.integration.sidecar import completion, eventually
from tests.kube import objects
from tests.kube.api import ThreadedApi

PORTS = (HTTP_PORT, ENGINE_PORT, ADMIN_PORT, SIDE_CHANNEL_PORT, SIDE_CHANNEL_PORT + 1, 20000, 20999, 21000, 22)
DROPPED_AFTER_S = 1.0
STRANGERS = {
    "neighbour": ("space", {"app": "neighbour"}),
    "gateway": ("gateway", {"app": "envoy"}),
    "prometheus": ("monitoring", {"app": "prometheus"}),
}
VALUES = {
    "networkPolicy.enabled": True,
    "networkPolicy.apiServer": [{"ipBlock": {"cidr": "10.96.0.1/32"}}],
    "networkPolicy.clients": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateway"}}}],
    "networkPolicy.monitoring": [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    ],
}


class Rig:
    """A decode and a prefill pod under the policies, and others."""

    def __init__(self, stack: ExitStack) -> None:
        self.documents: list[Object] = with_values(VALUES)
        self.network = network.Network()
        stack.callback(self.network.close)
        api = stack.enter_context(ThreadedApi())
        self.members = {
            name: Member(space, labels, *self.network.pod()) for name, (space, labels) in STRANGERS.items()
        }
        self.pods: dict[str, Pod] = {}
        for role in ("prefill", "decode"):
            inside, ip = self.network.pod()
            labels = template_of(workload(self.documents, role))["metadata"]["labels"]
            self.members[role] = Member("space", labels, inside, ip)
            self.pods[role] = Pod(role, role, (inside, ip), api)
        policy.enforce(self.documents, "space", list(self.members.values()))
        for role, pod in self.pods.items():
            pod.start()
            stack.callback(pod.close)
            api.do(lambda pod=pod, role=role: api.apply("pods", objects.pod(pod.name, pod.ip, labels=_llm_d(role))))

    def reached(self, source: str, target: str) -> set[int]:
        """Of `PORTS`: those at which somebody says something, be it that nobody listens there."""
        waiting: dict[socket.socket, int] = {}
        with self.members[source].network.entered():
            for port in PORTS:
                one = socket.socket()
                one.setblocking(False)
                one.connect_ex((self.members[target].ip, port))
                waiting[one] = port
        found = set()
        until = time.monotonic() + DROPPED_AFTER_S
        while waiting and (left := until - time.monotonic()) > 0:
            for one in select.select([], list(waiting), [], left)[1]:
                found.add(waiting.pop(one))
                one.close()
        for one in waiting:
            one.close()
        return found


def _llm_d(role: str) -> dict[str, str]:
    return {"llm-d.ai/role": role}


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    if why_not := network.why_not() or policy.why_not():
        pytest.skip(why_not)
    with ExitStack() as stack:
        yield Rig(stack)


def test_prompts_are_prefilled_through_the_policies(rig: Rig) -> None:
    """HTTP and side channel of the prefill pod, and the decode pod's port for the gateway."""

    def decision() -> str:
        with rig.members["gateway"].network.entered(), Client((rig.members["decode"].ip, HTTP_PORT)) as client:
            client.request("POST", "/v1/completions", completion())
            answer = client.answer("POST")
        return answer.decision if answer.status == 200 else ""

    eventually(lambda: decision() == f"remote; prefill={rig.members['prefill'].ip}:{HTTP_PORT}", START_S)
    prefill = rig.pods["prefill"].engine
    assert prefill is not None
    assert prefill.handshakes_served


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (source, target)
        for source in ("decode", "prefill", *STRANGERS)
        for target in ("decode", "prefill", "neighbour")
        if source != target
    ],
)
def test_nothing_else_passes(source: str, target: str, rig: Rig) -> None:
    ends = [(rig.members[one].space, rig.members[one].labels) for one in (source, target)]
    admitted = {port for port in PORTS if allowed(rig.documents, ends[0], ends[1], port)}
    assert rig.reached(source, target) == admitted


def test_the_evaluator_and_the_kernel_are_not_both_blind(rig: Rig) -> None:
    assert rig.reached("decode", "prefill") == {HTTP_PORT, SIDE_CHANNEL_PORT, 20000, 20999}
    assert rig.reached("neighbour", "prefill") == set()
    assert rig.reached("neighbour", "decode") == set()
    assert rig.reached("gateway", "decode") == {HTTP_PORT}
    assert rig.reached("prometheus", "decode") == {ADMIN_PORT, ENGINE_PORT}
