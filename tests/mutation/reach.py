"""Which tests run each line of the core, and how long they take: learned once, and again for tests that change."""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.mutation.session import ROOT, Tests, say
from tests.mutation.sites import Mutant, users

PACKAGE = ROOT / "durable_jobs"

SLOWEST = 4.0
"""A test that takes longer is not among them."""
BUILDERS = (
    "_snippets",
    "_page_snippets",
    "_sizes",
    "_user_type",
    "_statement",
    "_insert_together",
    "_insert_many_postgresql",
    "_insert_given",
    "_claim_next",
)
"""They put texts together, once; whoever runs a statement with such a text may notice."""
SHORTEST_LIMIT = 5.0
"""Seconds that any test may take before it counts as hanging."""


class Reach:
    """Kept in a file. When a module changes, what is known of its lines moves along with their text."""

    def __init__(self, where: Path, modules: tuple[str, ...]) -> None:
        self._where, self._modules = where, modules
        kept = json.loads(where.read_text()) if where.exists() else {}
        self._tests: dict[str, dict[str, Any]] = kept.get("tests", {})
        self._texts = {name: (PACKAGE / f"{name}.py").read_text() for name in modules}
        for name in modules:
            before = kept.get("modules", {}).get(name, "")
            if before != self._texts[name]:
                self._move(name, before.splitlines(), self._texts[name].splitlines())
        self._users = {name: users(PACKAGE / f"{name}.py") for name in modules}
        self._bodies = {name: functions_of(text) for name, text in self._texts.items()}

    def _move(self, module: str, before: list[str], after: list[str]) -> None:
        moved = {}
        for block in difflib.SequenceMatcher(a=before, b=after, autojunk=False).get_matching_blocks():
            moved.update({block.a + n + 1: block.b + n + 1 for n in range(block.size)})
        for test in self._tests.values():
            lines = test["lines"].get(module, ())
            test["lines"][module] = [moved[line] for line in lines if line in moved]

    def learn(self, tests: Tests) -> None:
        """Learn what is new: tests that are not known, or whose file has changed."""
        files = {name: name.partition("::")[0] for name in tests.items}
        digests = {file: digest_of(ROOT / file) for file in set(files.values())}
        self._tests = {name: test for name, test in self._tests.items() if name in files}
        new = [
            name for name, file in files.items() if self._tests.get(name, {}).get("file") != digests[file]
        ]  # fmt: skip
        if new:
            say(f"Learning what {len(new)} tests reach…")
            self._learn(tests, new, {name: digests[files[name]] for name in new})
        self._where.write_text(json.dumps({"modules": self._texts, "tests": self._tests}) + "\n")
        self._index()

    def _learn(self, tests: Tests, new: list[str], digests: Mapping[str, str]) -> None:
        import coverage

        paths = {str(PACKAGE / f"{name}.py"): name for name in self._modules}
        measured = coverage.Coverage(data_file=None, include=list(paths))
        seen = tests.learn(new, measured, patience=3600)
        for name in new:
            seconds = round(seen["seconds"].get(name, 0.0), 3)
            self._tests[name] = {"file": digests[name], "seconds": seconds, "lines": {}}
            if name in seen["failed"]:
                say(f"  fails without any change, and is not used: {name}")
                self._tests[name]["fails"] = True
        for path, lines in seen["lines"].items():
            for line, names in lines.items():
                for name in names:
                    if name in self._tests:
                        self._tests[name]["lines"].setdefault(paths[path], []).append(int(line))

    def _index(self) -> None:
        self._reaching: dict[str, dict[int, set[str]]] = {name: {} for name in self._modules}
        self._width: Counter[str] = Counter()
        for name, test in self._tests.items():
            if test.get("fails") or test["seconds"] > SLOWEST:
                continue
            for module, lines in test["lines"].items():
                self._width[name] += len(lines)
                for line in lines:
                    self._reaching[module].setdefault(line, set()).add(name)

    def _distance(self, name: str) -> float:
        return self._width[name] * (0.1 + float(self._tests[name]["seconds"]))

    def limits(self, names: list[str]) -> dict[str, float]:
        """Seconds after which a test that a change makes hang has failed."""
        return {name: SHORTEST_LIMIT + 10 * self._tests[name]["seconds"] for name in names}

    def seconds(self, names: list[str]) -> float:
        return float(sum(self._tests[name]["seconds"] for name in names))

    def tests_for(self, mutant: Mutant, first: Mapping[str, int], most_seconds: float) -> list[str]:
        """The tests that reach the mutant: those of `first`, then those that reach little else and are quick.

        All in all they take no longer than `most_seconds`.
        """
        lines = self._reaching[mutant.module]
        reaching = set(lines.get(mutant.line, ()))
        if not reaching or mutant.owner.partition(".")[0] in BUILDERS:
            names = self._users[mutant.module].get(mutant.owner, set())
            names = names | {mutant.owner, mutant.owner.partition(".")[0]}
            for body, numbers in self._bodies[mutant.module].items():
                # Who uses a class may use any of its methods.
                if body in names or body.partition(".")[0] in names:
                    for line in numbers:
                        reaching.update(lines.get(line, ()))
        chosen, total = [], 0.0
        for name in sorted(reaching, key=lambda name: (-first.get(name, 0), self._distance(name), name)):
            seconds = self._tests[name]["seconds"]
            if total + seconds <= most_seconds:
                chosen.append(name)
                total += seconds
        return chosen


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def functions_of(source: str) -> dict[str, range]:
    """The lines of each function's body; a class has its methods'."""
    found: dict[str, range] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = range(node.body[0].lineno, (node.end_lineno or 0) + 1)
        elif isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.FunctionDef):
                    found[f"{node.name}.{item.name}"] = range(item.body[0].lineno, (item.end_lineno or 0) + 1)
    return found
