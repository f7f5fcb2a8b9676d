"""Changes the core a little, many times, and sees whether the tests notice.

`python -m tests.mutation [--sample 400] [--seed N] [--part 1/8] [--module store] [--results FILE]`. On SQLite it tries
what can be changed there; run through `python -m tests.postgres run --` what only PostgreSQL executes. A first run
learns which test reaches which line. Then each mutant gets a forked process that puts the change into the imported module and
runs the tests that reach it, the nearest first, until one fails. Answers are kept in the results file, so that a run goes
on where the last one ended; a mutant whose text has changed is tried again.

Ready-made tools were tried on paper and left: mutmut changes what stands in functions, and cosmic-ray knows no texts
and starts an interpreter for each mutant; here the guarantees are conditions in SQL texts at the top of a module.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from tests.mutation.sites import Mutant, mutants_of, users

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "durable_jobs"
MODULES = ("store", "lifecycle", "reconciler", "receipts")

TESTS = (
    "tests/store",
    "tests/receipts",
    "tests/test_lifecycle.py",
    "tests/test_reconciler.py",
    "tests/test_runner.py",
    "tests/test_service.py",
    "tests/test_pause.py",
    "tests/test_prune.py",
    "tests/test_claimer.py",
    "tests/test_signals.py",
    "tests/test_testing.py",
    "tests/test_explain.py",
    "tests/test_crash_kit.py",
    "tests/test_commands.py",
)
"""What is fast and looks at the core closely."""
LEFT_OUT = ("tests/store/test_soak.py", "tests/receipts/test_docs.py", "tests/store/test_database.py")

MOST_SECONDS = 30.0
"""How long a mutant's tests would take, all in all; they are taken nearest first."""
SLOWEST = 3.0
"""A test that takes longer is not among them."""
PATIENCE = 90.0
"""A mutant that makes a test hang is noticed, too."""


def vendor() -> str:
    return "postgresql" if os.environ.get("DATABASE_URL", "").startswith("postgres") else "sqlite"


# --- the pytest of a process


def patch(mutant: Mutant) -> None:
    """Put the change into the imported module, where everybody already has hold of its functions and texts."""
    module = importlib.import_module(f"durable_jobs.{mutant.module}")
    assert module.__file__ is not None
    fresh = types.ModuleType(module.__name__)
    fresh.__file__, fresh.__package__ = module.__file__, module.__package__
    changed = mutant.applied(Path(module.__file__).read_bytes())
    sys.modules[f"{module.__name__}.changed"] = fresh
    exec(compile(changed, module.__file__, "exec", dont_inherit=True), vars(fresh))
    for name, new in list(vars(fresh).items()):
        if name.startswith("__") or name not in vars(module):
            continue
        old = getattr(module, name)
        if not transplanted(old, new, module.__name__):
            for other in list(sys.modules.values()):
                if other is not fresh and getattr(other, "__dict__", {}).get(name) is old:
                    setattr(other, name, new)


def transplanted(old: Any, new: Any, module: str) -> bool:
    """Make `old` behave as `new`; False for values that are to be replaced."""
    if isinstance(new, types.FunctionType):
        if new.__module__ == module:
            give_code(old, new)
        return True
    if isinstance(new, type):
        if new.__module__ == module:
            for name, value in list(vars(new).items()):
                replace_member(old, name, value)
        return True
    if type(new).__name__ == "Statement":
        old.__dict__ = new.__dict__
        return True
    if isinstance(new, dict) and any(type(value).__name__ == "Statement" for value in new.values()):
        old.clear()
        old.update(new)
        return True
    return not isinstance(new, int | float | str | tuple | list | dict | frozenset | set)


def give_code(old: Any, new: Any) -> None:
    inner_old, inner_new = getattr(old, "__wrapped__", None), getattr(new, "__wrapped__", None)
    if inner_old is not None and inner_new is not None:
        give_code(inner_old, inner_new)
        return
    if len(old.__code__.co_freevars) == len(new.__code__.co_freevars):
        old.__code__ = new.__code__
        old.__defaults__, old.__kwdefaults__ = new.__defaults__, new.__kwdefaults__


