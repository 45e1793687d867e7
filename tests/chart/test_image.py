"""The image as far as it goes without a container engine: the Containerfile, the files that it copies, the SBOM.
(`python -m image.trial` builds and runs it.)"""

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from image import sbom, tree
from sidecar import __version__
from tests.chart.render import CHART, ROOT, one, rendered, sidecars, tool, validated

CONTAINERFILE = (ROOT / "Containerfile").read_text()
LOCKED = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE))


def test_hadolint_has_nothing_to_say() -> None:
    done = subprocess.run(
        [tool("hadolint"), "--failure-threshold", "style", str(ROOT / "Containerfile")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    validated["Containerfile with hadolint"] += 1


def test_it_fits_the_chart() -> None:
    security = yaml.safe_load((CHART / "values.yaml").read_text())["sidecar"]["securityContext"]
    assert f"USER {security['runAsUser']}:{security['runAsGroup']}" in CONTAINERFILE
    assert 'ENTRYPOINT ["python3", "-m", "sidecar"]' in CONTAINERFILE
    assert sidecars(rendered("minimal"))[0]["args"][0] == "serve"
    assert one(rendered("minimal"), "Pod", "test")["spec"]["containers"][0]["command"] == ["python3", "-c"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__


def test_it_needs_no_shell_and_no_index() -> None:
    runs = re.findall(r"^RUN (.*)$", CONTAINERFILE, re.MULTILINE)
    assert all(run.startswith('["') for run in runs)
    assert not re.search(r"pip|apt|curl|:latest", CONTAINERFILE)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("build")
    tree.make(folder, f"{sys.version_info.major}.{sys.version_info.minor}", platform.machine())
    return folder


def test_the_copied_files_are_all_it_needs(made: Path, tmp_path: Path) -> None:
    """Run by a Python that has nothing else, from a folder that cannot be written to."""
    python = getattr(sys, "_base_executable", sys.executable)
    for folder, _, _ in os.walk(made / "image"):
        Path(folder).chmod(0o555)
    environment = {"PYTHONPATH": str(made / "image"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [python, "-s", "-P", "-m", "sidecar", "check-config", "--prefill", "10.0.0.5:8000"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert yaml.safe_load(done.stdout)["prefill"] == ["10.0.0.5:8000"]
    imports = "import sidecar.cli, uvloop, sys; print(uvloop.__file__, sidecar.__file__)"
    command = [python, "-s", "-P", "-c", imports]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert len(done.stdout.split()) == 2, done.stderr
    assert all(file.startswith(str(made / "image")) for file in done.stdout.split())
    assert not list((made / "image").rglob("__pycache__"))
    assert not (made / "image" / "bin").exists()


def test_the_sbom_lists_what_is_there(made: Path) -> None:
    document = json.loads((made / "sbom.cdx.json").read_text())
    listed = {component["name"]: component["version"] for component in document["components"]}
    folders = [path.name.removesuffix(".dist-info") for path in (made / "image").glob("*.dist-info")]
    pairs = [name.rsplit("-", 1) for name in folders]
    assert listed == {re.sub(r"[._]", "-", name.lower()): version for name, version in pairs}
    assert listed.items() <= LOCKED.items()
    lock = (ROOT / "requirements.lock").read_text()
    for component in document["components"]:
        assert component["hashes"][0]["content"] in lock
        assert component["licenses"], component["name"]
    assert document["metadata"]["component"]["version"] == __version__
    assert set(document["dependencies"][0]["dependsOn"]) == {each["purl"] for each in document["components"]}
    assert '"url"' not in json.dumps(document)  # where it was downloaded is no business of its readers
    validated["components of the SBOM against the lock and the files"] += len(listed)


def test_conditions_of_the_lock_are_those_of_the_images_python() -> None:
    assert "typing-extensions" in tree.lock_for("3.11")
    assert "typing-extensions" not in tree.lock_for("3.13")
    for python in ("3.11", "3.13"):
        lines = tree.lock_for(python).splitlines()
        packages = [line for line in lines if "==" in line]
        assert all("--hash=sha256:" in line and " ; " not in line for line in packages)
        assert len(packages) > 10


def test_the_same_lock_gives_the_same_sbom(tmp_path: Path) -> None:
    licences = {
        "Zoo.Animals": "License-Expression: MIT\nLicense: something else",
        "ant": "Classifier: License :: OSI Approved :: BSD License",
        "bee": "License: Apache 2\n  more",
    }
    installed = []
    for name, licence in licences.items():
        folder = tmp_path / f"{name.replace('.', '_')}-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: 1\n{licence}\n")
        archive = {"archive_info": {"hashes": {"sha256": "0" * 64}}, "url": "https://elsewhere"}
        installed.append({"metadata": {"name": name}, "download_info": archive})
    first = sbom.document(sbom.components(tmp_path, {"install": installed}), b"lock")
    assert first == sbom.document(sbom.components(tmp_path, {"install": installed[::-1]}), b"lock")
    assert first != sbom.document(sbom.components(tmp_path, {"install": installed}), b"another lock")
    entries = json.loads(first)["components"]
    assert [entry["name"] for entry in entries] == ["ant", "bee", "zoo-animals"]
    assert entries[0]["licenses"] == [{"license": {"name": "BSD License"}}]
    assert entries[1]["licenses"] == [{"license": {"name": "Apache 2"}}]
    assert entries[2]["licenses"] == [{"expression": "MIT"}]
