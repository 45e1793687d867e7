"""Another chart depends on this one and takes only the sidecar's container."""

import shutil
from pathlib import Path

import kubernetes_validate
import pytest

from tests.chart.render import CHART, HELMS, KUBERNETES, Object, one, parsed, template, validated

PARENT = Path(__file__).with_name("parent")


@pytest.fixture(params=HELMS)
def documents(request: pytest.FixtureRequest, tmp_path: Path) -> list[Object]:
    shutil.copytree(PARENT, tmp_path / "parent")
    shutil.copytree(CHART, tmp_path / "parent" / "charts" / "pd-sidecar")
    done = template(name=request.param, chart=tmp_path / "parent")
    assert done.returncode == 0, done.stderr
    return parsed(done.stdout)


def test_the_container_stands_in_the_parents_pod(documents: list[Object]) -> None:
    for document in documents:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
        validated["objects of a parent chart with kubernetes-validate, strict"] += 1
    assert sorted(each["kind"] for each in documents) == [
        *("ConfigMap", "Role", "RoleBinding"),
        *("ServiceAccount", "StatefulSet"),
    ]
    spec = one(documents, "StatefulSet")["spec"]["template"]["spec"]
    sidecar = spec["initContainers"][0]
    assert (sidecar["name"], sidecar["restartPolicy"]) == ("routing-proxy", "Always")
    assert {"--model-server-port=8001", "--prefill-allow=10.0.0.0/8"} <= set(sidecar["args"])
    assert {"--discovery=kubernetes", "--discovery-model=mine"} <= set(sidecar["args"])
    account = one(documents, "ServiceAccount")["metadata"]["name"]
    assert spec["serviceAccountName"] == account == one(documents, "RoleBinding")["subjects"][0]["name"]
    assert {mount["name"] for mount in sidecar["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
    switch = one(documents, "ConfigMap")
    assert switch["data"]["sidecar.yaml"] == 'disagg: "on"\n'
    assert spec["volumes"][0]["configMap"]["name"] == switch["metadata"]["name"]
    assert spec["volumes"][0]["name"] == sidecar["volumeMounts"][0]["name"]
