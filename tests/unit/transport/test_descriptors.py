"""Running out of descriptors is told from everything else, and said once in a while."""

import errno
import os
import socket
from pathlib import Path

import pytest

from tests.scarce import no_descriptors
from transport import descriptors
from transport.descriptors import REPEAT_AFTER_SECONDS, look, shortage


@pytest.fixture(autouse=True)
def unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "_said", descriptors._Said())


def of(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize("number", [errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENOENT, -3])
def test_what_is_something_else(number: int, caplog: pytest.LogCaptureFixture) -> None:
    assert shortage(of(number)) == ""
    assert shortage(ValueError()) == ""
    assert not caplog.records


def test_the_limit_is_named() -> None:
    with no_descriptors() as limit:
        with pytest.raises(OSError, match="Too many") as caught:
            socket.socket()
        assert shortage(caught.value) == f"out of file descriptors: raise the limit (now {limit})"
    assert "fs.file-max" in shortage(of(errno.ENFILE))


def test_a_name_that_cannot_be_looked_up_for_want_of_one() -> None:
    unknown = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    assert shortage(unknown) == ""
    with no_descriptors():
        assert shortage(unknown)


def test_said_once_in_a_while(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(descriptors.time, "monotonic", lambda: now)
    for _ in range(5):
        assert shortage(of(errno.EMFILE))
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    now += REPEAT_AFTER_SECONDS
    assert shortage(of(errno.EMFILE))
    assert caplog.messages[1].endswith("[4 more of these since the last line]")


def test_a_look_says_it_too(caplog: pytest.LogCaptureFixture) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    look()
    assert not caplog.records
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    with no_descriptors() as limit:
        look()
    assert caplog.messages == [f"out of file descriptors: raise the limit (now {limit})"]
