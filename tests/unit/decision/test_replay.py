"""Recorded decisions through other rules: choices, prices, and what cannot be judged."""

import json
from pathlib import Path
from typing import Any

import pytest

from sidecar.cli import main
from sidecar.decision.replay import RULES, BadRule, judge, make_rule, priced
from tests.ports import free_ports
from tests.saying import saying


def record(
    tokens: int = 1000,
    cached: int = 0,
    *,
    decided: str = "remote",
    ahead: int = 0,
    used: float = 1.0,
    **predicted: float,
) -> Any:
    prices = {"local_seconds": 1.0, "remote_seconds": 2.0, "stall_seconds": 4.0, "static": "", **predicted}
    inputs = {"tokens": tokens, "cached": cached, "streams": 4.0, "prefill_ahead": ahead, "long_gaps_used": used}
    return {"decided": decided, "inputs": inputs, "predicted": prices}


@pytest.mark.parametrize(
    ("rule", "made_of", "remote"),
    [
        ("local", record(), False),
        ("remote", record(), True),
        ("recorded", record(decided="local"), False),
        ("recorded", record(), True),
        ("static", record(255), False),
        ("static", record(256), True),
        ("static", record(1000, 745), False),
        ("static:1000", record(1000), True),
        ("llm-d", record(127), False),
        ("llm-d:0", record(1), True),
        ("dynamo", record(2000), True),  # all of it is new
        ("dynamo", record(4000, 2000), False),  # half of it is, and less than 2048
        ("dynamo", record(9000, 5000), True),
        ("dynamo", record(9000, ahead=1_000_000), False),
        ("cost", record(), True),
        ("cost:0.2", record(), False),
        ("cost:0", record(remote_seconds=0.5), True),
        ("cost:0.5", record(), True),
        ("cost:0.5", record(used=0.1), False),
    ],
)
def test_choices(rule: str, made_of: Any, remote: bool) -> None:
    assert make_rule(rule)(made_of) is remote


@pytest.mark.parametrize("rule", ["", "nonsense", "cost:", "static:many", "local:1"])
def test_no_rule(rule: str) -> None:
    with pytest.raises(BadRule):
        make_rule(rule)


def test_prices() -> None:
    records = [record(), record(decided="local", local_seconds=0.5, stall_seconds=0.0)]
    local, remote, recorded = (judge(rule, records) for rule in ("local", "remote", "recorded"))
    assert (local.remote, local.changed, local.wait_seconds, local.stall_seconds) == (0, 1, 0.75, 4.0)
    assert (remote.remote, remote.changed, remote.wait_seconds, remote.stall_seconds) == (2, 1, 2.0, 0.0)
    assert (recorded.changed, recorded.worst_wait_seconds) == (0, 2.0)


def test_only_what_was_priced_is_judged() -> None:
    records = [record(), record(remote_seconds=0.0), {"decided": "local"}, {"decided": "local", "inputs": {}}]
    assert len(priced(records)) == 1


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "decisions"
    for text in (json.dumps([record()] * 3), "\n".join([json.dumps(record())] * 3)):
        log.write_text(text)
        assert main(["replay", str(log)]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith("3 decisions of the cost rule\n")
        assert all(rule in shown for rule in RULES)
    assert main(["replay", str(log), "--rule", "cost:0.5", "--rule", "local"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5


PRICED = json.dumps(record())
BARE = json.dumps({"decided": "remote", "inputs": {"tokens": 1}, "predicted": {"remote_seconds": 1.0}})
MISTAKES = {
    "no file": (None, "local", "No such file or directory; what /decisions gave is wanted"),
    "half an array": ("[" + PRICED, "local", "line 1 is no JSON (Input data was truncated); "),
    "a page": ("<html>\n</html>", "local", "line 1 is no JSON (JSON is malformed: invalid character (byte 0)); "),
    "half a line": (f"{PRICED}\n\n{PRICED[:20]}", "local", "line 3 is no JSON (Input data was truncated); "),
    "too deep": ("[" * 100_000, "local", "line 1 is no JSON (it is nested too deeply); "),
    "numbers": ("[1]", "local", "record 1 is a number, not an object; what /decisions gave is wanted"),
    "text": (f'{PRICED}\n"prompt"', "local", "record 2 is text, not an object; "),
    "no forecast": (
        '[{"inputs": {}, "predicted": 7}]',
        "local",
        "record 1: Expected `object`, got `int` - at `$.pre",
    ),
    "no inputs": (
        f"{PRICED}\n{BARE}",
        "local",
        "record 2: Object missing required field `cached` - at `$.inputs`; ",
    ),
    "no rule": ("[]", "nonsense", "'nonsense' is no rule; there are recorded, local, remote, static"),
    "no number": ("[]", "cost:high", "'cost:high': 'high' is no number"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    content, rule, said = MISTAKES[name]
    log = tmp_path / "decisions"
    if content is not None:
        log.write_text(content)
    assert main(["replay", str(log), "--rule", rule]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith(f"pd-sidecar: replay: {log}: {said}")
    assert "prompt" not in line


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", "404 Not Found; /decisions of the admin port"),
        (b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n", "403 Forbidden; its key is wanted (--token-file)"),
        (b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f", "no HTTP; /decisions of the admin port (--metrics-port) is"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello", "line 1 is no JSON ("),
        (None, "Connection refused; /decisions of the admin port"),
    ],
)
def test_urls_that_are_none_of_decisions(
    answer: bytes | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with saying(answer) as url:
        assert main(["replay", f"{url}/decisions"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"pd-sidecar: replay: {url}/decisions: {said}")


def test_a_url_without_a_port(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "http://127.0.0.1:admin/decisions"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "nonnumeric port: 'admin'; /decisions of the admin port" in line


def test_nothing_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "decisions"
    log.write_text("[]")
    assert main(["replay", str(log)]) == 0
    assert capsys.readouterr().out.startswith("0 decisions")


ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]"


def test_an_admin_port_is_not_behind_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_ports()}")
    with saying(ANSWER) as url:
        assert main(["replay", f"{url}/decisions"]) == 0


def test_the_key_is_shown_where_it_is_wanted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    heard: list[bytes] = []
    with saying(ANSWER, heard) as url:
        assert main(["replay", "--token-file", str(key), f"{url}/decisions"]) == 0
        assert main(["replay", f"{url}/decisions"]) == 0
    assert [b"Authorization: Bearer secret\r\n" in one for one in heard] == [True, False]
    assert capsys.readouterr().out.startswith("0 decisions")


def test_the_key_goes_nowhere_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An admin port sends nobody elsewhere: whoever does is something else."""
    key = tmp_path / "key"
    key.write_text("secret")
    heard: list[bytes] = []
    with saying(ANSWER, heard) as other:
        elsewhere = f"HTTP/1.1 302 Found\r\nlocation: {other}/decisions\r\ncontent-length: 0\r\n\r\n".encode()
        with saying(elsewhere) as url:
            assert main(["replay", "--token-file", str(key), f"{url}/decisions"]) == 2
    assert not heard
    assert "302 Found" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (None, "No such file or directory"),
        (b"\xff", "no ASCII"),
        (b"\n", "it holds no key"),
        (b"sec\r\nret", "it holds more than a key"),
    ],
)
@pytest.mark.parametrize("command", [["replay"], ["top", "--once", "--url"]])
def test_no_key(
    command: list[str], content: bytes | None, found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    with saying(ANSWER) as url:
        assert main([*command, f"{url}/decisions", "--token-file", str(path)]) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--token-file {path}: {found}; the sidecar's --admin-token-file is wanted" in line
    assert "sec" not in line.replace(str(path), "")
