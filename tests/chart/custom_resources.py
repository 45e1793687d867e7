"""Schemas of the custom resources that the chart renders: the fields it uses, and no others.

They are monitoring.coreos.com/v1, as prometheus-operator documents it, and leaderworkerset.x-k8s.io/v1; Kubernetes'
own schemas don't know them. What is a pod inside one is judged by Kubernetes' own (`PODS_IN`).
"""

from typing import Any

Schema = dict[str, Any]

DURATION: Schema = {"type": "string", "pattern": "^([0-9]+(ms|s|m|h|d))+$"}
NAME: Schema = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 253}
LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}
PORT_NAME: Schema = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 15}


def _object(required: list[str], **properties: Schema) -> Schema:
    return {"type": "object", "required": required, "additionalProperties": False, "properties": properties}


def _resource(kind: str, spec: Schema, version: str = "monitoring.coreos.com/v1") -> Schema:
    annotations = {"type": "object", "additionalProperties": {"type": "string"}}
    return _object(
        ["apiVersion", "kind", "metadata", "spec"],
        apiVersion={"const": version},
        kind={"const": kind},
        metadata=_object(["name"], name=NAME, labels=LABELS, annotations=annotations),
        spec=spec,
    )


AMOUNT: Schema = {"type": ["integer", "string"], "minimum": 0, "pattern": "^[0-9]+%$"}
PODS_IN = {"LeaderWorkerSet": ("leaderTemplate", "workerTemplate")}
"""Pod templates inside `spec.leaderWorkerTemplate`."""


SCHEMAS: dict[str, Schema] = {
    "PodMonitor": _resource(
        "PodMonitor",
        _object(
            ["selector", "podMetricsEndpoints"],
            selector=_object(["matchLabels"], matchLabels={**LABELS, "minProperties": 1}),
            podMetricsEndpoints={
                "type": "array",
                "minItems": 1,
                "items": _object(
                    ["port"],
                    port=PORT_NAME,
                    path={"const": "/metrics"},
                    interval=DURATION,
                    scheme={"enum": ["http", "https"]},
                    tlsConfig=_object([], insecureSkipVerify={"type": "boolean"}),
                ),
            },
        ),
    ),
    "PrometheusRule": _resource(
        "PrometheusRule",
        _object(
            ["groups"],
            groups={
                "type": "array",
                "minItems": 1,
                "items": _object(
                    ["name", "rules"],
                    name={"type": "string"},
                    rules={
                        "type": "array",
                        "minItems": 1,
                        "items": _object(
                            ["alert", "expr", "for", "labels", "annotations"],
                            alert={"type": "string", "pattern": "^[A-Za-z]+$"},
                            expr={"type": "string"},
                            **{"for": DURATION},
                            labels=_object(["severity"], severity={"enum": ["critical", "warning"]}),
                            annotations=_object(
                                ["summary", "runbook"], summary={"type": "string"}, runbook={"type": "string"}
                            ),
                        ),
                    },
                ),
            },
        ),
    ),
    "LeaderWorkerSet": _resource(
        "LeaderWorkerSet",
        _object(
            ["leaderWorkerTemplate"],
            replicas={"type": "integer", "minimum": 0},
            startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
            rolloutStrategy=_object(
                ["type"],
                type={"const": "RollingUpdate"},
                rollingUpdateConfiguration=_object(
                    [], maxUnavailable=AMOUNT, maxSurge=AMOUNT, partition={"type": "integer", "minimum": 0}
                ),
            ),
            leaderWorkerTemplate=_object(
                ["workerTemplate"],
                size={"type": "integer", "minimum": 1},
                restartPolicy={"enum": ["Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
                subGroupPolicy=_object([], subGroupSize={"type": "integer", "minimum": 1}),
                leaderTemplate={"type": "object"},
                workerTemplate={"type": "object"},
            ),
        ),
        "leaderworkerset.x-k8s.io/v1",
    ),
}
