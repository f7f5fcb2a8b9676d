"""What the benchmarks share: a database, contestants in processes of their own, interleaved rounds, a record.

A contestant is a function of a benchmark's module that measures once and answers a number. Each measurement is
a fresh process (`python -m benchmarks.harness MODULE NAME ARGUMENTS`), so that no contestant warms up another's
interpreter, and contestants take turns, so that a slow minute of the machine meets all of them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import django

RESULTS = Path(__file__).resolve().parent / "results"
TIMEOUT = 900


@dataclass
class Contestant:
    """One of those that take turns: `function` of the module, its arguments, settings of its own."""

    name: str
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    floor: str | None = None
    """The contestant that this one is compared with."""


def setup() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "benchmarks.settings")
    django.setup()


@contextmanager
def databases() -> Any:
    """The tests' database, made and removed."""
    from django.test.utils import setup_databases, teardown_databases

    old = setup_databases(verbosity=0, interactive=False)
    try:
        yield
    finally:
        teardown_databases(old, verbosity=0)


def once(module: str, contestant: Contestant) -> Any:
    """One measurement in a process of its own."""
    from tests.processes import process_environment

    environment = {
        **process_environment(),
        "DJANGO_SETTINGS_MODULE": "benchmarks.settings",
        "BENCH_DURABLE_JOBS": json.dumps(dict(contestant.settings)),
    }
    command = [sys.executable, "-m", "benchmarks.harness", module, contestant.function]
    done = subprocess.run(
        [*command, json.dumps(dict(contestant.arguments))],
        env=environment, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{contestant.name} ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(
    title: str, module: str, contestants: Sequence[Contestant], *, rounds: int, prepare: Callable[[], None]
) -> dict[str, Any]:
    """Measure all, in turns; print medians and ratios; answer them with every single number."""
    runs: dict[str, list[Any]] = {one.name: [] for one in contestants}
    for number in range(rounds):
        for one in contestants if number % 2 == 0 else reversed(contestants):
            prepare()
            runs[one.name].append(once(module, one))
    medians = {name: statistics.median(_number(run) for run in each) for name, each in runs.items()}
    lines = {}
    print(f"\n{title} ({rounds} rounds, medians)")
    for one in contestants:
        ratio = medians[one.name] / medians[one.floor] if one.floor else None
        spread = f"{min(map(_number, runs[one.name])):,.4g} to {max(map(_number, runs[one.name])):,.4g}"
        compared = f"{ratio:6.2f} × {one.floor}" if ratio is not None else ""
        print(f"  {one.name:44} {medians[one.name]:10,.5g}  ({spread})  {compared}", flush=True)
        lines[one.name] = {
            "median": medians[one.name], "runs": runs[one.name], "floor": one.floor, "ratio": ratio,
        }  # fmt: skip
    return {"title": title, "rounds": rounds, "contestants": lines}


def _number(run: Any) -> float:
    return float(run["value"] if isinstance(run, dict) else run)


def keep(name: str, results: Sequence[Mapping[str, Any]]) -> None:
    """Write the numbers and the machine that they were measured on to `benchmarks/results/`."""
    from django.db import connection

    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{connection.vendor}.json"
    path.write_text(json.dumps({"machine": machine(), "results": list(results)}, indent=1) + "\n")
    print(f"\nkept in {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    from django.db import connection

    told: dict[str, Any] = {
        "measured": time.strftime("%Y-%m-%d"),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "django": django.get_version(),
        "database": f"SQLite {sqlite3.sqlite_version}",
    }
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            import psycopg

            cursor.execute("SHOW server_version")
            told["database"] = f"PostgreSQL {cursor.fetchone()[0]}"
            told["psycopg"] = f"{psycopg.__version__} ({psycopg.pq.__impl__})"
            for name in ("fsync", "synchronous_commit", "full_page_writes", "shared_buffers"):
                cursor.execute(f"SHOW {name}")
                told[name] = cursor.fetchone()[0]
        else:
            for name in ("journal_mode", "synchronous"):
                cursor.execute(f"PRAGMA {name}")
                told[name] = cursor.fetchone()[0]
    return told


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--only", default="", help="contestants whose names contain one of these texts: a,b")
    return made


def chosen(contestants: Sequence[Contestant], only: str) -> list[Contestant]:
    """Those that `--only` names, with the floors that they are compared with."""
    words = [word for word in only.split(",") if word]
    if not words:
        return list(contestants)
    named = {one.name for one in contestants if any(word in one.name for word in words)}
    named |= {one.floor for one in contestants if one.name in named and one.floor}
    return [one for one in contestants if one.name in named]


if __name__ == "__main__":
    setup()
    made = getattr(importlib.import_module(sys.argv[1]), sys.argv[2])(**json.loads(sys.argv[3]))
    print(json.dumps(made))
