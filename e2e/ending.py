"""How a run that starts processes hears of its own end: as an exception, so that what it started is ended too."""

from __future__ import annotations

import signal
import sys


def end_what_was_started() -> None:
    """Ended by a signal, too, a run ends what it started; a shell's `&` would have it ignore a Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, signal.default_int_handler)
