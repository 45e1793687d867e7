"""Makes what the Containerfile copies, build/image: the locked wheels and our packages; and build/sbom.cdx.json.

    python -m image.tree --python 3.12 --machine x86_64

No package index is asked inside of the image's build: pip chooses wheels here, for the Python and machine of the
image, and checks them against requirements.lock.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

from packaging.markers import Marker

from image import sbom

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
PACKAGES = ("sidecar", "transport")
GLIBCS = ("manylinux_2_17", "manylinux2014", "manylinux_2_28")


class TreeError(Exception):
    """Which step failed, and what pip said."""


def lock_for(python: str) -> str:
    """The lock as that Python reads it. pip would judge its conditions by the Python that runs here."""
    seen = {"python_version": python, "python_full_version": f"{python}.0"}
    lines = []
    for line in LOCK.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        head, hashes, rest = line.partition("--hash")
        requirement, _, condition = head.partition(" ; ")
        if not condition or Marker(condition).evaluate(seen):
            lines.append(requirement + " " + hashes + rest)
    return "\n".join(lines) + "\n"


def install(target: Path, python: str, machine: str) -> list[sbom.Component]:
    """The locked wheels, unpacked into `target`. Returns what was installed."""
    report, lock = target.with_suffix(".report.json"), target.with_suffix(".lock")
    lock.write_text(lock_for(python), encoding="utf-8")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--target", str(target), "--no-deps", "--no-compile", "--only-binary=:all:", "--require-hashes"]
    command += ["--python-version", python, "--implementation", "cp", "--report", str(report)]
    command += [word for glibc in GLIBCS for word in ("--platform", f"{glibc}_{machine}")]
    done = subprocess.run([*command, "--requirement", str(lock)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise TreeError(f"wheels for Python {python} on {machine}: {done.stderr.strip()}")
    components = sbom.components(target, json.loads(report.read_text(encoding="utf-8")))
    report.unlink()
    lock.unlink()
    return components


def make(folder: Path, python: str, machine: str) -> None:
    """`folder`/image and `folder`/sbom.cdx.json, from nothing. Raises `TreeError`."""
    target = folder / "image"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    components = install(target, python, machine)
    shutil.rmtree(target / "bin", ignore_errors=True)  # scripts that name the Python of this machine
    for package in PACKAGES:
        shutil.copytree(ROOT / package, target / package, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "sbom.cdx.json").write_text(sbom.document(components, LOCK.read_bytes()), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Makes build/image and build/sbom.cdx.json.")
    parser.add_argument("--python", default="3.12", metavar="X.Y", help="the Python of the base image")
    parser.add_argument("--machine", default="x86_64", help="x86_64 or aarch64")
    options = parser.parse_args()
    try:
        make(ROOT / "build", options.python, options.machine)
    except TreeError as error:
        print(f"image: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
