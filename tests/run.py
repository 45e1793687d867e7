"""Runs the tests, kind by kind, and says how many of each kind there were: `python -m tests.run fast|chart|all`.

Each kind gets a pytest process of its own: a crash in one cannot take the results of the others along. The last
line is the sum over all of them. The exit code is 0 only if every kind ran, held tests, and none of them failed.
"""

import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

FAST = {"unit": "tests/unit", "kubernetes": "tests/kube", "integration": "tests/integration"}
CHART = {"chart": "tests/chart"}
KINDS = {"fast": FAST, "chart": CHART, "all": {**FAST, **CHART, "end-to-end": "e2e"}}
ROOT = Path(__file__).parent.parent


@dataclass
class Outcome:
    """What became of the tests of one kind."""

    passed: int = 0
    failed: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """How many tests were skipped, by reason."""

    @property
    def ran(self) -> int:
        return self.passed + self.failed


def run(kind: str, folder: str) -> Outcome:
    print(f"\n===== {kind} tests =====", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        code = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", folder], cwd=ROOT, check=False
        ).returncode
        outcome = read(report) if report.exists() else Outcome()
    # A crash, or nothing collected: no test stands for it in the report, and it must not pass for success.
    if not outcome.failed and (code or not outcome.ran):
        print(f"{kind}: pytest ended with {code} after {outcome.ran} tests")
        outcome.failed = 1
    return outcome


def read(report: Path) -> Outcome:
    """The outcome that a junit report tells of."""
    outcome = Outcome()
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            outcome.failed += 1
        elif skipped is not None:
            outcome.skipped[skipped.get("message") or "no reason given"] += 1
        else:
            outcome.passed += 1
    return outcome


def summary(outcomes: dict[str, Outcome]) -> str:
    lines = ["", "===== summary ====="]
    for kind, one in outcomes.items():
        lines.append(
            f"{kind:<12} {one.ran:>5} ran: {one.passed} passed, {one.failed} failed; {one.skipped.total()} skipped"
        )
        lines += [f"{'':<12} {count:>5} skipped: {reason}" for reason, count in one.skipped.most_common()]
    skipped = sum(one.skipped.total() for one in outcomes.values())
    last = (
        f"{sum(one.passed for one in outcomes.values())} passed, "
        f"{sum(one.failed for one in outcomes.values())} failed"
    )
    return "\n".join([*lines, last + (f", {skipped} skipped" if skipped else "")])


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1] not in KINDS:
        print(f"usage: python -m tests.run {'|'.join(KINDS)}", file=sys.stderr)
        return 2
    outcomes = {kind: run(kind, folder) for kind, folder in KINDS[sys.argv[1]].items()}
    print(summary(outcomes), flush=True)
    return int(any(one.failed for one in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
