"""Builds the image here and runs it as the chart does: `python -m image.trial`.

It wants root, debootstrap, buildah and runc (all in Debian), but no container engine and no registry of images: the
base is a Debian made on the spot.

Tells whether two builds give the same image, its size, how long it takes to start and what it keeps in memory, with
a read-only root, no capability and no root. Not part of `make test`: it wants root and two minutes.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from image import tree

NEEDED = ("debootstrap", "buildah", "runc")
PYTHON = "3.11"  # bookworm's
STARTS = 5
DROPPED = ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale")


class Trial:
    """One storage of images, thrown away at the end."""

    def __init__(self, work: Path) -> None:
        self.work = work

    def buildah(self, *arguments: str) -> str:
        storage = ["--root", str(self.work / "images"), "--runroot", str(self.work / "run")]
        return _run("buildah", *storage, "--storage-driver", "vfs", *arguments).strip()

    def base(self) -> str:
        """A Debian with Python, as small as debootstrap makes it."""
        root = self.work / "base"
        _run("debootstrap", "--variant=minbase", "--include=python3", "bookworm", str(root))
        for folder in DROPPED:
            shutil.rmtree(root / folder, ignore_errors=True)
        container = self.buildah("from", "scratch")
        self.buildah("copy", "--quiet", container, str(root), "/")
        self.buildah("commit", "--quiet", container, "localhost/base:trial")
        self.buildah("rm", container)
        return "localhost/base:trial"

    def image(self, base: str, tag: str) -> str:
        """The image from a tree made anew; returns its id."""
        tree.make(tree.ROOT / "build", PYTHON, os.uname().machine)
        arguments = ["--quiet", "--isolation", "chroot", "--no-cache", "--timestamp", "0"]
        arguments += ["--build-arg", f"BASE={base}", "--tag", tag]
        return self.buildah("build", *arguments, str(tree.ROOT))

    def size_mb(self, tag: str) -> float:
        entry = json.loads(self.buildah("images", "--json", tag))[0]
        return float(entry["size"].split()[0])

    def bundle(self, tag: str) -> Path:
        """The image's root and configuration, for runc."""
        container = self.buildah("from", tag)
        root = self.buildah("mount", container)
        config = json.loads(self.buildah("inspect", tag))["OCIv1"]["config"]
        bundle = self.work / "bundle"
        bundle.mkdir()
        _run("runc", "spec", "--bundle", str(bundle))
        spec = json.loads((bundle / "config.json").read_text())
        user, group = map(int, config["User"].split(":"))
        spec["root"] = {"path": root, "readonly": True}
        spec["process"] |= {"terminal": False, "user": {"uid": user, "gid": group}, "env": config["Env"]}
        spec["process"] |= {"noNewPrivileges": True, "rlimits": [], "cwd": config["WorkingDir"]}
        spec["process"]["capabilities"] = {kind: [] for kind in spec["process"]["capabilities"]}
        # The host's network: the probes below come from here.
        spec["linux"]["namespaces"] = [each for each in spec["linux"]["namespaces"] if each["type"] != "network"]
        spec["linux"].pop("resources", None)
        self._spec, self._entrypoint = spec, config["Entrypoint"]
        return bundle

    def start(self, bundle: Path, *arguments: str) -> subprocess.Popen[str]:
        self._spec["process"]["args"] = [*self._entrypoint, *arguments]
        (bundle / "config.json").write_text(json.dumps(self._spec))
        command = ["runc", "--root", str(self.work / "runc"), "run", "--bundle", str(bundle), "trial"]
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def runc(self, *arguments: str) -> str:
        return _run("runc", "--root", str(self.work / "runc"), *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:8])}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _status(port: int, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def _serve(trial: Trial, bundle: Path) -> tuple[float, float]:
    """Seconds until the startup probe says 200, and MiB resident then. The end must be clean."""
    port, admin = _free_port(), _free_port()
    began = time.monotonic()
    process = trial.start(bundle, "serve", f"--port={port}", f"--metrics-port={admin}", "--drain-timeout=1")
    try:
        return _judge(trial, process, admin, began)
    finally:
        if process.poll() is None:
            trial.runc("delete", "--force", "trial")
            process.wait()


def _judge(trial: Trial, process: subprocess.Popen[str], admin: int, began: float) -> tuple[float, float]:
    while _status(admin, "/startupz") != 200:
        if process.poll() is not None or time.monotonic() - began > 60:
            raise SystemExit(f"the image does not start: {process.communicate()[0]}")
        time.sleep(0.005)
    seconds = time.monotonic() - began
    assert _status(admin, "/livez") == 200
    assert _status(admin, "/readyz") == 503, "ready without an engine"
    pid = json.loads(trial.runc("state", "trial"))["pid"]
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split()[:2] for line in status.replace(":", " ").splitlines() if len(line.split()) > 1)
    assert (fields["Uid"], fields["CapEff"], fields["NoNewPrivs"]) == ("65532", "0" * 16, "1"), fields
    trial.runc("kill", "trial", "TERM")
    said = process.communicate(timeout=30)[0]
    assert process.returncode == 0, said
    assert "Traceback" not in said, said
    return seconds, int(fields["VmRSS"]) / 1024


def main() -> int:
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing or os.geteuid():
        print(f"image.trial: wants root and {', '.join(NEEDED)} (missing: {', '.join(missing) or 'root'})")
        return 2
    with tempfile.TemporaryDirectory() as work:
        trial = Trial(Path(work))
        base = trial.base()
        first, second = (trial.image(base, f"localhost/pd-sidecar:{number}") for number in (1, 2))
        assert first == second, f"two builds gave {first} and {second}"
        print(f"two builds, one image: {first[:19]}")
        size, of_base = trial.size_mb("localhost/pd-sidecar:1"), trial.size_mb(base)
        print(f"size: {size:.0f} MB, of which the base {of_base:.0f} MB")
        bundle = trial.bundle("localhost/pd-sidecar:1")
        wrong = trial.start(bundle, "check-config", "--no-such-flag")
        assert "no-such-flag" in wrong.communicate(timeout=30)[0]
        assert wrong.returncode == 2
        times = sorted(_serve(trial, bundle) for _ in range(STARTS))
        seconds, mib = times[len(times) // 2]
        print(f"start to /startupz: {seconds:.2f} s (median of {STARTS}), {mib:.0f} MiB resident")
        print("read-only root, uid 65532, no capability, no new privilege; exit code 0 at SIGTERM")
    return 0


if __name__ == "__main__":
    sys.exit(main())
