"""Schemas of the custom resources that the chart renders: the fields it uses, and no others.

They are monitoring.coreos.com/v1, as prometheus-operator documents it; Kubernetes' own schemas don't know them.
"""

from typing import Any

Schema = dict[str, Any]

DURATION: Schema = {"type": "string", "pattern": "^([0-9]+(ms|s|m|h|d))+$"}
NAME: Schema = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 253}
LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}
PORT_NAME: Schema = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 15}


def _object(required: list[str], **properties: Schema) -> Schema:
    return {"type": "object", "required": required, "additionalProperties": False, "properties": properties}


def _resource(kind: str, spec: Schema) -> Schema:
    return _object(
        ["apiVersion", "kind", "metadata", "spec"],
        apiVersion={"const": "monitoring.coreos.com/v1"},
        kind={"const": kind},
        metadata=_object(["name"], name=NAME, labels=LABELS),
        spec=spec,
    )


SCHEMAS: dict[str, Schema] = {
    "PodMonitor": _resource(
        "PodMonitor",
        _object(
            ["selector", "podMetricsEndpoints"],
            selector=_object(["matchLabels"], matchLabels={**LABELS, "minProperties": 1}),
            podMetricsEndpoints={
                "type": "array",
                "minItems": 1,
                "items": _object(["port"], port=PORT_NAME, path={"const": "/metrics"}, interval=DURATION),
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
}
