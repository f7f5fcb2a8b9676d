"""`make bench-pickup`: milliseconds from the commit of a start to the first line of the step, by an idle worker."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from typing import Any

from benchmarks import floor, harness
from benchmarks.drain import fill
from benchmarks.harness import Contestant, Goal

JOBS = 200
FLOOR_POLL = 0.005


def durable(*, jobs: int) -> dict[str, Any]:
    """A worker in a process of its own; its step notes the time, and so does this process after each commit."""
    from django.db import connection

    from durable_jobs import service
    from durable_jobs.models import Job

    worker = subprocess.Popen([sys.executable, "-m", "benchmarks.pickup", "worker"])
    try:
        service.start("bench.clock")
        while not Job.objects.filter(status="completed").exists():
            time.sleep(0.05)
        committed = {}
        for _ in range(jobs):
            time.sleep(random.uniform(0.02, 0.06))
            job = service.start("bench.clock").job
            committed[job.id] = time.time()
        while Job.objects.exclude(status="completed").exists():
            time.sleep(0.05)
        begun = {job.id: job.result for job in Job.objects.all()}
        connection.close()
    finally:
        worker.terminate()
        worker.wait(30)
    return told([(begun[job] - at) * 1000 for job, at in committed.items()])


def bare(*, jobs: int) -> dict[str, Any]:
    """The same with the driver alone: LISTEN and claim one, or look at `data_version` every 5 ms."""
    from django.db import connection

    hold(jobs)
    server = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.pickup", "floor"], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    try:
        server.stdout.readline()
        waits = []
        for _ in range(jobs):
            time.sleep(random.uniform(0.02, 0.06))
            with connection.cursor() as cursor:
                if connection.vendor == "postgresql":
                    cursor.execute(
                        "WITH one AS (SELECT id FROM durable_jobs_job WHERE status = 'held' LIMIT 1)"
                        " UPDATE durable_jobs_job j SET status = 'pending', next_run_at = clock_timestamp(),"
                        " pending_since = clock_timestamp() FROM one WHERE j.id = one.id"
                        " RETURNING pg_notify('bench', '')"
                    )
                    cursor.fetchall()
                else:
                    now = floor.LITE["now"].replace("%", "%%")
                    cursor.execute(
                        f"UPDATE durable_jobs_job SET status = 'pending', next_run_at = {now},"
                        f" pending_since = {now} WHERE id = (SELECT id FROM durable_jobs_job"
                        " WHERE status = 'held' LIMIT 1)",
                        [],
                    )
            at = time.time()
            waits.append((float(server.stdout.readline()) - at) * 1000)
    finally:
        server.terminate()
        server.wait(30)
    return told(waits)


def hold(jobs: int) -> None:
    """Held rows, which the floor lets go one by one."""
    from django.db import connection

    fill(jobs)
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE durable_jobs_job SET status = 'held', next_run_at = NULL, pending_since = NULL"
        )


def told(waits: list[float]) -> dict[str, Any]:
    waits.sort()
    return {"value": waits[len(waits) // 2], "p99": waits[int(len(waits) * 0.99)], "jobs": len(waits)}


def listen() -> None:
    """The floor's worker: prints the time of each job that it has claimed."""
    from django.db import connection

    print("ready", flush=True)
    if connection.vendor == "postgresql":
        raw = floor.connect()
        raw.execute("LISTEN bench")
        claimer = floor.connect()
        for _ in raw.notifies():
            if claimer.execute(floor.pg_claim(1)).fetchall():
                print(time.time(), flush=True)
        return
    lite = floor.lite_connect()
    version = None
    while True:
        (now,) = lite.execute("PRAGMA data_version").fetchone()
        if now != version:
            version = now
            if lite.execute(floor.lite_claim(1)).fetchall():
                print(time.time(), flush=True)
        time.sleep(FLOOR_POLL)


def main() -> int:
    if sys.argv[1:] in (["worker"], ["floor"]):
        harness.setup()
        if sys.argv[1] == "floor":
            listen()
            return 0
        from durable_jobs.worker import Worker

        return Worker(queues=["bench"], concurrency=2).run()
    parser = harness.parser(__doc__)
    parser.add_argument("--jobs", type=int, default=JOBS)
    options = parser.parse_args()
    harness.setup()
    from django.db import connection

    held = {"jobs": options.jobs}
    most = 1.5 if connection.vendor == "postgresql" else 6.0
    how = "LISTEN" if connection.vendor == "postgresql" else "data_version every 5 ms"
    contestants = [
        Contestant(f"floor: {how}", "bare", held),
        Contestant(
            "durable_jobs", "durable", held, floor=f"floor: {how}", goal=Goal(most=most, absolute=True)
        ),
    ]
    with harness.databases():
        result = harness.compare(
            "commit to step, ms (median of p50)", "benchmarks.pickup", contestants, rounds=options.rounds,
            prepare=lambda one: fill(0),
        )  # fmt: skip
        for name, line in result["contestants"].items():
            print(f"  p99 of {name}: " + ", ".join(f"{run['p99']:.1f}" for run in line["runs"]))
        if connection.vendor == "postgresql":
            harness.judge(
                result, "durable_jobs, p99", harness.median_of(result, "durable_jobs", "p99"), Goal(most=5)
            )
        harness.keep("pickup", [result])
    return 0


if __name__ == "__main__":
    sys.exit(main())
