"""Who may reach whom with networkPolicy.enabled."""

from typing import Any

import kubernetes_validate
import pytest

from tests.chart.policy import Pod, allowed
from tests.chart.render import (
    KUBERNETES,
    container,
    one,
    pod_spec,
    rendered,
    template,
    template_of,
    values_file,
    with_values,
    worker_of,
    workload,
)


def _pod(values: str, role: str) -> Pod:
    made = workload(rendered(values), role.removesuffix("-worker"))
    labels: dict[str, str] = (worker_of if role.endswith("-worker") else template_of)(made)["metadata"]["labels"]
    return "space", labels


STRANGER = ("space", {"app": "neighbour"})
PROMETHEUS = ("monitoring", {"app": "prometheus"})
GATEWAY = ("gateway", {"app": "envoy"})
DNS = ("kube-system", {"k8s-app": "kube-dns"})
API_SERVER = ("outside", {"ip": "10.96.0.1"})
MODEL_HUB = ("outside", {"ip": "203.0.113.7"})
EPP = ("space", {"app": "epp"})

TABLE = [
    ("gpu-rdma", "decode", "prefill", 8000, True),
    ("gpu-rdma", "decode", "prefill", 5600, True),
    ("gpu-rdma", "decode", "prefill", 20000, True),
    ("gpu-rdma", "decode", "prefill", 20999, True),
    ("gpu-rdma", "decode", "prefill", 21000, False),
    ("gpu-rdma", "decode", "prefill", 5601, False),
    ("gpu-rdma", "decode", "prefill", 22, False),
    ("gpu-rdma", "decode", STRANGER, 8000, False),
    ("gpu-rdma", "decode", "decode", 9090, False),
    ("gpu-rdma", "decode", DNS, ("UDP", 53), True),
    ("gpu-rdma", "decode", DNS, 443, False),
    ("gpu-rdma", "decode", MODEL_HUB, 443, True),  # extraEgress of these values
    ("gpu-rdma", "decode", MODEL_HUB, 80, False),
    ("gpu-rdma", "prefill", MODEL_HUB, 443, True),  # both roles load the model
    ("gpu-rdma", "prefill", STRANGER, 443, False),
    ("gpu-rdma", STRANGER, "prefill", 8000, False),
    ("gpu-rdma", STRANGER, "prefill", 5600, False),
    ("gpu-rdma", STRANGER, "prefill", 20500, False),
    ("gpu-rdma", EPP, "prefill", 8000, True),
    ("gpu-rdma", EPP, "prefill", 5600, False),
    ("gpu-rdma", PROMETHEUS, "prefill", 8000, True),
    ("gpu-rdma", PROMETHEUS, "prefill", 5600, False),
    ("gpu-rdma", "prefill", "decode", 20500, False),  # decode pulls: e2e/test_network_policy.py
    ("gpu-rdma", "prefill", "decode", 8000, False),
    ("gpu-rdma", "prefill", "decode", 9090, False),
    ("gpu-rdma", "prefill", STRANGER, 80, False),
    ("gpu-rdma", GATEWAY, "decode", 8000, True),
    ("gpu-rdma", GATEWAY, "decode", 9090, False),
    ("gpu-rdma", GATEWAY, "decode", 8200, False),
    ("gpu-rdma", STRANGER, "decode", 8000, False),
    ("gpu-rdma", STRANGER, "decode", 9090, False),  # PUT /disagg
    ("gpu-rdma", PROMETHEUS, "decode", 9090, True),
    ("gpu-rdma", PROMETHEUS, "decode", 8200, True),
    ("data-parallel", "prefill", "decode", 5703, True),  # push: prefill asks decode for its metadata
    ("data-parallel", "prefill", "decode", 5704, False),
    ("data-parallel", "prefill", "decode", 20500, False),
    ("gpu-rdma", "prefill", "decode", 5600, False),
    ("data-parallel", "decode", "prefill", 8001, True),
    ("data-parallel", "decode", "prefill", 5701, True),
    ("data-parallel", "decode", "prefill", 5702, False),
    ("data-parallel", "decode", "prefill", 8002, False),
    ("data-parallel", "decode", API_SERVER, 443, False),
    ("data-parallel", STRANGER, "decode", 8003, True),  # no clients named: anyone
    ("data-parallel", STRANGER, "decode", 8004, False),
    ("discovery", "decode", API_SERVER, 443, True),
    ("discovery", "decode", API_SERVER, 22, False),
    ("discovery", "prefill", API_SERVER, 443, False),
    ("minimal", STRANGER, "prefill", 22, True),  # opt-in
    ("leader-worker-set", "decode", "decode-worker", 12345, True),  # torch takes what ports it likes
    ("leader-worker-set", "decode-worker", "decode", 12345, True),
    ("leader-worker-set", "prefill", "prefill-worker", 12345, True),
    ("leader-worker-set", "decode-worker", "prefill", 5600, True),  # workers shake hands themselves
    ("leader-worker-set", "decode-worker", "prefill-worker", 20500, True),
    ("leader-worker-set", "decode", "prefill-worker", 20500, True),
    ("leader-worker-set", "decode", "prefill", 8000, True),
    ("leader-worker-set", "decode-worker", "prefill", 8000, False),
    ("leader-worker-set", "decode-worker", "prefill-worker", 12345, False),
    ("leader-worker-set", "prefill-worker", "decode-worker", 20500, False),
    ("leader-worker-set", "prefill-worker", "decode", 8000, False),
    ("leader-worker-set", STRANGER, "decode-worker", 12345, False),
    ("leader-worker-set", STRANGER, "prefill-worker", 20500, False),
    ("leader-worker-set", "decode-worker", MODEL_HUB, 443, True),
    ("leader-worker-set", "prefill-worker", MODEL_HUB, 443, False),
    ("leader-worker-set", "prefill-worker", DNS, ("UDP", 53), True),
    ("leader-worker-set", "decode-worker", API_SERVER, 443, False),
]


