"""What is in the image, as CycloneDX 1.6: names, versions, licences and hashes of the wheels that pip chose.

Made from the installed packages and pip's installation report (version 1, as pip's documentation has it). The same
lock gives the same bytes: the serial number comes from the lock, and there is no time in it.
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from sidecar import __version__


@dataclass(frozen=True, order=True)
class Component:
    """One wheel."""

    name: str
    version: str
    sha256: str
    license: str
    is_expression: bool
    """Whether `license` is an SPDX expression, or only what older metadata says."""

    @property
    def purl(self) -> str:
        return f"pkg:pypi/{self.name}@{self.version}"


def components(tree: Path, report: dict[str, Any]) -> list[Component]:
    """What pip installed into `tree`, by name. The hashes are the report's, the rest the packages' own."""
    hashes = {
        _normal(item["metadata"]["name"]): item["download_info"]["archive_info"]["hashes"]["sha256"]
        for item in report["install"]
    }
    found = []
    for package in distributions(path=[str(tree)]):
        name = _normal(package.metadata["Name"])
        expression = _field(package, "License-Expression")
        text = expression or _named_license(package)
        found.append(Component(name, package.version, hashes[name], text, bool(expression)))
    return sorted(found)


def _field(package: Distribution, name: str) -> str:
    values = package.metadata.get_all(name)
    return str(values[0]) if values else ""


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _named_license(package: Distribution) -> str:
    classifiers = package.metadata.get_all("Classifier") or []
    licenses = [line.rpartition(" :: ")[2] for line in classifiers if line.startswith("License :: ")]
    return " / ".join(licenses) or _field(package, "License").strip().partition("\n")[0][:80]


def document(found: list[Component], lock: bytes) -> str:
    """The whole file."""
    own = f"pkg:pypi/pd-sidecar@{__version__}"
    root = {
        "type": "application",
        "bom-ref": own,
        "name": "pd-sidecar",
        "version": __version__,
        "purl": own,
        "licenses": [{"license": {"id": "Apache-2.0"}}],
    }
    content = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, __version__ + lock.decode())}",
        "version": 1,
        "metadata": {"component": root},
        "components": [_entry(component) for component in found],
        "dependencies": [{"ref": own, "dependsOn": [component.purl for component in found]}],
    }
    return json.dumps(content, indent=2) + "\n"


def _entry(component: Component) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "type": "library",
        "bom-ref": component.purl,
        "name": component.name,
        "version": component.version,
        "purl": component.purl,
        "hashes": [{"alg": "SHA-256", "content": component.sha256}],
    }
    if component.is_expression:
        entry["licenses"] = [{"expression": component.license}]
    elif component.license:
        entry["licenses"] = [{"license": {"name": component.license}}]
    return entry
