"""`make bench-million`: a drain beside a million other rows, against the same drain in an empty table (PostgreSQL)."""

from __future__ import annotations

import statistics
import sys
import threading
import time
from typing import Any

from benchmarks import floor, harness
from benchmarks.drain import fill
from benchmarks.harness import Contestant

JOBS, OTHERS = 20_000, 1_000_000

STATES = {
    "finished": ("'completed', 'bench', 'bench.noop'", "NULL", "NULL", "clock_timestamp()"),
    "scheduled for next week": (
        "'pending', 'bench', 'bench.noop'", "clock_timestamp() + interval '7 days'", "clock_timestamp()", "NULL",
    ),
    "due in another queue": ("'pending', 'other', 'bench.noop'", "clock_timestamp()", "clock_timestamp()", "NULL"),
    "due, of an unknown kind": ("'pending', 'bench', 'unknown'", "clock_timestamp()", "clock_timestamp()", "NULL"),
}  # fmt: skip


def beside(*, state: str, others: int, snapshot: bool = False) -> dict[str, Any]:
    """Add the other rows, drain, and time empty looks afterwards."""
    from django.db import connection

    from durable_jobs.transports.database import Claimer

    if state:
        facts, run_at, since, finished = STATES[state]
        with connection.cursor() as cursor:
            cursor.execute(
                f"""INSERT INTO durable_jobs_job (id, status, queue_name, kind, tenant_id, created_at, updated_at,
                    next_run_at, pending_since, finished_at)
                SELECT gen_random_uuid(), {facts}, 'default', clock_timestamp(), clock_timestamp(), {run_at}, {since},
                    {finished} FROM generate_series(1, {int(others)})"""
            )
            cursor.execute("VACUUM ANALYZE durable_jobs_job")
    opened = floor.connect(autocommit=False) if snapshot else None
    if opened is not None:
        opened.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        opened.execute("SELECT count(*) FROM durable_jobs_worker")
    told = drained()
    claimer, looks = Claimer("bench", queues=["bench"]), []
    for _ in range(50):
        begun = time.perf_counter()
        assert claimer.claim(8) == []
        looks.append((time.perf_counter() - begun) * 1000)
    if opened is not None:
        opened.close()
    return {**told, "empty_look_ms": statistics.median(looks)}


def drained() -> dict[str, Any]:
    """The drain of `bench.noop` in queue `bench`, by the clock of the jobs that it has run."""
    from django.db.models import Count, Max, Min

    from durable_jobs.models import Job
    from durable_jobs.worker import Worker

    ours = Job.objects.filter(queue_name="bench", kind="bench.noop", attempts__gt=0, status="completed")
    wanted = Job.objects.filter(
        queue_name="bench", kind="bench.noop", subject_type="benchmarks.thing"
    ).count()
    worker = Worker(queues=["bench"], kinds=["bench.noop"], concurrency=8)

    def stop_when_done() -> None:
        from django.db import connections

        while ours.count() < wanted:
            time.sleep(0.5)
        worker.stop()
        connections.close_all()

    watcher = threading.Thread(target=stop_when_done)
    watcher.start()
    assert worker.run() == 0
    watcher.join()
    told = ours.aggregate(jobs=Count("id"), first=Min("claimed_at"), last=Max("finished_at"))
    return {"value": told["jobs"] / (told["last"] - told["first"]).total_seconds(), "jobs": told["jobs"]}


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument("--others", type=int, default=OTHERS)
    options = parser.parse_args()
    harness.setup()
    from django.db import connection

    if connection.vendor != "postgresql":
        print("This measures PostgreSQL; give DATABASE_URL, or use `make bench-million`.")
        return 2
    empty = {"state": "", "others": 0}
    contestants = [
        Contestant("alone", "beside", empty),
        *(
            Contestant(state, "beside", {"state": state, "others": options.others}, floor="alone")
            for state in STATES
        ),
        Contestant("beside an old snapshot", "beside", {**empty, "snapshot": True}, floor="alone"),
    ]
    with harness.databases():
        result = harness.compare(
            f"no-op jobs a second beside {options.others:,} others", "benchmarks.million",
            harness.chosen(contestants, options.only), rounds=options.rounds, prepare=lambda: fill(options.jobs),
        )  # fmt: skip
        for name, line in result["contestants"].items():
            print(
                f"  an empty look, {name}: "
                + ", ".join(f"{run['empty_look_ms']:.2f} ms" for run in line["runs"])
            )
        harness.keep("million", [result])
    return 0


if __name__ == "__main__":
    sys.exit(main())
