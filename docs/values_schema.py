"""values.schema.json of the chart, made from the settings: no flag reaches a cluster that `serve` does not know.

Closed (`additionalProperties: false`) is only what is wholly ours; whatever Kubernetes or vLLM read stays open.
"""

from typing import Any

from sidecar import config

Schema = dict[str, Any]

SETTINGS_OF_THE_CHART = ("disagg",)
"""Set elsewhere in the chart: `disagg` is the ConfigMap's, and a flag would win over it for ever."""

OBJECT: Schema = {"type": "object"}
LIST: Schema = {"type": "array"}
TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
AMOUNT: Schema = {"type": ["integer", "string"]}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
SECONDS: Schema = {"type": "integer", "minimum": 0, "maximum": 86400}
RANKS: Schema = {"type": "integer", "minimum": 1, "maximum": 256}
TAG: Schema = {
    "type": "string",
    "pattern": "^([A-Za-z0-9_][A-Za-z0-9._-]{0,127})?$",
    "not": {"const": "latest"},
    "description": "never latest: two pods of one Deployment would run different versions",
}


def closed(properties: Schema, **more: Any) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": properties, **more}


def opened(properties: Schema) -> Schema:
    return {"type": "object", "properties": properties}


def or_null(schema: Schema) -> Schema:
    return {**schema, "type": [schema["type"], "null"]}


def settings_schema() -> Schema:
    """The settings of `serve`, without those that the chart sets itself."""
    properties: Schema = {}
    found: Schema = config.json_schema()["$defs"]["Settings"]["properties"]
    for name, schema in found.items():
        if name in SETTINGS_OF_THE_CHART:
            continue
        own = {key: value for key, value in schema.items() if key != "default"}
        choices = own.get("enum", ())
        if {"on", "off"} & set(choices):
            own["enum"] = [*choices, True, False]  # how YAML reads a bare on or off
        if "type" in own:
            own = or_null(own)
        properties[name] = own
    return closed(properties, description="flags of serve, without --disagg (see disagg) and --config")


def _image() -> Schema:
    return closed(
        {
            "repository": TEXT,
            "tag": TAG,
            "digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
            "pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
        }
    )


def _role(**own: Schema) -> Schema:
    spread = closed(
        {
            "enabled": FLAG,
            "maxSkew": {"type": "integer", "minimum": 1},
            "topologyKey": TEXT,
            "whenUnsatisfiable": {"enum": ["ScheduleAnyway", "DoNotSchedule"]},
        }
    )
    group = closed(
        {
            "size": {"type": "integer", "minimum": 2},
            "subGroupSize": {**or_null(COUNT), "minimum": 1},
            "exclusiveTopology": TEXT,
            "subGroupExclusiveTopology": TEXT,
            "restartPolicy": {"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
            "rollingUpdate": closed(
                {"maxUnavailable": AMOUNT, "maxSurge": AMOUNT, "partition": COUNT},
                description="rollingUpdateConfiguration",
            ),
        }
    )
    return opened(
        {
            "enabled": FLAG,
            "kind": {"enum": ["Deployment", "LeaderWorkerSet"]},
            "leaderWorkerSet": group,
            "replicas": {**or_null(COUNT), "description": "null leaves it to an autoscaler"},
            "kvRole": {"enum": ["", "kv_producer", "kv_consumer", "kv_both"]},
            "args": LIST,
            "env": LIST,
            "resources": OBJECT,
            "preStopSeconds": SECONDS,
            "shutdownTimeoutSeconds": SECONDS,
            "terminationGracePeriodSeconds": or_null(SECONDS),
            "strategy": OBJECT,
            "selectorLabels": OBJECT,
            "podLabels": OBJECT,
            "podAnnotations": OBJECT,
            "volumes": LIST,
            "volumeMounts": LIST,
            "initContainers": LIST,
            "extraContainers": LIST,
            "topologySpread": spread,
            "pdb": closed({"enabled": FLAG, "maxUnavailable": AMOUNT}),
            "podSpec": OBJECT,
            **own,
        }
    )


def schema() -> Schema:
    """The whole file. JSON Schema draft 7, which Helm 3 and 4 both read."""
    rules = closed({"enabled": FLAG, "labels": OBJECT, "runbooks": TEXT})
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart pd-sidecar",
        "description": "Written by `make docs` from sidecar/config.py and docs/values_schema.py; do not edit.",
        "type": "object",
        "properties": {
            "nameOverride": TEXT,
            "fullnameOverride": TEXT,
            "commonLabels": OBJECT,
            "imagePullSecrets": LIST,
            "disagg": {"enum": ["auto", "off", "on", True, False], "description": "true and false: on and off"},
            "model": closed({"name": TEXT, "servedName": TEXT, "label": TEXT}),
            "engineType": TEXT,
            "sidecar": closed(
                {
                    "image": _image(),
                    "name": {"type": "string", "minLength": 1},
                    "mode": {"enum": ["auto", "native", "container"]},
                    "settings": settings_schema(),
                    "tls": closed({"secretName": TEXT, "clientCa": FLAG}),
                    "env": LIST,
                    "volumeMounts": LIST,
                    "resources": OBJECT,
                    "startupProbe": OBJECT,
                    "readinessProbe": OBJECT,
                    "livenessProbe": OBJECT,
                    "securityContext": OBJECT,
                }
            ),
            "engine": opened(
                {
                    "image": _image(),
                    "command": LIST,
                    "args": LIST,
                    "env": LIST,
                    "keepAliveSeconds": {"type": "integer", "minimum": 1},
                    "hashSeed": {"type": "string", "pattern": "^[0-9]+$"},
                    "ucx": OBJECT,
                    "rdma": OBJECT,
                    "shm": closed({"enabled": FLAG, "sizeLimit": {"type": ["string", "integer"]}}),
                    "kvConnector": TEXT,
                    "kvTransferExtra": OBJECT,
                    "securityContext": OBJECT,
                }
            ),
            "decode": _role(
                service=opened({"enabled": FLAG, "type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]}})
            ),
            "prefill": _role(
                port=PORT, dataParallelSize=RANKS, portPerRank=FLAG, service=opened({"enabled": FLAG})
            ),
            "serviceAccount": closed({"create": FLAG, "name": TEXT, "annotations": OBJECT}),
            "rbac": closed({"create": FLAG}),
            "networkPolicy": closed(
                {
                    "enabled": FLAG,
                    "nixlDataPorts": closed({"first": PORT, "last": PORT}, required=["first", "last"]),
                    "clients": LIST,
                    "monitoring": LIST,
                    "dns": LIST,
                    "apiServer": LIST,
                    "decode": closed({"extraIngress": LIST, "extraEgress": LIST}),
                    "prefill": closed({"extraIngress": LIST, "extraEgress": LIST}),
                }
            ),
            "monitoring": closed(
                {
                    "podMonitor": closed({"enabled": FLAG, "interval": TEXT, "labels": OBJECT, "engines": FLAG}),
                    "rules": rules,
                    "dashboard": closed({"enabled": FLAG, "labels": OBJECT, "annotations": OBJECT}),
                }
            ),
            "tests": closed({"enabled": FLAG}),
        },
    }
