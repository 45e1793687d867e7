"""Commands and steps of docs/kubernetes.md and the README do what the text says."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from docs import values_schema
from tests.chart.render import CHART, HELMS, ROOT, Object, one, parsed, sidecars, template, validated, values_file

STEPS = (["disagg=off", "prefill.enabled=false"], ["disagg=off"], ["disagg=auto"])
DOCUMENTS = ("docs/kubernetes.md", "README.md")


def commands(documents: tuple[str, ...] = DOCUMENTS) -> list[str]:
    """Every `helm install` and `helm upgrade` of a code block."""
    text = "".join((ROOT / name).read_text() for name in documents)
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if re.match(r" *helm (install|upgrade) ", line)]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_there_are_commands(document: str) -> None:
    steps = [command for command in commands((document,)) if "mine.yaml" in command]
    assert [re.findall(r"--set (\S+)", command) for command in steps] == list(STEPS)
    assert len(commands((document,))) == len(STEPS) + 1


@pytest.mark.parametrize("name", HELMS)
@pytest.mark.parametrize("command", commands())
def test_a_command_renders(command: str, name: str) -> None:
    words = shlex.split(command, comments=True)
    chart = words.index("charts/pd-sidecar")
    flags = [str(values_file("minimal")) if word == "mine.yaml" else word for word in words[chart + 1 :]]
    done = template(*flags, name=name)
    assert done.returncode == 0, done.stderr
    validated[f"commands of the documents with {name}"] += 1


def step(values: list[str]) -> list[Object]:
    flags = [word for value in values for word in ("--set", value)]
    return parsed(template("--values", str(values_file("minimal")), *flags).stdout)


def test_each_step_changes_what_it_says() -> None:
    """Prefill pods come without a restart of decode pods; turning the switch touches the ConfigMap alone."""
    passing, with_prefill, switched = map(step, STEPS)
    assert [each for each in with_prefill if each not in passing] == [
        each for each in with_prefill if each["metadata"]["name"].endswith("-prefill")
    ]
    assert [each for each in passing if each not in with_prefill] == []
    changed = [each["metadata"]["name"] for each in switched if each not in with_prefill]
    assert changed == ["rel-pd-sidecar-switch"]


@pytest.mark.parametrize("values", STEPS, ids=["sidecar", "prefill", "switch"])
def test_the_sidecar_accepts_each_step(values: list[str], tmp_path: Path) -> None:
    documents = step(values)
    file = tmp_path / "sidecar.yaml"
    file.write_text(one(documents, "ConfigMap", "switch")["data"]["sidecar.yaml"])
    for name in ("token", "ca.crt", "namespace"):
        (tmp_path / name).write_text("llm")
    arguments = [each.replace("/etc/pd-sidecar/sidecar.yaml", str(file)) for each in sidecars(documents)[0]["args"]]
    done = subprocess.run(
        [sys.executable, "-m", "sidecar", "check-config", *arguments[1:], f"--kubernetes-account={tmp_path}"],
        cwd=ROOT,
        env={"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    effective = yaml.safe_load(done.stdout)["disagg"]
    assert {True: "on", False: "off"}.get(effective, effective) == values[0].partition("=")[2]
    validated["steps of the documents with check-config"] += 1


def test_the_grace_table_is_that_of_the_chart() -> None:
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    seconds = [int(found) for found in re.findall(r"^\| (\d+) \| `?[a-z]", text, re.MULTILINE)]
    spec = one(step([]), "Deployment", "decode")["spec"]["template"]["spec"]
    assert sum(seconds) == spec["terminationGracePeriodSeconds"]


def test_every_value_that_the_document_names_exists() -> None:
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    names = re.findall(r"`((?:decode|prefill|engine|sidecar|monitoring|networkPolicy)\.[A-Za-z.-]+)", text)
    assert len(names) > 15
    for dotted in names:
        where = yaml.safe_load((CHART / "values.yaml").read_text())
        if dotted.startswith("sidecar.settings."):
            assert dotted.removeprefix("sidecar.settings.") in values_schema.settings_schema()["properties"]
            continue
        for part in dotted.split("."):
            assert part in where, dotted
            where = where[part]
