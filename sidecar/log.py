"""Log lines: text or JSON on standard error, one per change of state, repeated causes folded into a count."""

import json
import logging
import math
import sys
import time
from collections.abc import Mapping
from types import MappingProxyType

from aiohttp.http_exceptions import HttpProcessingError

REPEAT_AFTER_S = 10.0
MAX_CAUSES = 1024


_ESCAPED = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)
}


class TextFormatter(logging.Formatter):
    """A line for each message, whatever a peer has put into it. (An exception is ours, and has several.)"""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 logging's
        record.message = record.message.translate(_ESCAPED)
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """One JSON object per line. `own`: members of this process's lines besides."""

    def __init__(self, own: Mapping[str, int] = MappingProxyType({})) -> None:
        super().__init__()
        self._own = own

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._own,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure(log_format: str, level: str, worker: int = 0) -> None:
    """Sets up the process's log. `worker`: its number, where there are several (`--workers`)."""
    who = f"worker {worker}: " if worker else ""
    formatter = (
        JsonFormatter({"worker": worker} if worker else {})
        if log_format == "json"
        else TextFormatter(f"%(asctime)s.%(msecs)03dZ %(levelname)-7s {who}%(message)s", "%Y-%m-%dT%H:%M:%S")
    )
    formatter.converter = time.gmtime
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.getLogger("aiohttp").setLevel(logging.WARNING)
    logging.getLogger("aiohttp.server").addFilter(_bad_request_in_one_line)


def _bad_request_in_one_line(record: logging.LogRecord) -> bool:
    """What is no HTTP on the admin port is the sender's mistake; aiohttp reports it as an error of the server's."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.levelno, record.levelname = logging.INFO, "INFO"
        record.msg, record.args, record.exc_info = "admin port: not HTTP: %s", (type(error).__name__,), None
        return logging.getLogger("aiohttp.server").isEnabledFor(logging.INFO)
    return True


class Limited:
    """Says a cause once, and while it goes on once in ten seconds, with how often it was left unsaid."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._said: dict[str, tuple[float, int]] = {}

    def warning(self, cause: str, message: str, *args: object, again_after_s: float = REPEAT_AFTER_S) -> None:
        now = time.monotonic()
        last, unsaid = self._said.get(cause, (-math.inf, 0))
        if now - last < again_after_s:
            self._said[cause] = (last, unsaid + 1)
            return
        if len(self._said) >= MAX_CAUSES:
            self._said.clear()
        self._said[cause] = (now, 0)
        if unsaid:
            message += f" [{unsaid} more of these since the last line]"
        self._log.warning(message, *args)
