"""Runs every test on both databases, in four runs side by side: most of a test of processes is waiting.

`python -m tests.side_by_side [pytest arguments]`. Each database has two runs: tests that start processes, and the
rest; on PostgreSQL each with a server of its own. Tests of which no database can change anything (`any_database`:
documents, imports, values, settings) run beside SQLite only. What a run said is printed when it has ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = [
    "tests/operate",
    "tests/programs",
    "tests/test_commands.py",
    "tests/test_demo_commands.py",
    "tests/test_harness.py",
    "tests/test_kill_import.py",
    "tests/test_migrations.py",
    "tests/test_monitoring.py",
    "tests/test_pause.py",
    "tests/test_prune.py",
    "tests/test_worker.py",
]
ON_POSTGRESQL = ["-m", "not any_database"]
NO_TESTS = 5


@dataclass
class Run:
    """One pytest under way, and what it says."""

    name: str
    process: subprocess.Popen[bytes]
    output: IO[bytes]

    def say(self) -> None:
        self.output.seek(0)
        print(f"\n==> {self.name}", flush=True)
        sys.stdout.buffer.write(self.output.read())
        sys.stdout.flush()


def main(arguments: list[str]) -> int:
    # A shell that put this into the background made it, and so its children, deaf to Ctrl-C; tests send that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    runs = [start(name, command, environment) for name, command, environment in planned(arguments)]
    codes: dict[str, list[int]] = {"SQLite": [], "PostgreSQL": []}
    try:
        while runs:
            for run in [run for run in runs if run.process.poll() is not None]:
                runs.remove(run)
                run.say()
                codes[run.name.partition(",")[0]].append(run.process.returncode)
            time.sleep(0.2)
    finally:
        for run in runs:
            run.process.terminate()
            run.process.wait()
    passed = True
    print()
    for database, ended in codes.items():
        fine = all(code in (0, NO_TESTS) for code in ended)
        # What was asked for may have nothing to do with a database; on SQLite it runs all the same.
        fine = fine and (database != "SQLite" or any(code == 0 for code in ended))
        passed = passed and fine
        print(f"{database}: {'passed' if fine else 'FAILED'}")
    return 0 if passed else 1


def planned(arguments: list[str]) -> list[tuple[str, list[str], dict[str, str]]]:
    """Name, command and environment of each run."""
    pytest = [sys.executable, "-m", "pytest"]
    rest = [f"--ignore={path}" for path in PROCESSES]
    here = {name: value for name, value in os.environ.items() if name != "DATABASE_URL"}
    runs = [
        ("SQLite, processes", [*pytest, *arguments, *PROCESSES], here),
        ("SQLite, the rest", [*pytest, *arguments, *rest], here),
    ]
    # A `-m` among the arguments takes the place of this one.
    pytest += [*ON_POSTGRESQL, *arguments]
    url = os.environ.get("DATABASE_URL", "")
    if url.startswith(("postgres", "pgsql", "psql")):
        # One server, one test database: one run.
        return [*runs, ("PostgreSQL", pytest, {**here, "DATABASE_URL": url})]
    server = [sys.executable, "-m", "tests.postgres", "run", "--"]
    return [
        *runs,
        ("PostgreSQL, processes", [*server, *pytest, *PROCESSES], here),
        ("PostgreSQL, the rest", [*server, *pytest, *rest], here),
    ]


def start(name: str, command: list[str], environment: dict[str, str]) -> Run:
    output = tempfile.TemporaryFile()  # noqa: SIM115, it lives as long as its run
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
    )
    return Run(name, process, output)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
