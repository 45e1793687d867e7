"""`pd-sidecar top` in a terminal of its own, and its last frame as SVG. Must not know what it shows."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[2]
START_S = 30.0
LINE, CHARACTER, MARGIN, BAR = 18, 8.4, 14, 26
"""Pixels: a line of text, a character of 14 pixels, around the text, and the window's own bar."""
_HOME, _REST = "\x1b[H", "\x1b[J"
_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def frame(url: str, seconds: float, columns: int = 104, lines: int = 32) -> list[str]:
    """What stands in a terminal of that size so long after the first frame, line by line. RuntimeError if nothing
    does."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    environment = {name: text for name, text in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-m", "sidecar", "top", "--url", url],
        cwd=ROOT,
        env={**environment, "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    said = bytearray()
    reading = threading.Thread(target=_read, args=(ours, said), daemon=True)
    reading.start()
    give_up = time.monotonic() + START_S
    while _REST.encode() not in said and process.poll() is None and time.monotonic() < give_up:
        time.sleep(0.05)  # before that a key would be thrown away when the terminal changes its mode
    time.sleep(seconds)
    os.write(ours, b"q")
    try:
        process.wait(START_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    reading.join(10)
    os.close(ours)
    whole = [part.partition(_REST)[0] for part in said.decode("utf-8", "replace").split(_HOME) if _REST in part]
    if not whole:
        raise RuntimeError(f"pd-sidecar top drew nothing: {bytes(said)!r}")
    return [_SEQUENCE.sub("", line).rstrip() for line in whole[-1].split("\n")]


def _read(descriptor: int, into: bytearray) -> None:
    while True:
        try:
            data = os.read(descriptor, 65536)
        except OSError:  # the other side is closed
            return
        if not data:
            return
        into += data


def picture(lines: list[str], title: str) -> str:
    """A window with these lines."""
    width = max(map(len, [*lines, title])) * CHARACTER + 2 * MARGIN
    height = BAR + len(lines) * LINE + 2 * MARGIN
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}"',
        f' width="{width:.0f}" height="{height}" font-family="monospace" font-size="14">',
        f'<rect width="{width:.0f}" height="{height}" rx="6" fill="#1e1e1e"/>',
        f'<text x="{width / 2:.0f}" y="18" fill="#999" text-anchor="middle">{escape(title)}</text>',
    ]
    for number, line in enumerate(lines):
        y = BAR + MARGIN + LINE * number + 13
        long = f'textLength="{len(line) * CHARACTER:.1f}" lengthAdjust="spacingAndGlyphs"' if line else ""
        out.append(f'<text x="{MARGIN}" y="{y}" fill="#e6e6e6" xml:space="preserve" {long}>{escape(line)}</text>')
    return "\n".join([*out, "</svg>", ""])
