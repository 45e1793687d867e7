"""Commands and steps of docs/kubernetes.md and the README do what the text says."""

import re
import shlex

import pytest
import yaml

from docs import values_schema
from tests.chart.render import CHART, HELMS, ROOT, Object, one, parsed, template, validated, values_file

STEPS = (["disagg=off", "prefill.enabled=false"], ["disagg=off"], ["disagg=auto"])


def commands() -> list[str]:
    """Every `helm install` and `helm upgrade` of a code block."""
    text = "".join((ROOT / name).read_text() for name in ("docs/kubernetes.md", "README.md"))
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if re.match(r" *helm (install|upgrade) ", line)]


def test_there_are_commands() -> None:
    assert len(commands()) == len(STEPS) + 2


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
    steps = [command for command in commands() if "mine.yaml" in command]
    assert [re.findall(r"--set (\S+)", command) for command in steps] == list(STEPS)


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
