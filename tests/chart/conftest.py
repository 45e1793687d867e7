"""Tells at the end what was validated with which tool."""

import pytest

from tests.chart.render import validated


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if validated:
        terminalreporter.section("validated")
        for what, times in validated.items():
            terminalreporter.write_line(f"{times:>5}  {what}")
