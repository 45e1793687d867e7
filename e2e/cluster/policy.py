"""NetworkPolicies as a network plugin enforces them: nftables in each pod's own namespace.

What Kubernetes says of them (networking.k8s.io/v1): pods that no policy selects may do anything; of those that
select a pod one must admit a connection, at either end; answers pass; a node reaches its own pods. Must not know
who should reach whom.
"""

from __future__ import annotations

import ipaddress
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from e2e.cluster.network import NODE

if TYPE_CHECKING:
    from e2e.cluster.network import Namespace

Object = dict[str, Any]
WAYS = {"Ingress": ("input", "ingress", "from", "saddr"), "Egress": ("output", "egress", "to", "daddr")}


def why_not() -> str:
    """Why they can't be enforced here; "" if they can."""
    return "" if shutil.which("nft") else "needs nftables (nft)"


@dataclass(frozen=True)
class Member:
    """A pod as policies see it."""

    space: str
    """Its Kubernetes namespace."""
    labels: dict[str, str]
    network: Namespace
    ip: str


def enforce(policies: Iterable[Object], space: str, members: list[Member]) -> None:
    """Puts the policies of that Kubernetes namespace in force, between these pods."""
    own = [one for one in policies if one["kind"] == "NetworkPolicy"]
    for member in members:
        selecting = [
            one for one in own if member.space == space and _selects(one["spec"]["podSelector"], member.labels)
        ]
        chains = [
            _chain(kind, [one for one in selecting if kind in one["spec"]["policyTypes"]], space, members)
            for kind in WAYS
        ]
        member.network.run("nft", "-f", "-", given="table inet pods {\n" + "\n".join(chains) + "\n}\n")


def _chain(kind: str, policies: list[Object], space: str, members: list[Member]) -> str:
    hook, way, peers, address = WAYS[kind]
    lines = [
        'meta iif "lo" accept' if hook == "input" else 'meta oif "lo" accept',
        "ct state established,related accept",
    ]
    if not policies:
        lines.append("accept")
    if hook == "input":
        lines.append(f"ip saddr {NODE} accept")
    for policy in policies:
        for rule in policy["spec"][way]:
            addresses = sorted({ip for peer in rule.get(peers, ()) for ip in _addresses(peer, space, members)})
            if peers in rule and not addresses:
                continue  # a peer of which there is no pod
            where = f"ip {address} {{ {', '.join(addresses)} }} " if peers in rule else ""
            ports = [_ports(port) for port in rule.get("ports", ())] or [""]
            lines += [f"{where}{port}accept" for port in ports]
    body = "\n".join(f"    {line}" for line in lines)
    return f"  chain {hook} {{\n    type filter hook {hook} priority 0; policy drop;\n{body}\n  }}"


def _ports(port: Object) -> str:
    last = port.get("endPort", port["port"])
    return f"{port['protocol'].lower()} dport {port['port']}-{last} "


def _addresses(peer: Object, space: str, members: list[Member]) -> list[str]:
    if "ipBlock" in peer:
        assert "except" not in peer["ipBlock"]
        return [str(ipaddress.ip_network(peer["ipBlock"]["cidr"]))]
    return [
        one.ip
        for one in members
        if _selects(peer.get("podSelector", {}), one.labels)
        and (
            _selects(peer["namespaceSelector"], {"kubernetes.io/metadata.name": one.space})
            if "namespaceSelector" in peer
            else one.space == space
        )
    ]


def _selects(selector: Object, labels: dict[str, str]) -> bool:
    wanted: dict[str, str] = selector.get("matchLabels", {})
    expressions = selector.get("matchExpressions", ())
    assert all(one["operator"] == "In" for one in expressions)
    return wanted.items() <= labels.items() and all(labels.get(one["key"]) in one["values"] for one in expressions)
