"""Changes the core a little, many times, and sees whether the tests notice.

`python -m tests.mutation [--sample 400] [--seed N] [--part 1/8] [--module store] [--results FILE]`. On SQLite it tries
what can be changed there; run through `python -m tests.postgres run --` what only PostgreSQL executes. A first run
learns which test reaches which line. Then each mutant gets a forked process that puts the change into the imported module and
runs the tests that reach it, the nearest first, until one fails; that one must pass without the change, or else it
is left out. Answers are kept in the results file, so that a run goes on where the last one ended; a mutant whose text
has changed is tried again.

Ready-made tools were tried on paper and left: mutmut changes what stands in functions, and cosmic-ray knows no texts
and starts an interpreter for each mutant; here the guarantees are conditions in SQL texts at the top of a module.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.mutation.equivalent import EQUIVALENT, key_of, reason_of
from tests.mutation.patching import patch
from tests.mutation.reach import PACKAGE, Reach
from tests.mutation.session import Tests, say, vendor
from tests.mutation.sites import Mutant, mutants_of

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
    "tests/test_fast_paths.py",
    "tests/test_transports.py",
)
"""What is fast and looks at the core closely."""
LEFT_OUT = (
    "tests/store/test_soak.py", "tests/receipts/test_docs.py", "tests/store/test_database.py",
    "tests/store/test_plans.py",
)  # fmt: skip
"""Each counts its own threads and processes, or makes a crowd of rows first."""

NOTICED = ("killed", "hung")


class Run:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder, self.vendor = options, folder, vendor()
        self.kept: dict[str, dict[str, Any]] = {}
        if options.results.exists():
            self.kept = json.loads(options.results.read_text())
        self.reach = Reach(Path(f"{options.results}.{self.vendor}.reach"), MODULES)
        self.unreliable: set[str] = set()

    def run(self) -> int:
        chosen = self._chosen()
        open_ones = [mutant for mutant in chosen if not self._is_answered(mutant)]
        say(f"{self.vendor}: {len(chosen)} mutants, {len(open_ones)} of them open")
        if open_ones:
            tests = Tests(self.folder, lambda tests: self._try(tests, open_ones))
            tests.collect(list(TESTS), list(LEFT_OUT))
        return self._tell(chosen)

    def _chosen(self) -> list[Mutant]:
        every = [
            mutant for module in MODULES for mutant in mutants_of(PACKAGE / f"{module}.py", module)
            if self.options.module in ("", module)
        ]  # fmt: skip
        if not self.options.module:
            for gone in EQUIVALENT.keys() - {key_of(mutant) for mutant in every}:
                say(f"tests/mutation/equivalent.py explains what is no mutant any more: {gone}")
        # Each has a place of its own, whatever else comes and goes in the code.
        every.sort(key=lambda mutant: hashlib.sha256(f"{self.options.seed} {mutant.id}".encode()).digest())
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
        status = str(kept["status"]) if same else ""
        return "equivalent" if status in ("survived", "unreached") and reason_of(mutant) else status

    def _try(self, tests: Tests, mutants: list[Mutant]) -> None:
        self.reach.learn(tests)
        begun = time.monotonic()
        for number, mutant in enumerate(mutants, 1):
            if time.monotonic() - begun > self.options.minutes * 60:
                say(f"The time is over; {len(mutants) - number + 1} are left for the next run.")
                break
            answer = self._one(tests, mutant)
            self.kept[mutant.id] = answer
            self._keep()
            if answer["status"] not in NOTICED:
                say(f"{answer['status']}: {mutant.id} line {mutant.line}: {shown(mutant)}")
            if number % 25 == 0:
                say(f"  {number} of {len(mutants)}, {time.monotonic() - begun:.0f} s")

    def _keep(self) -> None:
        fresh = self.options.results.with_suffix(".new")
        fresh.write_text(json.dumps(self.kept, indent=1, sort_keys=True) + "\n")
        fresh.replace(self.options.results)

    def _one(self, tests: Tests, mutant: Mutant) -> dict[str, Any]:
        begun = time.monotonic()
        names, status, by = self._tests_for(mutant), "unreached", ""
        while names:
            limits = self.reach.limits(names)
            patience = 60 + 4 * self.reach.seconds(names)
            answer = tests.run(names, limits, patience=patience, prepare=lambda: patch(mutant))
            if answer in names and tests.run([answer], limits, patience=patience) != "":
                say(f"  fails at times without any change, and is not used: {answer}")
                self.unreliable.add(answer)
                names.remove(answer)
                continue
            status = "hung" if answer is None else "killed" if answer else "survived"
            by = answer or ""
            break
        return {
            "status": status,
            "by": by,
            "tests": len(names),
            "line": mutant.line,
            "old": mutant.old,
            "new": mutant.new,
            "database": self.vendor,
            "seconds": round(time.monotonic() - begun, 1),
        }

    def _tests_for(self, mutant: Mutant) -> list[str]:
        """First those that have noticed another change of the same function."""
        place = f"{mutant.module}:{mutant.owner}:"
        noticed = Counter(answer["by"] for name, answer in self.kept.items() if name.startswith(place))
        names = self.reach.tests_for(mutant, noticed, self.options.seconds)
        return [name for name in names if name not in self.unreliable]

    def _tell(self, mutants: list[Mutant]) -> int:
        for module in [*MODULES, ""]:
            statuses = [self._status(mutant) or "open" for mutant in mutants if module in ("", mutant.module)]
            counts = Counter(statuses)
            tried = len(statuses) - counts["open"] - counts["equivalent"]
            noticed = sum(counts[status] for status in NOTICED)
            score = f"{noticed / tried:.1%}" if tried else "nothing tried"
            of = f"in {module}.py" if module else f"on {self.vendor}"
            say(f"Mutation {of}: {noticed} of {tried} noticed ({score}); {dict(sorted(counts.items()))}")
        return 0


def shown(mutant: Mutant) -> str:
    old, new = (" ".join(text.split()) for text in (mutant.old, mutant.new))
    return f"{old[:100]!r} → {new[:60]!r}"


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
    parser.add_argument(
        "--seconds", type=float, default=40.0, help="what one mutant's tests may take, all in all"
    )
    parser.add_argument("--minutes", type=float, default=10_000.0, help="end after so many")
    parser.add_argument("--again", action="store_true", help="try again what has survived")
    options = parser.parse_args(arguments)
    options.results = options.results.resolve()
    with tempfile.TemporaryDirectory(prefix="durable-jobs-mutation-") as folder:
        return Run(options, Path(folder)).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
