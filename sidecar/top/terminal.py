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

from sidecar.asking import NoAnswer, NoKey, Page, get, shown
from sidecar.top.frame import frame
from sidecar.top.sample import PREFIX, Change, Sample

LOOK_EVERY_S = 1.0
LOOK_BACK_S = 10.0
"""Rates and quantiles are those of so long: of one second alone they would jump."""
TIMEOUT_S = 2.0

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"

_WANTED = "the admin port of a sidecar is wanted (--metrics-port, 9090 as a rule; no path)"
_ANSWERS = frozenset({200, 503})  # 503: not ready, and why


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
    try:
        headers = shown(token_file)
    except NoKey as error:
        raise Unreachable(str(error)) from None
    metrics = _get(f"{url}/metrics", headers)
    if PREFIX.encode() not in metrics.body:
        raise Unreachable(f"{url}/metrics: found {metrics.media_type} without {PREFIX}; {_WANTED}")
    mode = _text(_get(f"{url}/disagg", headers))
    ready = _get(f"{url}/readyz", headers)
    try:
        return Sample.read(
            time.time(), _text(metrics), mode.strip(), "" if ready.status == 200 else _text(ready).strip()
        )
    except ValueError:
        what = f"found {metrics.media_type}, and no exposition of metrics"
        raise Unreachable(f"{url}/metrics: {what}; {_WANTED}") from None


def _text(page: Page) -> str:
    return page.body.decode("utf-8", "replace")


def _get(url: str, headers: dict[str, str]) -> Page:
    try:
        return get(url, headers=headers, timeout_s=TIMEOUT_S, statuses=_ANSWERS)
    except NoAnswer as error:
        wanted = "its key is wanted (--token-file)" if error.status == 403 else _WANTED
        raise Unreachable(f"{url}: {error}; {wanted}") from None


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
