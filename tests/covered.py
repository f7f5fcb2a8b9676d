"""Runs every test on both databases and tells which lines and branches of the package none of them has reached.

`python -m tests.covered [pytest arguments]`. Processes that a test starts count as well; of one that is killed the
measurement is lost with it. What was measured stays in `.coverage`: `coverage html` shows it line by line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RULES = f"--rcfile={ROOT / 'tests' / 'coverage.ini'}"
GOAL = 95.0
CORE = (
    "batch", "bounded", "candidates", "conf", "connection", "consumer", "database", "exceptions", "jsontext", "keeper",
    "keyset", "kinds", "lifecycle", "logs", "manager", "models", "outage", "pruning", "receipts", "reconciler",
    "runner", "selection", "service", "signals", "store", "supervisor", "transports/__init__", "transports/base",
    "transports/database", "transports/memory", "upkeep", "worker",
)  # fmt: skip
"""What jobs rest on. The screens, the API, the commands and what needs a broker are told, and not counted here."""


def main(arguments: list[str]) -> int:
    for old in ROOT.glob(".coverage*"):
        old.unlink()
    tests = coverage("run", "-m", "tests.side_by_side", *arguments)
    coverage("combine", "--quiet")
    coverage("report")
    reached = branches_of_the_core()
    print(f"Branches of the core: {reached:.1f} % reached, {GOAL:g} % wanted")
    return tests or int(reached < GOAL)


def coverage(act: str, *arguments: str) -> int:
    environment = {**os.environ, "COVERAGE_FILE": str(ROOT / ".coverage")}
    command = [sys.executable, "-m", "coverage", act, RULES, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def branches_of_the_core() -> float:
    """Percent of the branches of all core modules together."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "coverage.json"
        coverage("json", "--quiet", "-o", str(path))
        files: dict[str, Any] = json.loads(path.read_text())["files"]
    found = [files[f"durable_jobs/{name}.py"]["summary"] for name in CORE]
    return 100 * sum(one["covered_branches"] for one in found) / sum(one["num_branches"] for one in found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
