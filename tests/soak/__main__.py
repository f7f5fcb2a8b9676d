"""Kills workers at random for minutes, on a database that is itself restarted, and checks what is left.

`python -m tests.soak [--minutes 10] [--database sqlite|postgres] [--seed N] [--report FILE]`. Jobs arrive all the
time; operators cancel and redrive, half of them through the REST API. Workers get SIGKILL, SIGTERM, and SIGSTOP
until another owner runs what they held. PostgreSQL is restarted, gently and at once, and its connections are cut. On SQLite a
process that is stopped inside a write transaction holds the file, and everybody waits for it: such stops are as
short as the others, and counted.

Then the workers go on in peace until nothing is left to do, and the rows are checked: see `checks.py`.
`--break NAME` takes a guarantee away in the workers' processes (`breaking.py`): such a run must end in violations,
or the checks could not be believed. A seed makes the same choices again, though not at the same moments. Exit code 1: something that must hold did not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.postgres import FOLDER_VARIABLE, PostgresUnavailable, Server
from tests.soak.breaking import BREAKS

SHOWN = ("SIGKILL", "SIGSTOP past the lease", "SIGSTOP until another owner ran the job",
         "SIGSTOP inside a write transaction of SQLite", "SIGTERM", "restarts of PostgreSQL",
         "connections cut", "jobs", "claims", "repairs", "items applied", "changes of owner between items",
         "effects outside fences", "repeats outside fences", "cancels clicked", "redrives clicked",
         "looks at all rows", "longest that a row stayed expired, seconds")  # fmt: skip


@contextmanager
def database(which: str, folder: Path) -> Iterator[Server | None]:
    """A database for this run alone, named in DATABASE_URL."""
    server: Server | None = None
    if which == "sqlite":
        os.environ["DATABASE_URL"] = f"sqlite:///{folder / 'soak.sqlite3'}"
    else:
        server = Server.create()
        os.environ["DATABASE_URL"], os.environ[FOLDER_VARIABLE] = server.url, str(server.folder)
    try:
        yield server
    finally:
        if server is not None:
            server.remove()


def main(arguments: list[str]) -> int:
    options = parsed(arguments)
    print(f"Soak: {options.database}, {options.minutes:g} min, seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="durable-jobs-soak-") as name:
        try:
            with database(options.database, Path(name)) as server:
                os.environ["DJANGO_SETTINGS_MODULE"] = "tests.soak.settings"
                os.environ["DURABLE_JOBS_TEST_SETTINGS"] = json.dumps(
                    {"DISCOVER": ["soak.kinds"], "GRACE": 1.5}
                )
                import django

                django.setup()
                from tests.soak.run import Soak

                report = Soak(
                    options.minutes * 60, options.seed, server, Path(name), broken=options.broken
                ).run()
        except PostgresUnavailable as problem:
            print(problem, file=sys.stderr)
            return 1
    report = {
        "database": report.pop("version"),
        "began_at": options.began_at,
        "minutes": options.minutes,
        "seed": options.seed,
        **({"broken": options.broken} if options.broken else {}),
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        **report,
    }
    options.report.write_text(json.dumps(report, indent=2, default=str) + "\n")
    return tell(report, options.report)


def tell(report: dict[str, Any], where: Path) -> int:
    counts = report["counts"]
    for name in SHOWN:
        if name in counts:
            print(f"  {name:<48} {counts[name]:>9,g}")
    print(
        f"  {'jobs left':<48} {', '.join(f'{number} {status}' for status, number in report['jobs'].items())}"
    )
    for violation in report["violations"][:20]:
        print(f"VIOLATION: {json.dumps(violation)[:3000]}")
    broken = len(report["violations"])
    print(f"Soak on {report['database']}: {'FAILED, ' if broken else ''}{broken} violations; report: {where}")
    return 1 if broken else 0


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="how long workers are killed (default: 10)"
    )
    parser.add_argument("--database", choices=("sqlite", "postgres"), default="sqlite")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument(
        "--report", type=Path, help="where the JSON report goes (default: soak-DATABASE.json)"
    )
    parser.add_argument("--break", dest="broken", choices=BREAKS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.report = options.report or Path(f"soak-{options.database}.json")
    options.began_at = datetime.now(UTC).isoformat(timespec="seconds")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
