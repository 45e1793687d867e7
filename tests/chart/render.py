"""The chart as Helm renders it, and what was validated with which tool: told at the end of the run.

Must not know what the chart should hold.
"""

from __future__ import annotations

import copy
import functools
import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import yaml

from sidecar import config
from tests.chart import tools

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "pd-sidecar"
VALUES = sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").glob("*-values.yaml"))
HELMS = ("helm3", "helm4")
KUBERNETES = "1.34"
OLDEST, LAST_WITHOUT_NATIVE, NEWEST = "1.25", "1.28", "1.37"

Object = dict[str, Any]
Done: TypeAlias = subprocess.CompletedProcess[str]

validated: Counter[str] = Counter()
"""What was validated with which tool."""


def values_file(name: str) -> Path:
    return CHART / "ci" / f"{name}-values.yaml"


def tool(name: str) -> str:
    """The path of a tool; without it the test is skipped, with the reason, and counted as skipped."""
    try:
        return tools.debian(name) if name in tools.FROM_DEBIAN else tools.binary(name)
    except tools.ToolMissing as missing:
        pytest.skip(str(missing))


def settings_of(values: Object) -> Object:
    settings: Object = values.get("sidecar", {}).get("settings", {})
    return settings


def unknown_settings(values: Object) -> set[str]:
    """Settings that this version of `serve` has no flag for yet."""
    return set(settings_of(values)) - {field.name for field in config.FIELDS}


def helm(name: str, *arguments: str) -> Done:
    return subprocess.run([tool(name), *arguments], capture_output=True, text=True, timeout=60, check=False)


def template(*flags: str, name: str = "helm4", kube: str = KUBERNETES, chart: Path = CHART) -> Done:
    return helm(name, "template", "rel", str(chart), "--namespace", "space", "--kube-version", kube, *flags)


@functools.cache
def _rendered(values: str, name: str, kube: str) -> list[Object]:
    flags = ["--values", str(values_file(values))]
    if unknown_settings(yaml.safe_load(values_file(values).read_text())):
        flags.append("--skip-schema-validation")
    done = template(*flags, name=name, kube=kube)
    assert done.returncode == 0, done.stderr
    return parsed(done.stdout)


def parsed(text: str) -> list[Object]:
    return [document for document in yaml.safe_load_all(text) if document]


def rendered(values: str, name: str = "helm4", kube: str = KUBERNETES) -> list[Object]:
    """What the chart makes of a file of ci/."""
    return copy.deepcopy(_rendered(values, name, kube))


def with_values(values: Object, kube: str = KUBERNETES, name: str = "helm4") -> list[Object]:
    """What the chart makes of the minimal values and these over them."""
    done = with_values_raw(values, kube, name)
    assert done.returncode == 0, done.stderr
    return parsed(done.stdout)


def with_values_raw(values: Object, kube: str = KUBERNETES, name: str = "helm4") -> Done:
    flags = ["--values", str(values_file("minimal"))]
    for key, value in values.items():
        flags += ["--set-json", f"{key}={json.dumps(value)}"]
    return template(*flags, name=name, kube=kube)


def one(documents: list[Object], kind: str, ending: str = "") -> Object:
    """The one object of a kind whose name ends so."""
    found = [document for document in documents if is_one(document, kind, ending)]
    assert len(found) == 1, f"{len(found)} of {kind} {ending}"
    return found[0]


def is_one(document: Object, kind: str, ending: str) -> bool:
    name: str = document["metadata"]["name"]
    return document["kind"] == kind and name.endswith(ending)


def pod_spec(document: Object) -> Object:
    """The pod inside a Pod, a Deployment, or the leader's of a LeaderWorkerSet."""
    spec: Object = document["spec"] if document["kind"] == "Pod" else template_of(document)["spec"]
    return spec


def template_of(document: Object) -> Object:
    """Labels and spec of the pods that a Deployment makes, or of a LeaderWorkerSet's leaders."""
    spec = document["spec"]
    found: Object = spec["leaderWorkerTemplate"]["leaderTemplate"] if is_group(document) else spec["template"]
    return found


def worker_of(document: Object) -> Object:
    """Of a LeaderWorkerSet."""
    found: Object = document["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    return found


def is_group(document: Object) -> bool:
    return bool(document["kind"] == "LeaderWorkerSet")


def workload(documents: list[Object], role: str) -> Object:
    """The Deployment or LeaderWorkerSet of a role."""
    return next(
        each for each in documents for kind in ("Deployment", "LeaderWorkerSet") if is_one(each, kind, role)
    )


def selector_of(documents: list[Object], role: str) -> Object:
    """What the pods of a role are selected by."""
    found: Object = (
        one(documents, "PodDisruptionBudget", role)["spec"]["selector"]["matchLabels"]
        if is_group(made := workload(documents, role))
        else made["spec"]["selector"]["matchLabels"]
    )
    return found


def pods(documents: list[Object]) -> Iterator[tuple[str, Object]]:
    for document in documents:
        if document["kind"] in ("Pod", "Deployment", "LeaderWorkerSet"):
            yield document["metadata"]["name"], pod_spec(document)
        if is_group(document):
            yield f"{document['metadata']['name']}-worker", worker_of(document)["spec"]


def containers(spec: Object) -> list[Object]:
    return [*spec.get("initContainers", []), *spec["containers"]]


def container(spec: Object, name: str) -> Object:
    return next(one for one in containers(spec) if one["name"] == name)


def sidecars(documents: list[Object]) -> list[Object]:
    return [one for _, spec in pods(documents) for one in containers(spec) if one.get("args", [""])[0] == "serve"]
