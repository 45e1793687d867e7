"""The switch of disaggregation: `off`, `on` or `auto`, turned while requests run. The last word counts."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from sidecar.config import BadSettings
from sidecar.decision.guards import Mode
from sidecar.edge.service import Live
from sidecar.settings import Settings

_log = logging.getLogger("sidecar")

LOOK_EVERY_S = 1.0


class Switch:
    """Requests that are decided on later go the new way; those in flight finish as they began."""

    def __init__(self, live: Live) -> None:
        self._live = live

    @property
    def mode(self) -> Mode:
        return self._live.mode

    def turn(self, text: str, by: str) -> None:
        """Raises `ValueError` for anything but off, on and auto."""
        try:
            mode = Mode(text)
        except ValueError:
            raise ValueError(f"--disagg is off, on or auto, not {text[:20]!r}") from None
        if mode is not self._live.mode:
            _log.info("disagg: %s -> %s (%s)", self._live.mode.value, mode.value, by)
            self._live.mode = mode


class File:
    """The `--config` file: read again when it changes or on SIGHUP. Of what it holds only `disagg` is taken over
    while running; a file with a mistake changes nothing."""

    def __init__(self, path: Path, read: Callable[[], Settings], settings: Settings, switch: Switch) -> None:
        self._path = path
        self._read = read
        self._settings = settings
        self._switch = switch
        self._seen = self._content()

    def _content(self) -> bytes | None:
        try:
            return self._path.read_bytes()
        except OSError:
            return None

    async def watch(self) -> None:
        """Looks every second. ConfigMaps are swapped by a symbolic link, so the content is what counts."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            content = await loop.run_in_executor(None, self._content)
            if content is not None and content != self._seen:
                self.reload("file changed")

    def reload(self, by: str) -> None:
        self._seen = self._content()
        try:
            settings = self._read()
        except BadSettings as error:
            for mistake in error.mistakes:
                _log.error("%s: not taken over: %s", by, mistake)
            return
        self._switch.turn(settings.disagg, by)
        changed = [
            field
            for field in Settings.__struct_fields__
            if field != "disagg" and getattr(settings, field) != getattr(self._settings, field)
        ]
        if changed:
            names = ", ".join("--" + name.replace("_", "-") for name in changed)
            _log.warning("%s: not taken over while running, restart for it: %s", by, names)
