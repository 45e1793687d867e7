"""What network policies admit, as Kubernetes defines it: an evaluator of the kinds of rules that the chart uses."""

import ipaddress
from typing import Any

Policy = dict[str, Any]
Pod = tuple[str, dict[str, str]]
"""Namespace and labels."""


def _matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    wanted: dict[str, str] = selector.get("matchLabels", {})
    expressions = selector.get("matchExpressions", ())
    assert all(one["operator"] == "In" for one in expressions)
    return wanted.items() <= labels.items() and all(labels.get(one["key"]) in one["values"] for one in expressions)


def _peer(peer: dict[str, Any], labels: dict[str, str], namespace: str) -> bool:
    if "ipBlock" in peer:
        network = ipaddress.ip_network(peer["ipBlock"]["cidr"])
        return "ip" in labels and ipaddress.ip_address(labels["ip"]) in network
    if "namespaceSelector" in peer:
        inside = _matches(peer["namespaceSelector"], {"kubernetes.io/metadata.name": namespace})
    else:
        inside = namespace == "space"
    return inside and _matches(peer.get("podSelector", {}), labels)


def _port(rule: dict[str, Any], protocol: str, number: int) -> bool:
    return not rule.get("ports") or any(
        port["protocol"] == protocol and port["port"] <= number <= port.get("endPort", port["port"])
        for port in rule["ports"]
    )


def _direction(policy: Policy, way: str, peers: str, other: Pod, port: tuple[str, int]) -> bool:
    return any(
        _port(rule, *port) and (peers not in rule or any(_peer(peer, other[1], other[0]) for peer in rule[peers]))
        for rule in policy["spec"][way]
    )


def allowed(documents: list[dict[str, Any]], source: Pod, target: Pod, port: Any) -> bool:
    """Whether a connection from one pod (namespace, labels) to another is admitted: at each end by one of the
    policies that select it. Pods that no policy selects may do anything."""
    wanted = port if isinstance(port, tuple) else ("TCP", port)
    policies = [each for each in documents if each["kind"] == "NetworkPolicy"]
    assert all(policy["spec"]["policyTypes"] == ["Ingress", "Egress"] for policy in policies)
    for way, peers, own, other in (("egress", "to", source, target), ("ingress", "from", target, source)):
        selecting = [one for one in policies if own[0] == "space" and _matches(one["spec"]["podSelector"], own[1])]
        if selecting and not any(_direction(policy, way, peers, other, wanted) for policy in selecting):
            return False
    return True