def replace_member(old: type, name: str, value: Any) -> None:
    there = vars(old).get(name)
    if isinstance(value, property) and isinstance(there, property):
        give_code(there.fget, value.fget)
    elif isinstance(value, staticmethod | classmethod) and there is not None:
        give_code(there.__func__, value.__func__)
    elif isinstance(value, types.FunctionType) and isinstance(there, types.FunctionType):
        if value.__code__.co_filename != "<string>":
            give_code(there, value)
    elif isinstance(value, int | float | str | tuple) and not name.startswith("__"):
        with suppress(AttributeError, TypeError):
            setattr(old, name, value)


class Notes:
    """What a run of pytest did: the first failure, and how long each test took."""

    def __init__(self, coverage: Any = None) -> None:
        self.failed = ""
        self.seconds: dict[str, float] = {}
        self._coverage = coverage

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = f"collection of {report.nodeid}"

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        if self._coverage is not None:
            self._coverage.switch_context(nodeid)


def pytest_arguments(tests: list[str], *, create: bool) -> list[str]:
    return [
        "--ds=tests.mutation.settings",
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:faulthandler",
        "-W",
        "ignore",
        "--timeout=30",
        "--create-db" if create else "--reuse-db",
        "--reuse-db",
        *tests,
    ]


def collect_here() -> None:
    """Import the package and its tests once, for all forks."""
    import pytest

    arguments = [*pytest_arguments(list(TESTS), create=False), "--collect-only"]
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        if pytest.main(arguments) != 0:
            raise SystemExit("The tests cannot be collected.")


