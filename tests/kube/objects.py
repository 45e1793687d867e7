"""Pods and InferencePools in the API's JSON."""

from __future__ import annotations

from typing import Any

ROLE = {"llm-d.ai/role": "prefill"}


def pod(
    name: str,
    ip: str = "",
    *,
    ready: bool = True,
    labels: dict[str, str] | None = None,
    terminating: bool = False,
    phase: str = "Running",
) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name, "labels": ROLE if labels is None else labels}
    if terminating:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"containers": [{"name": "vllm", "image": "vllm"}], "automountServiceAccountToken": False},
        "status": running(ip, ready, phase),
    }


def running(ip: str, ready: bool = True, phase: str = "Running") -> dict[str, Any]:
    state = "True" if ready else "False"
    conditions = [{"type": "Initialized", "status": "True"}, {"type": "Ready", "status": state}]
    return {"phase": phase, "conditions": conditions} | ({"podIP": ip, "podIPs": [{"ip": ip}]} if ip else {})


def pool(name: str, labels: dict[str, str], *ports: int) -> dict[str, Any]:
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": name},
        "spec": {
            "selector": {"matchLabels": labels},
            "targetPorts": [{"number": port} for port in ports],
            "endpointPickerRef": {"name": "epp"},
        },
    }


def old_pool(name: str, labels: dict[str, str], port: int) -> dict[str, Any]:
    return {
        "apiVersion": "inference.networking.x-k8s.io/v1alpha2",
        "kind": "InferencePool",
        "metadata": {"name": name},
        "spec": {"selector": labels, "targetPortNumber": port},
    }
