"""What the benchmarks share: a database, contestants in processes of their own, interleaved rounds, a record.

A contestant is a function of a benchmark's module that measures once and answers a number. Each measurement is
a fresh process (`python -m benchmarks.harness MODULE NAME ARGUMENTS`), so that no contestant warms up another's
interpreter, and contestants take turns, so that a slow minute of the machine meets all of them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import platform
import signal
import sqlite3
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, suppress
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
    goal: Goal | None = None
    size: float = 1.0
    """How much of the work it gets: what is slower needs less to be measured as well."""
    module: str | None = None
    """Where the function is, if not in the benchmark's own module."""
    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Goal:
    """What a contestant should reach: of its ratio to the floor or, with `absolute`, of its own number."""

    least: float | None = None
    most: float | None = None
    absolute: bool = False

    def is_met(self, reached: float) -> bool:
        return (self.least is None or reached >= self.least) and (self.most is None or reached <= self.most)

    def __str__(self) -> str:
        return f"at least {self.least:,g}" if self.least is not None else f"at most {self.most:,g}"


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
        **contestant.environment,
    }
    command = [
        contestant.python,
        "-m",
        "benchmarks.harness",
        contestant.module or module,
        contestant.function,
    ]
    measuring = subprocess.Popen(
        [*command, json.dumps(dict(contestant.arguments))],
        env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        told, _ = measuring.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"{contestant.name} has not ended after {TIMEOUT} s") from None
    finally:
        # Whatever it has started and left.
        with suppress(ProcessLookupError):
            os.killpg(measuring.pid, signal.SIGKILL)
        measuring.wait()
    if measuring.returncode:
        raise SystemExit(f"{contestant.name} ended with {measuring.returncode}")
    return json.loads(told.splitlines()[-1])


def crowd(module: str, function: str, arguments: Mapping[str, Any], processes: int) -> list[Any]:
    """The function in so many processes, which begin when all of them have been set up; their answers."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.harness",
        module,
        function,
        json.dumps(dict(arguments)),
        "wait",
    ]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    answers = []
    for child in children:
        said, _ = child.communicate(timeout=TIMEOUT)
        assert child.returncode == 0, child.returncode
        answers.append(json.loads(said.splitlines()[-1]))
    return answers


class Busy:
    """How much of all cores was used, by anybody, while the block ran."""

    def __init__(self) -> None:
        self._looks: list[tuple[float, tuple[int, int]]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Busy:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def share(self, since: float = -math.inf, until: float = math.inf) -> float | None:
        """0 to 1, between these two times (`time.time()`); None where nobody tells, or too shortly for an answer."""
        looks = [times for moment, times in self._looks if since <= moment <= until]
        if len(looks) < 2:
            return None
        idle, all_ = (looks[-1][index] - looks[0][index] for index in (0, 1))
        return round(1 - idle / max(all_, 1), 3)

    def _look(self) -> None:
        over = False
        while (times := self._times()) is not None:
            self._looks.append((time.time(), times))
            if over:
                return
            over = self._over.wait(0.02)

    @staticmethod
    def _times() -> tuple[int, int] | None:
        try:
            numbers = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        except (OSError, ValueError):
            return None
        return numbers[3] + numbers[4], sum(numbers)


def compare(
    title: str,
    module: str,
    contestants: Sequence[Contestant],
    *,
    rounds: int,
    prepare: Callable[[Contestant], None] = lambda one: None,
) -> dict[str, Any]:
    """Measure all, in turns; print medians, ratios and goals; answer them with every single number."""
    runs: dict[str, list[Any]] = {one.name: [] for one in contestants}
    began = time.monotonic()
    for number in range(rounds):
        for one in contestants if number % 2 == 0 else reversed(contestants):
            prepare(one)
            run = once(module, one)
            runs[one.name].append(run)
            passed = time.monotonic() - began
            print(f"[{passed:4.0f} s] {one.name}: {_number(run):,.5g}", file=sys.stderr, flush=True)
    medians = {name: statistics.median(_number(run) for run in each) for name, each in runs.items()}
    lines: dict[str, Any] = {}
    goals: list[dict[str, Any]] = []
    print(f"\n{title} ({rounds} rounds, medians)")
    for one in contestants:
        ratio = medians[one.name] / medians[one.floor] if one.floor else None
        spread = f"{min(map(_number, runs[one.name])):,.4g} to {max(map(_number, runs[one.name])):,.4g}"
        compared = f"{ratio:6.2f} × {one.floor}" if ratio is not None else ""
        print(f"  {one.name:44} {medians[one.name]:10,.5g}  ({spread})  {compared}", flush=True)
        lines[one.name] = {
            "median": medians[one.name], "runs": runs[one.name], "floor": one.floor, "ratio": ratio,
        }  # fmt: skip
    told: dict[str, Any] = {"title": title, "rounds": rounds, "contestants": lines, "goals": goals}
    for one in contestants:
        if one.goal is not None:
            reached = medians[one.name] if one.goal.absolute else lines[one.name]["ratio"]
            what = one.name if one.goal.absolute else f"{one.name}, × {one.floor}"
            judge(told, what, reached, one.goal)
    return told


def judge(result: dict[str, Any], what: str, reached: float, goal: Goal, *, otherwise: bool = False) -> None:
    """Print whether the goal is met, or what stands in its place, and keep it with the result."""
    met = otherwise or goal.is_met(reached)
    print(f"  goal {'met   ' if met else 'MISSED'} {what}: {reached:,.3g} ({goal})", flush=True)
    result["goals"].append({"goal": f"{what}: {goal}", "reached": reached, "met": met})


def median_of(result: Mapping[str, Any], contestant: str, name: str) -> float:
    """The median over the rounds of another number that a contestant told."""
    return statistics.median(run[name] for run in result["contestants"][contestant]["runs"])


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
        "memory_gib": _memory(),
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


def _memory() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (OSError, ValueError):
        return None


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
    function = getattr(importlib.import_module(sys.argv[1]), sys.argv[2])
    if sys.argv[4:] == ["wait"]:
        print("ready", flush=True)
        sys.stdin.readline()
    made = function(**json.loads(sys.argv[3]))
    print(json.dumps(made))
