"""How many schedules were played, and which statements waited."""

from __future__ import annotations

from typing import Any

from tests.explorer.explore import tallies


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if tallies:
        terminalreporter.section("schedules")
        for tally in tallies:
            for line in tally.lines():
                terminalreporter.write_line(line)
