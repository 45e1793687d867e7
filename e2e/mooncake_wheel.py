"""Mooncake's transfer engine for real engines without a GPU, installed beside their environment and cached.

The wheel without CUDA wants libibverbs from the system, which a machine without RDMA seldom has; NIXL's wheel
brings a copy of it under another name. Like e2e/install.py it knows nothing about engines. (This file is not named
after the package: its folder is on the engines' path.)
"""

from __future__ import annotations

import re
from pathlib import Path

from e2e.install import InstallError, cache_root, engine_python, exclusive, run_step, step

WHEEL = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
HASH = "sha256:ca9f668a04ffe648b250fda28b97d0a7da149cb110dec5cf3d166a9e68afc940"
"""Of the build for Python 3.11 on x86-64."""
NEEDED = ("libibverbs", "libnuma")


def mooncake_dirs() -> tuple[Path, Path, Path]:
    """Folders of its package and of the libraries that it needs, installed first if need be; or InstallError."""
    python = engine_python()
    target = cache_root() / re.sub(r"\W+", "-", WHEEL)
    bundled = next(python.parent.parent.glob("lib/python*/site-packages/nixl_cu12.libs"), None)
    if bundled is None:
        raise InstallError(f"mooncake: {python} has no nixl-cu12, whose libibverbs it needs")
    with exclusive(target.with_suffix(".lock"), "Mooncake's folder"):
        if not (target / ".complete").exists():
            requirements = target / "requirements.txt"
            target.mkdir(parents=True, exist_ok=True)
            requirements.write_text(f"{WHEEL} --hash={HASH}\n")
            pip = [str(python), "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
            pip += ["--no-deps", "--require-hashes", "--upgrade", "--target", str(target / "packages")]
            with step(WHEEL):
                run_step([*pip, "--requirement", str(requirements)], target)
            (target / ".complete").touch()
        libraries = target / "libraries"
        libraries.mkdir(exist_ok=True)
        for name in NEEDED:
            link = libraries / f"{name}.so.1"
            link.unlink(missing_ok=True)
            link.symlink_to(next(bundled.glob(f"{name}-*.so.1*")))
    return target / "packages", libraries, bundled
