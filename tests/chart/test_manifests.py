"""Every values file, rendered by both Helms for old and new clusters: valid to Kubernetes, and to the sidecar."""

import subprocess
import sys
import tarfile
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from sidecar import __version__, config
from tests.certificates import Authority
from tests.chart.custom_resources import PODS_IN, SCHEMAS
from tests.chart.render import (
    CHART,
    HELMS,
    KUBERNETES,
    LAST_WITHOUT_NATIVE,
    NEWEST,
    OLDEST,
    ROOT,
    VALUES,
    helm,
    parsed,
    rendered,
    sidecars,
    template,
    unknown_settings,
    validated,
    values_file,
)

VERSIONS = (OLDEST, LAST_WITHOUT_NATIVE, "1.29", KUBERNETES, NEWEST)


def test_there_are_values_files() -> None:
    assert {
        "minimal",
        "gpu-rdma",
        "data-parallel",
        "plain-container",
        "sidecar-only",
        "discovery",
        "leader-worker-set",
    } <= set(VALUES)


@pytest.mark.parametrize("kube", VERSIONS)
@pytest.mark.parametrize("values", VALUES)
def test_kubernetes_accepts(values: str, kube: str) -> None:
    documents = rendered(values, kube=kube)
    names = [(document["kind"], document["metadata"]["name"]) for document in documents]
    assert len(set(names)) == len(names)
    for document in documents:
        if schema := SCHEMAS.get(document["kind"]):
            jsonschema.Draft7Validator(schema).validate(document)
            validated["custom resources with schemas of our own (jsonschema)"] += 1
            for template in PODS_IN.get(document["kind"], ()):
                pod = {"apiVersion": "v1", "kind": "Pod", **document["spec"]["leaderWorkerTemplate"][template]}
                kubernetes_validate.validate(pod, kube, strict=True)
                validated["pods of LeaderWorkerSets with kubernetes-validate, strict"] += 1
        else:
            kubernetes_validate.validate(document, kube, strict=True)
            validated["objects with kubernetes-validate, strict"] += 1


@pytest.mark.parametrize("values", VALUES)
def test_both_helms_render_the_same(values: str) -> None:
    assert rendered(values, "helm3") == rendered(values, "helm4")
    validated["values files rendered alike by Helm 3 and Helm 4"] += 1


@pytest.mark.parametrize("name", HELMS)
@pytest.mark.parametrize("values", VALUES)
def test_lint(values: str, name: str) -> None:
    assert not unknown_settings(yaml.safe_load(values_file(values).read_text()))
    done = helm(name, "lint", "--strict", str(CHART), "--values", str(values_file(values)))
    assert done.returncode == 0, done.stdout + done.stderr
    validated[f"values files with {name} lint --strict"] += 1


@pytest.mark.parametrize("values", VALUES)
def test_the_sidecar_accepts_its_arguments(values: str, tmp_path: Path) -> None:
    unknown = unknown_settings(yaml.safe_load(values_file(values).read_text()))
    known = {"config"} | {field.name for field in config.FIELDS}
    documents = rendered(values)
    switch = next(one for one in documents if one["kind"] == "ConfigMap" and "sidecar.yaml" in one["data"])
    file = f"{tmp_path}/sidecar.yaml"
    with open(file, "w") as opened:
        opened.write(switch["data"]["sidecar.yaml"])
    for name in ("token", "ca.crt", "namespace"):  # as a pod has them
        (tmp_path / name).write_text("llm")
    pod = {
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "KUBERNETES_SERVICE_PORT": "443",
        "PD_SIDECAR_KUBERNETES_ACCOUNT": str(tmp_path),
    }
    certificate = Authority().issue("decode").write(Path(f"{tmp_path}/tls"))
    for container in sidecars(documents):
        arguments = [
            argument.replace("/etc/pd-sidecar/sidecar.yaml", file).replace("/etc/pd-sidecar-tls", str(certificate))
            for argument in container["args"][1:]
            if not unknown or argument.split("=")[0].removeprefix("--") in known
        ]
        assert f"--config={file}" in arguments
        done = subprocess.run(
            [sys.executable, "-m", "sidecar", "check-config", *arguments],
            cwd=ROOT,
            env=pod,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        effective = yaml.safe_load(done.stdout)
        for argument in arguments:
            name, _, value = argument.removeprefix("--").partition("=")
            if name != "config":
                assert value in (str(effective[name]), *map(str, _listed(effective[name]))), argument
        validated["argument lists of sidecars with check-config"] += 1
    if values != "sidecar-only":
        assert len(sidecars(documents)) == 1


def _listed(value: object) -> list[object]:
    """What a value may also be written as: one of a list, or a float without its fraction."""
    if isinstance(value, float):
        return [f"{value:g}"]
    return value if isinstance(value, list) else []


@pytest.mark.parametrize("name", HELMS)
def test_the_package_is_the_chart(name: str, tmp_path: Path) -> None:
    """What is pushed to a registry renders as the folder does; the values files of the tests stay here."""
    assert helm(name, "package", str(CHART), "--destination", str(tmp_path)).returncode == 0
    package = tmp_path / f"pd-sidecar-{__version__}.tgz"
    with tarfile.open(package) as archive:
        files = {member.removeprefix("pd-sidecar/") for member in archive.getnames()}
    assert {"files/rules.yaml", "files/dashboard.json", "values.schema.json"} <= files
    assert not [file for file in files if file.startswith("ci/")]
    done = template("--values", str(values_file("gpu-rdma")), name=name, chart=package)
    assert parsed(done.stdout) == rendered("gpu-rdma")
    validated[f"packages of {name}"] += 1


def test_defaults_are_those_of_the_settings() -> None:
    """Where the chart spells a default out, it is that of `serve`, but for JSON logs and discovery."""
    settings = yaml.safe_load((CHART / "values.yaml").read_text())["sidecar"]["settings"]
    defaults = {field.name: field.default for field in config.FIELDS}
    assert settings.pop("log-format") == "json"
    assert settings.pop("discovery") == "kubernetes"
    assert settings == {name: defaults[name] for name in settings}
