"""Log lines: one each, as text or JSON, and repeated causes folded into a count."""

import json
import logging
import re
import sys
from collections.abc import Iterator

import pytest

from sidecar import log
from sidecar.log import MAX_CAUSES, REPEAT_AFTER_S, JsonFormatter, Limited, configure


def record(message: str, *args: object, **more: object) -> logging.LogRecord:
    return logging.LogRecord("sidecar", logging.WARNING, "x.py", 1, message, args, more.get("exc_info"))  # type: ignore[arg-type]


def test_json_lines() -> None:
    line = JsonFormatter().format(record('a "%s"\n%d', "b\u2028", 5))
    assert "\n" not in line
    content = json.loads(line)
    assert content["message"] == 'a "b\u2028"\n5'
    assert (content["level"], content["logger"]) == ("warning", "sidecar")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", content["time"])


def test_nobody_writes_lines_of_his_own(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    """What a peer says of itself (its attention backend, say) may stand in a line, not end it."""
    log.configure("text", "info")
    backend = "FLASH\n2026-11-30T00:00:00.000Z ERROR   all is lost\r\x1b[2J\x85\u2028é"
    logging.getLogger("sidecar").warning("%s here", backend)
    _, err = capsys.readouterr()
    assert len(err.splitlines()) == 1
    assert err.endswith(r"FLASH\x0a2026-11-30T00:00:00.000Z ERROR   all is lost\x0d\x1b[2J\x85\u2028é here" + "\n")


def test_json_lines_of_exceptions() -> None:
    try:
        raise ValueError("bad")
    except ValueError:
        line = JsonFormatter().format(record("failed", exc_info=sys.exc_info()))
    assert "\n" not in line
    assert "ValueError: bad" in json.loads(line)["exception"]


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, as it was afterwards."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    aiohttp_level = logging.getLogger("aiohttp").level
    yield root
    for handler in list(root.handlers):
        root.removeHandler(handler)
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(level)
    logging.getLogger("aiohttp").setLevel(aiohttp_level)


@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_configure(root: logging.Logger, log_format: str, level: str, capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(log_format, level)
    assert len(root.handlers) == 1
    numbers = {"debug": 10, "info": 20, "warning": 30, "error": 40}
    for name, number in numbers.items():
        logging.getLogger("sidecar").log(number, "a line of %s", name)
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == sum(number >= numbers[level] for number in numbers.values())
    if log_format == "json":
        assert json.loads(lines[-1])["message"] == "a line of error"
    else:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ERROR   a line of error", lines[-1])


# -- repeated causes ---------------------------------------------------------------------------------------------


class Clock:
    now = 5.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(log, "time", clock)
    return clock


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line.getMessage() for line in caplog.records]


def test_cause_is_said_once_and_counted(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    limited = Limited(logging.getLogger("test"))
    for _ in range(5):
        limited.warning("cause", "it failed: %s", "why")
        clock.now += 1
    assert messages(caplog) == ["it failed: why"]
    clock.now += REPEAT_AFTER_S
    limited.warning("cause", "it failed: %s", "why")
    assert messages(caplog)[1:] == ["it failed: why [4 more of these since the last line]"]
    clock.now += REPEAT_AFTER_S
    limited.warning("cause", "it failed: %s", "why")
    assert messages(caplog)[2:] == ["it failed: why"]


def test_what_may_be_meant_so_is_said_seldom(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    limited = Limited(logging.getLogger("test"))
    for _ in range(12):
        limited.warning("cause", "so it is", again_after_s=100.0)
        clock.now += REPEAT_AFTER_S
    assert messages(caplog) == ["so it is", "so it is [9 more of these since the last line]"]


def test_causes_are_told_apart(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    limited = Limited(logging.getLogger("test"))
    for _ in range(3):
        for cause in ("a", "b"):
            limited.warning(cause, cause)
    assert messages(caplog) == ["a", "b"]


def test_memory_is_bounded(clock: Clock) -> None:
    limited = Limited(logging.getLogger("test.silent"))
    for number in range(3 * MAX_CAUSES):
        limited.warning(f"cause {number}", "x")
    assert len(limited._said) <= MAX_CAUSES


@pytest.mark.parametrize(("worker", "said"), [(0, "INFO    hello"), (3, "INFO    worker 3: hello")])
def test_lines_of_workers(worker: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        configure("text", "info", worker)
        logging.getLogger("sidecar").info("hello")
        assert said in capsys.readouterr().err
        configure("json", "info", worker)
        logging.getLogger("sidecar").info("hello")
        line = json.loads(capsys.readouterr().err)
        assert line["message"] == "hello"
        assert line.get("worker", 0) == worker
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
