"""The kustomize component, applied by kubectl to Deployments in llm-d's manner."""

import subprocess
import sys
from functools import cache

import kubernetes_validate
import pytest
import yaml

from tests.chart.render import (
    KUBERNETES,
    ROOT,
    Object,
    container,
    one,
    parsed,
    pod_spec,
    tool,
    validated,
    with_values,
)

OVERLAY = ROOT / "tests" / "chart" / "kustomize"


@cache
def built() -> list[Object]:
    done = subprocess.run(
        [tool("kubectl"), "kustomize", "--load-restrictor=LoadRestrictionsNone", str(OVERLAY)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return parsed(done.stdout)


def test_kubernetes_accepts() -> None:
    for document in built():
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
        validated["objects of kubectl kustomize with kubernetes-validate, strict"] += 1


@pytest.mark.parametrize("name", ["guide-decode", "bare-decode"])
def test_the_sidecar_is_that_of_the_chart(name: str) -> None:
    """Two descriptions of one container must not drift apart."""
    ours = container(pod_spec(one(built(), "Deployment", name)), "routing-proxy")
    chart = with_values({"sidecar.settings.discovery": "none"})
    theirs = container(pod_spec(one(chart, "Deployment", "decode")), "routing-proxy")
    assert ours["image"] == "registry.example/pd-sidecar:0.1.0"
    for key in ("restartPolicy", "resources", "securityContext", "volumeMounts", "imagePullPolicy"):
        assert ours[key] == theirs[key], key
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert ours[probe] == theirs[probe] | {"httpGet": {"path": theirs[probe]["httpGet"]["path"], "port": 9090}}
    spec = pod_spec(one(built(), "Deployment", name))
    assert spec["terminationGracePeriodSeconds"] == 135
    assert spec["enableServiceLinks"] is False


def test_what_was_there_stays() -> None:
    spec = pod_spec(one(built(), "Deployment", "guide-decode"))
    assert [each["name"] for each in spec["containers"]] == ["modelserver"]
    assert len(spec["initContainers"]) == 1
    assert {volume["name"] for volume in spec["volumes"]} == {"shm", "pd-sidecar-config"}
    prefill = pod_spec(one(built(), "Deployment", "guide-prefill"))
    assert prefill.keys() == {"containers"}
    assert [each["name"] for each in prefill["containers"]] == ["modelserver"]


def test_the_switch_keeps_its_place_in_the_volume() -> None:
    switch = one(built(), "ConfigMap")
    volumes = pod_spec(one(built(), "Deployment", "guide-decode"))["volumes"]
    names = {volume["configMap"]["name"] for volume in volumes if "configMap" in volume}
    assert names == {switch["metadata"]["name"]} == {"pd-pd-sidecar-switch"}


def test_the_sidecar_accepts_its_arguments(tmp_path: object) -> None:
    file = f"{tmp_path}/sidecar.yaml"
    with open(file, "w") as opened:
        opened.write(one(built(), "ConfigMap")["data"]["sidecar.yaml"])
    arguments = container(pod_spec(one(built(), "Deployment", "guide-decode")), "routing-proxy")["args"][1:]
    arguments[0] = f"--config={file}"
    command = [sys.executable, "-m", "sidecar", "check-config", *arguments]
    done = subprocess.run(command, cwd=ROOT, env={}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert yaml.safe_load(done.stdout)["disagg"] == "auto"
    validated["argument lists of sidecars with check-config"] += 1