def in_a_fork(act: Any, patience: float) -> dict[str, Any] | None:
    """Run `act()` in a process of its own, and answer with what it says; None when it hangs or dies."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(read)
        os.setsid()
        quiet = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(quiet, stream)
        try:
            answer = json.dumps(act())
        except BaseException as error:
            answer = json.dumps({"broken": repr(error)})
        with os.fdopen(write, "w") as pipe:
            pipe.write(answer)
        os._exit(0)
    os.close(write)
    return _answer(pid, read, patience)


def _answer(pid: int, read: int, patience: float) -> dict[str, Any] | None:
    import select

    with os.fdopen(read) as pipe:
        ready, _, _ = select.select([pipe], [], [], patience)
        said = pipe.read() if ready else ""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return json.loads(said) if said else None


# --- which test reaches what


class Reach:
    """Which tests run each line, and how long they take."""

    def __init__(self, learned: dict[str, Any]) -> None:
        self.tests: list[str] = learned["tests"]
        self.seconds: list[float] = learned["seconds"]
        self.lines: dict[str, dict[int, list[int]]] = {
            module: {int(line): tests for line, tests in lines.items()}
            for module, lines in learned["lines"].items()
        }
        self._width: Counter[int] = Counter()
        for lines in self.lines.values():
            for tests in lines.values():
                self._width.update(tests)
        self._users = {module: users(PACKAGE / f"{module}.py") for module in MODULES}
        self._bodies = {module: functions_of(PACKAGE / f"{module}.py") for module in MODULES}

    def tests_for(self, mutant: Mutant) -> list[str]:
        """The tests that reach the mutant: first those that reach little else."""
        lines = self.lines.get(mutant.module, {})
        reaching = set(lines.get(mutant.line, ()))
        if not reaching:
            names = self._users[mutant.module].get(mutant.owner, set())
            names = names | {mutant.owner, mutant.owner.partition(".")[0]}
            for body, numbers in self._bodies[mutant.module].items():
                # Who uses a class may use any of its methods.
                if body in names or body.partition(".")[0] in names:
                    for line in numbers:
                        reaching.update(lines.get(line, ()))
        chosen, total = [], 0.0
        for test in sorted(reaching, key=lambda test: (self._width[test], self.seconds[test])):
            if self.seconds[test] <= SLOWEST and total + self.seconds[test] <= MOST_SECONDS:
                chosen.append(self.tests[test])
                total += self.seconds[test]
        return chosen


def functions_of(path: Path) -> dict[str, range]:
    """The lines of each function's body; a class has its methods'."""
    import ast

    found: dict[str, range] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = range(node.body[0].lineno, (node.end_lineno or 0) + 1)
        elif isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.FunctionDef):
                    found[f"{node.name}.{item.name}"] = range(item.body[0].lineno, (item.end_lineno or 0) + 1)
    return found


def learn() -> dict[str, Any]:
    """Run all tests once, each under its own name in the coverage."""
    import coverage
    import pytest

    measured = coverage.Coverage(data_file=None, include=[str(PACKAGE / f"{name}.py") for name in MODULES])
    notes = Notes(measured)
    measured.start()
    # Each counts its own threads and processes, and coverage slows all of them.
    left_out = [f"--ignore={path}" for path in LEFT_OUT]
    pytest.main([*pytest_arguments(list(TESTS), create=True), *left_out], plugins=[notes])
    measured.stop()
    data = measured.get_data()
    tests = sorted(notes.seconds)
    numbers = {test: number for number, test in enumerate(tests)}
    lines = {
        name: {
            line: [numbers[test] for test in contexts if test in numbers]
            for line, contexts in data.contexts_by_lineno(str(PACKAGE / f"{name}.py")).items()
        }
        for name in MODULES
    }
    return {
        "failed": notes.failed,
        "tests": tests,
        "seconds": [round(notes.seconds[test], 3) for test in tests],
        "lines": lines,
    }


# --- the run


class Run:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder, self.vendor = options, folder, vendor()
        self.kept: dict[str, dict[str, Any]] = {}
        if options.results.exists():
            self.kept = json.loads(options.results.read_text())
        self.create = False

    def run(self) -> int:
        chosen = self._chosen()
        open_ones = [mutant for mutant in chosen if not self._is_answered(mutant)]
        print(f"{self.vendor}: {len(chosen)} mutants, {len(open_ones)} of them open", flush=True)
        if open_ones:
            self._try(open_ones)
        return self._tell(chosen)

    def _chosen(self) -> list[Mutant]:
        every = [
            mutant for module in MODULES for mutant in mutants_of(PACKAGE / f"{module}.py", module)
            if self.options.module in ("", module)
        ]  # fmt: skip
        every.sort(key=lambda mutant: mutant.id)
        random.Random(self.options.seed).shuffle(every)
        if self.options.sample:
            every = every[: self.options.sample]
        part, parts = self.options.part
        here = [mutant for mutant in every[part - 1 :: parts] if self._is_for_here(mutant)]
        if self.options.again:
            return [mutant for mutant in here if self._status(mutant) in ("survived", "unreached")]
        return here

    def _is_for_here(self, mutant: Mutant) -> bool:
        if self.vendor == "sqlite":
            return mutant.vendor != "postgresql"
        # What nobody noticed on SQLite may be noticed here.
        return mutant.vendor == "postgresql" or (self.options.again and mutant.vendor != "sqlite")

    def _is_answered(self, mutant: Mutant) -> bool:
        return not self.options.again and self._status(mutant) != ""

    def _status(self, mutant: Mutant) -> str:
        kept = self.kept.get(mutant.id, {})
        same = (kept.get("old"), kept.get("new")) == (mutant.old, mutant.new)
        return str(kept["status"]) if same else ""

    def _try(self, mutants: list[Mutant]) -> None:
        reach = self._reach()
        own, template = self.folder / "mutant.sqlite3", self.folder / "template.sqlite3"
        os.environ["DURABLE_JOBS_MUTATION_DATABASE"] = str(own)
        collect_here()
        in_a_fork(lambda: self._pytest(["tests/store/test_models.py"], create=True), 300)
        if self.vendor == "sqlite":
            shutil.copy(own, template)
        begun = time.monotonic()
        for number, mutant in enumerate(mutants, 1):
            if time.monotonic() - begun > self.options.minutes * 60:
                print(f"The time is over; {len(mutants) - number + 1} are left for the next run.")
                break
            answer = self._one(mutant, reach, template)
            self.kept[mutant.id] = answer
            self.options.results.write_text(json.dumps(self.kept, indent=1, sort_keys=True) + "\n")
            if answer["status"] not in ("killed", "hung"):
                print(f"{answer['status']}: {mutant.id} line {mutant.line}: {shown(mutant)}", flush=True)
            if number % 25 == 0:
                print(f"  {number} of {len(mutants)}, {time.monotonic() - begun:.0f} s", flush=True)

    def _one(self, mutant: Mutant, reach: Reach, template: Path) -> dict[str, Any]:
        begun = time.monotonic()
        tests = reach.tests_for(mutant)
        status, by = "unreached", ""
        if tests:
            if self.vendor == "sqlite":
                for left in self.folder.glob("mutant.sqlite3*"):
                    left.unlink()
                shutil.copy(template, self.folder / "mutant.sqlite3")
            answer = in_a_fork(lambda: self._pytest(tests, create=self.create, mutant=mutant), PATIENCE)
            self.create = answer is None and self.vendor == "postgresql"
            if answer is None:
                status = "hung"
            elif answer.get("failed") or answer.get("broken"):
                status, by = "killed", answer.get("failed") or answer["broken"][:200]
            else:
                status = "survived"
        return {
            "status": status,
            "by": by,
            "tests": len(tests),
            "line": mutant.line,
            "old": mutant.old,
            "new": mutant.new,
            "database": self.vendor,
            "seconds": round(time.monotonic() - begun, 1),
        }

    def _pytest(self, tests: list[str], *, create: bool, mutant: Mutant | None = None) -> dict[str, Any]:
        import pytest

        if mutant is not None:
            patch(mutant)
        notes = Notes()
        code = pytest.main([*pytest_arguments(tests, create=create), "-x"], plugins=[notes])
        if code != 0 and not notes.failed:
            notes.failed = f"pytest ended with {int(code)}"
        return {"failed": notes.failed}

    def _reach(self) -> Reach:
        """Learned anew when a test or a module has changed."""
        digest = hashlib.sha256()
        for path in sorted([*ROOT.glob("tests/**/*.py"), *PACKAGE.glob("*.py")]):
            digest.update(path.read_bytes())
        where = Path(f"{self.options.results}.{self.vendor}.reach")
        learned = json.loads(where.read_text()) if where.exists() else {}
        if learned.get("digest") != digest.hexdigest() and not (learned and self.options.trust_reach):
            print("Learning which test reaches what…", flush=True)
            os.environ["DURABLE_JOBS_MUTATION_DATABASE"] = str(self.folder / "learn.sqlite3")
            answer = in_a_fork(learn, 1800)
            if answer is None or "broken" in answer:
                raise SystemExit(f"The tests cannot be run: {answer}")
            learned = {**answer, "digest": digest.hexdigest()}
            where.write_text(json.dumps(learned))
            if learned["failed"]:
                print(f"  (a test fails without any change: {learned['failed']})")
        return Reach(learned)

    def _tell(self, mutants: list[Mutant]) -> int:
        counts = Counter(self._status(mutant) or "open" for mutant in mutants)
        tried = sum(counts.values()) - counts["open"]
        noticed = counts["killed"] + counts["hung"]
        score = f"{noticed / tried:.1%}" if tried else "nothing tried"
        print(f"Mutation on {self.vendor}: {noticed} of {tried} noticed ({score}); {dict(counts)}")
        return 0


def shown(mutant: Mutant) -> str:
    old, new = (" ".join(text.split()) for text in (mutant.old, mutant.new))
    return f"{old[:100]!r} → {new[:60]!r}"


@contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="durable-jobs-mutation-") as name:
        yield Path(name)


def part_of(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part: write 3/8 for the third of eight")
    return int(part), int(parts)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__.split("\n\n")[0])
    parser.add_argument("--sample", type=int, default=0, help="so many of all, by the seed (default: all)")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--part", type=part_of, default=(1, 1), help="3/8: the third of eight parts")
    parser.add_argument("--module", choices=("", *MODULES), default="")
    parser.add_argument("--results", type=Path, default=Path("mutation.json"))
    parser.add_argument("--minutes", type=float, default=10_000.0, help="end after so many")
    parser.add_argument("--again", action="store_true", help="try again what has survived")
    parser.add_argument("--trust-reach", action="store_true", help="do not learn anew who reaches what")
    options = parser.parse_args(arguments)
    options.results = options.results.resolve()
    with scratch() as folder:
        return Run(options, folder).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
