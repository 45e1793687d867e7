"""Asks the admin port and draws: the terminal's side of `pd-sidecar top`."""

import contextlib
import os
import select
import shutil
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from sidecar.top.frame import frame
from sidecar.top.sample import Change, Sample

LOOK_EVERY_S = 1.0
LOOK_BACK_S = 10.0
"""Rates and quantiles are those of so long: of one second alone they would jump."""
TIMEOUT_S = 2.0

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"

_open = build_opener(ProxyHandler({})).open  # an admin port is not behind a proxy


class Unreachable(Exception):
    """The admin port does not answer as it should; the message says how."""


def main(url: str, *, once: bool, token_file: str = "") -> int:
    """Returns the exit code: 1 if the admin port does not answer, 2 without a terminal."""
    url = url.rstrip("/")
    if not url.startswith(("http://", "https://")):
        url = f"http://{url}"
    if once:
        try:
            sample = look(url, token_file)
        except Unreachable as error:
            print(f"pd-sidecar: {error}", file=sys.stderr)  # noqa: T201
            return 1
        sys.stdout.write("\n".join(frame(url, Change(sample.zero, sample))) + "\n")
        return 0
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        print("pd-sidecar: top needs a terminal; --once prints one frame", file=sys.stderr)  # noqa: T201
        return 2
    with _raw(), contextlib.suppress(KeyboardInterrupt):
        _loop(url, token_file)
    return 0


def look(url: str, token_file: str) -> Sample:
    """One reading. Raises `Unreachable`."""
    headers = {}
    if token_file:
        try:
            headers["authorization"] = f"Bearer {Path(token_file).read_text(encoding='ascii').strip()}"
        except (OSError, UnicodeDecodeError) as error:
            raise Unreachable(f"{token_file}: {getattr(error, 'strerror', None) or 'no key'}") from None
    metrics = _get(f"{url}/metrics", headers)[1]
    mode = _get(f"{url}/disagg", headers)[1].strip()
    status, ready = _get(f"{url}/readyz", headers)
    try:
        return Sample.read(time.time(), metrics, mode, "" if status == 200 else ready.strip())
    except ValueError:
        raise Unreachable(f"{url}/metrics: that is no exposition of metrics") from None


def _get(url: str, headers: dict[str, str]) -> tuple[int, str]:
    try:
        with _open(Request(url, headers=headers), timeout=TIMEOUT_S) as response:  # noqa: S310 http only, see `main`
            return response.status, response.read().decode("utf-8", "replace")
    except HTTPError as error:
        if error.code == 503:  # not ready, and why
            return error.code, error.read().decode("utf-8", "replace")
        what = (
            "its key is wanted (--token-file)" if error.code == 403 else "is this the admin port (--metrics-port)?"
        )
        raise Unreachable(f"{url}: {error.code}: {what}") from None
    except (URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise Unreachable(f"{url}: {getattr(reason, 'strerror', None) or reason}") from None


@contextlib.contextmanager
def _raw() -> Iterator[None]:
    """Keys as they are pressed, on a screen of its own; all as it was afterwards."""
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        sys.stdout.write(_ENTER)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()


def _loop(url: str, token_file: str) -> None:
    samples: deque[Sample] = deque()
    while True:
        began = time.monotonic()
        try:
            samples.append(look(url, token_file))
        except Unreachable as error:
            samples.clear()
            _draw([str(error), "", "asked again every second; q ends"])
        else:
            while samples[-1].at - samples[0].at > LOOK_BACK_S:
                samples.popleft()
            last = samples[-1]
            first = samples[0] if len(samples) > 1 else last.zero
            _draw([*frame(url, Change(first, last)), "", "q ends"])
        if _quits(LOOK_EVERY_S - (time.monotonic() - began)):
            return


def _quits(wait_s: float) -> bool:
    """Whether q is pressed within that time."""
    deadline = time.monotonic() + wait_s
    while True:
        ready, _, _ = select.select([sys.stdin], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return False
        keys = os.read(sys.stdin.fileno(), 64)
        if not keys or keys.lower().find(b"q") >= 0:
            return True


def _draw(lines: Sequence[str]) -> None:
    size = shutil.get_terminal_size()
    shown = [line[: size.columns] + _CLEAR_LINE for line in lines[: size.lines]]
    sys.stdout.write(_HOME + "\n".join(shown) + _CLEAR_REST)
    sys.stdout.flush()
