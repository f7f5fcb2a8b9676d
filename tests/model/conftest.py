"""How many acts there were, and what became of them."""

from __future__ import annotations

from typing import Any

figures: list[str] = []


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if figures:
        terminalreporter.section("acts against the state chart")
        for line in figures:
            terminalreporter.write_line(f"  {line}")
