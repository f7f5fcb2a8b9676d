"""`make bench-idle`: the memory and the processor of a worker with nothing to do, against a bare `django.setup()`."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.drain import fill
from benchmarks.harness import Contestant, Goal

SECONDS, SETTLED = 20.0, 5.0

PROGRAMS = {
    "setup": ["-c", "import time, django; django.setup(); time.sleep(3600)"],
    "query": [
        "-c",
        "import time, django; django.setup(); from django.db import connection;"
        " connection.ensure_connection(); time.sleep(3600)",
    ],
    "worker": ["-m", "django", "runworker"],
}


def idle(*, program: str, seconds: float) -> dict[str, Any]:
    """MiB of its own share of memory (PSS) and percent of a core, after it has settled."""
    running = subprocess.Popen([sys.executable, *PROGRAMS[program]], stderr=subprocess.DEVNULL)
    try:
        time.sleep(SETTLED)
        before, begun = _used(running.pid), time.monotonic()
        time.sleep(seconds)
        percent = (_used(running.pid) - before) / (time.monotonic() - begun) * 100
        assert running.poll() is None, f"{program} ended with {running.returncode}"
        return {"value": _memory(running.pid), "cpu_percent": percent}
    finally:
        running.terminate()
        running.wait(30)


def _used(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _memory(pid: int) -> float:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no Pss in smaps_rollup")


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    options = parser.parse_args()
    harness.setup()
    contestants = [
        Contestant("django.setup()", "idle", {"program": "setup", "seconds": 1}),
        Contestant("django.setup() and a connection", "idle", {"program": "query", "seconds": 1},
                   floor="django.setup()"),
        Contestant("idle worker", "idle", {"program": "worker", "seconds": options.seconds}, floor="django.setup()",
                   goal=Goal(most=1.2)),
    ]  # fmt: skip
    with harness.databases():
        result = harness.compare(
            "memory at rest, MiB", "benchmarks.idle", contestants, rounds=options.rounds,
            prepare=lambda one: fill(0),
        )  # fmt: skip
        used = statistics.median(run["cpu_percent"] for run in result["contestants"]["idle worker"]["runs"])
        harness.judge(result, "idle worker, percent of a core", used, Goal(most=1.5))
        harness.keep("idle", [result])
    return 0


if __name__ == "__main__":
    sys.exit(main())
