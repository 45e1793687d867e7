"""A wall clock that can step, for one process: clock.c, compiled and preloaded. It must not know scenarios."""

from __future__ import annotations

import shutil
import struct
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

SOURCE = Path(__file__).with_name("clock.c")


def compiler() -> str | None:
    """The C compiler's path."""
    return shutil.which("cc") or shutil.which("gcc")


class Clock:
    """`environment` is for the process whose clock it is."""

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="pd-clock-")
        library, self._file = Path(self._folder.name) / "clock.so", Path(self._folder.name) / "offset"
        self.step(0)
        command = [compiler() or "cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE)]
        subprocess.run(command, check=True)
        self.environment = {"LD_PRELOAD": str(library), "PD_E2E_CLOCK": str(self._file)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._folder.cleanup()

    def step(self, seconds: int) -> None:
        """The clock reads so much more than it should, from now on. In place: the process has the file mapped."""
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("=q", seconds))
