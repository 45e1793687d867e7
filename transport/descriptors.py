"""When this process, or its machine, may open nothing more. Whoever was to be reached is not to blame and is not
known here; what to change is said once in a while for the whole process, however many connections fail by it.
"""

import errno
import logging
import math
import os
import resource
import socket
import time
from typing import Final

logger = logging.getLogger(__name__)

REPEAT_AFTER_SECONDS: Final = 10.0


class OutOfDescriptors(Exception):
    """Somebody could not be asked, by no fault of theirs. The text says what to change."""


class _Said:
    """When it was last said, and how often it was left unsaid since."""

    def __init__(self) -> None:
        self.at = -math.inf
        self.unsaid = 0


_said: Final = _Said()


def shortage(error: BaseException) -> str:
    """What ran out and what to change, said in the log too; "" if `error` is of another kind.

    A resolver that may not open its files or sockets says that the name is not known for now (getaddrinfo(3): the
    errno of its services is not handed on), so after such an error one descriptor is tried for.
    """
    code = getattr(error, "errno", None)
    cause = getattr(error, "os_error", error)  # aiohttp's
    if isinstance(cause, socket.gaierror):
        code = _tried()
    text = _text(code)
    if text:
        _say(text)
    return text


def look() -> None:
    """Says so if there is none left: of connections that could not be accepted nobody else hears (libuv closes them
    with a descriptor that it keeps for that)."""
    text = _text(_tried())
    if text:
        _say(text)


def _tried() -> int:
    try:
        os.close(os.open("/", os.O_RDONLY))
    except OSError as error:
        return error.errno or 0
    return 0


def _text(code: int | None) -> str:
    if code == errno.EMFILE:
        return f"out of file descriptors: raise the limit (now {resource.getrlimit(resource.RLIMIT_NOFILE)[0]})"
    if code == errno.ENFILE:
        return "the machine is out of file descriptors: raise its fs.file-max"
    return ""


def _say(text: str) -> None:
    now = time.monotonic()
    if now - _said.at < REPEAT_AFTER_SECONDS:
        _said.unsaid += 1
        return
    more = f" [{_said.unsaid} more of these since the last line]" if _said.unsaid else ""
    _said.at, _said.unsaid = now, 0
    logger.error("%s%s", text, more)