@pytest.mark.parametrize(("values", "source", "target", "port", "expected"), TABLE)
def test_table(values: str, source: Any, target: Any, port: Any, expected: bool) -> None:
    ends = [_pod(values, end) if isinstance(end, str) else end for end in (source, target)]
    assert allowed(rendered(values), ends[0], ends[1], port) is expected


def test_without_dns_and_extras_prefill_pods_reach_nobody() -> None:
    none = {"networkPolicy.enabled": True, "networkPolicy.dns": [], "sidecar.settings.discovery": "none"}
    policy = one(with_values(none), "NetworkPolicy", "prefill")
    kubernetes_validate.validate(policy, KUBERNETES, strict=True)
    assert not policy["spec"]["egress"]
    assert "Egress" in policy["spec"]["policyTypes"]


def test_engines_with_a_p2p_tier_dial_each_other_back() -> None:
    values = {"sidecar.settings.kv-connector": "offloading", "engine.kvTransferExtra.cpu_bytes_to_use": 1 << 30}
    documents = with_values(values | {"networkPolicy.enabled": True, "sidecar.settings.discovery": "none"})
    decode, prefill = (
        ("space", one(documents, "Deployment", role)["spec"]["template"]["metadata"]["labels"])
        for role in ("decode", "prefill")
    )
    for port, expected in ((7777, True), (7778, False), (5601, False)):
        assert allowed(documents, decode, prefill, port) is expected
        assert allowed(documents, prefill, decode, port) is expected
    assert not allowed(documents, prefill, decode, 8200)
    assert not allowed(documents, STRANGER, decode, 7777)


def test_engines_keep_to_the_ports_that_the_policy_opens() -> None:
    for role in ("decode", "prefill"):
        engine = container(pod_spec(workload(rendered("gpu-rdma"), role)), "vllm")
        assert {"name": "UCX_TCP_PORT_RANGE", "value": "20000-20999"} in engine["env"]
        engine = container(pod_spec(workload(rendered("minimal"), role)), "vllm")
        assert "UCX_TCP_PORT_RANGE" not in [variable["name"] for variable in engine["env"]]


def test_discovery_without_a_way_to_the_api_server_is_refused() -> None:
    values = ["--values", str(values_file("discovery")), "--set-json", "networkPolicy.apiServer=[]"]
    done = template(*values, "--skip-schema-validation")
    assert done.returncode != 0
    assert "networkPolicy.apiServer is needed" in done.stderr
