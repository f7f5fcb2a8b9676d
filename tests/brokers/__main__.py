"""Runs the tests of brokers in two runs side by side, each with a PostgreSQL and brokers of its own: most is waiting."""

from __future__ import annotations

import os
import sys
import time

from tests.side_by_side import NO_TESTS, start

SUITE = "tests/brokers/test_suite.py"
PARTS = {"the suite": [SUITE], "the rest": ["tests/brokers", f"--ignore={SUITE}"]}


def main(arguments: list[str]) -> int:
    here = {name: value for name, value in os.environ.items() if name != "DATABASE_URL"}
    server = [sys.executable, "-m", "tests.postgres", "run", "--"]
    runs = [
        start(f"Brokers, {name}", [*server, sys.executable, "-m", "pytest", *paths, *arguments], here)
        for name, paths in PARTS.items()
    ]
    codes = []
    try:
        while runs:
            for run in [run for run in runs if run.process.poll() is not None]:
                runs.remove(run)
                run.say()
                codes.append(run.process.returncode)
            time.sleep(0.2)
    finally:
        for run in runs:
            run.process.terminate()
            run.process.wait()
    passed = all(code in (0, NO_TESTS) for code in codes) and 0 in codes
    print(f"\nBrokers: {'passed' if passed else 'FAILED'}")
    return 0 if passed else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
