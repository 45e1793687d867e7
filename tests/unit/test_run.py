"""`python -m tests.run`: nothing that did not run passes for a success, and every skip is told with its reason."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import run

CASES = {
    "passed": "",
    "failed": '<failure message="no"/>',
    "broken": '<error message="no"/>',
    "skipped": '<skipped message="needs root"/>',
    "skipped too": '<skipped message="needs root"/>',
    "skipped for nothing": "<skipped/>",
}


def report(path: Path, *names: str) -> Path:
    cases = "".join(f'<testcase name="{name}">{CASES[name]}</testcase>' for name in names)
    path.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    return path


def test_a_report_is_read(tmp_path: Path) -> None:
    outcome = run.read(report(tmp_path / "report.xml", *CASES))
    assert (outcome.passed, outcome.failed) == (1, 2)
    assert outcome.skipped == {"needs root": 2, "no reason given": 1}


@pytest.mark.parametrize(
    ("names", "code", "failed"),
    [
        (("passed",), 0, 0),
        (("passed", "skipped"), 0, 0),
        (("passed", "failed"), 1, 1),
        (("passed",), 139, 1),  # it crashed at the end
        (("skipped",), 0, 1),  # nothing ran
        ((), 0, 1),
        ((), 5, 1),
        (None, 3, 1),  # no report at all
    ],
)
def test_what_did_not_run_is_no_success(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...] | None, code: int, failed: int
) -> None:
    def pytest_ends(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        path = next(word.partition("=")[2] for word in command if word.startswith("--junitxml="))
        if names is not None:
            report(Path(path), *names)
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(subprocess, "run", pytest_ends)
    assert run.run("unit", "tests/unit").failed == failed


def test_the_last_line_is_the_sum(tmp_path: Path) -> None:
    one = run.read(report(tmp_path / "one.xml", "passed", "skipped", "skipped too"))
    other = run.read(report(tmp_path / "other.xml", "passed", "failed"))
    lines = run.summary({"unit": one, "chart": other}).splitlines()
    assert lines[-1] == "2 passed, 1 failed, 2 skipped"
    assert any(line.split() == ["2", "skipped:", "needs", "root"] for line in lines)
