"""`make bench-recovery`: cancel to stopped, kill to resumed, and the work that is done again after a kill."""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.drain import fill
from benchmarks.harness import Contestant

CANCELS, ROWS, BATCH = 20, 40_000, 100
WORKER = ["-m", "django", "runworker", "--queues", "bench", "--concurrency", "2", "--verbosity", "0"]
QUICK = {"GRACE": 1.0, "TICK": 1.0}
LEASE = "BENCH_LEASE_SECONDS"


def cancels(*, times: int) -> dict[str, Any]:
    """Milliseconds from the commit of `service.cancel` to the end of the job, whose step asks each 5 ms."""
    from durable_jobs import service
    from durable_jobs.models import Job

    worker = subprocess.Popen([sys.executable, *WORKER])
    waits = []
    try:
        for _ in range(times):
            job = service.start("bench.patient").job
            until(lambda job=job: Job.objects.filter(pk=job.pk, last_committed_at__isnull=False).exists())
            time.sleep(random.uniform(0.0, 0.2))
            service.cancel(job.pk, actor="bench", reason="measured")
            until(lambda job=job: Job.objects.filter(pk=job.pk, finished_at__isnull=False).exists())
            job.refresh_from_db()
            assert job.status == "cancelled", job.status
            waits.append((job.finished_at - job.cancel_requested_at).total_seconds() * 1000)
    finally:
        worker.terminate()
        worker.wait(60)
    waits.sort()
    return {"value": waits[len(waits) // 2], "slowest": waits[-1], "cancels": times}


def kill(*, supervised: bool, rows: int) -> dict[str, Any]:
    """Seconds from SIGKILL in the middle of a batch to the next committed batch by another process."""
    from benchmarks.models import Thing
    from durable_jobs import service
    from durable_jobs.models import Job

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "begun"
        log.touch()
        env = {**os.environ, "BENCH_BEGUN": str(log)}
        if supervised:
            workers = [subprocess.Popen([sys.executable, *WORKER, "--processes", "2"], env=env)]
        else:
            workers = [subprocess.Popen([sys.executable, *WORKER], env=env) for _ in range(2)]
        try:
            job = service.start("bench.redone").job

            def processed() -> int:
                return Job.objects.values_list("processed_count", flat=True).get(pk=job.pk)

            until(lambda: processed() > rows // 4)
            time.sleep(random.uniform(0.0, 0.05))
            job.refresh_from_db()
            os.kill(int(job.lease_owner.split(":")[1]), signal.SIGKILL)
            killed, at = time.monotonic(), processed()
            until(lambda: processed() > at, most=300)
            resumed = time.monotonic() - killed
            until(lambda: Job.objects.filter(pk=job.pk, finished_at__isnull=False).exists(), most=120)
            job.refresh_from_db()
            assert job.status == "completed", job.error_message
            assert Thing.objects.filter(count=1).count() == rows, "a row was written twice, or never"
            begun = [line.split() for line in log.read_text().splitlines()]
        finally:
            for worker in workers:
                worker.terminate()
            for worker in workers:
                worker.wait(60)
    again = sum(int(line[1]) for line in begun) - rows
    return {"value": resumed, "rows_begun_again": again, "rows_written_twice": 0, "rows": rows}


def until(done: Callable[[], bool], most: float = 60) -> None:
    deadline = time.monotonic() + most
    while not done():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.005)


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--cancels", type=int, default=CANCELS)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument(
        "--default-lease", action="store_true", help="also with a lease of a minute: two minutes more"
    )
    options = parser.parse_args()
    harness.setup()
    given = {"rows": options.rows}
    kills = [
        Contestant("supervised (--processes 2), defaults", "kill", {**given, "supervised": True}),
        Contestant("another worker: lease 5 s, GRACE 1 s, TICK 1 s", "kill", {**given, "supervised": False},
                   settings=QUICK, environment={LEASE: "5"}),
    ]  # fmt: skip
    if options.default_lease:
        kills.append(
            Contestant("another worker, defaults (lease 60 s)", "kill", {**given, "supervised": False})
        )

    def prepare(one: Contestant) -> None:
        from benchmarks.slices import prepare as things

        if one.function == "cancels":
            fill(0)
        else:
            things(options.rows)

    with harness.databases():
        module, rounds = "benchmarks.recovery", options.rounds
        stops = [Contestant("cancel to cancelled", "cancels", {"times": options.cancels})]
        stopped = harness.compare("cancel, ms (p50)", module, stops, rounds=rounds, prepare=prepare)
        slowest = [run["slowest"] for run in stopped["contestants"]["cancel to cancelled"]["runs"]]
        print(f"  slowest: {', '.join(f'{one:.0f} ms' for one in slowest)}")
        resumed = harness.compare("kill to the next commit, s", module, kills, rounds=rounds, prepare=prepare)
        for name, line in resumed["contestants"].items():
            again = statistics.median(run["rows_begun_again"] for run in line["runs"])
            print(f"  {name}: {again:g} rows begun again (a batch has {BATCH}), none written twice")
        harness.keep("recovery", [stopped, resumed])
    return 0


if __name__ == "__main__":
    sys.exit(main())
