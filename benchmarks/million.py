"""`make bench-million`: a drain beside a million other rows, against the same drain in a table of its own (PostgreSQL).

Each sort of other rows has a database of its own, filled once, so that the rounds can take turns; and so has the old
snapshot, which holds back the vacuum of its own database alone.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks import drain, floor, harness
from benchmarks.harness import Contestant, Goal

JOBS, OTHERS, HELD = 20_000, 1_000_000, 180.0
LATE_SECONDS = 30.0
"""Drains that end so late under the old snapshot count."""
CHUNK = 100_000

STATES = {
    "finished": ("'completed', 'bench', 'bench.noop'", "NULL", "NULL", "clock_timestamp()"),
    "scheduled for next week": (
        "'pending', 'bench', 'bench.noop'", "clock_timestamp() + interval '7 days'", "clock_timestamp()", "NULL",
    ),
    "due in another queue": ("'pending', 'other', 'bench.noop'", "clock_timestamp()", "clock_timestamp()", "NULL"),
    "due, of an unknown kind": ("'pending', 'bench', 'unknown'", "clock_timestamp()", "clock_timestamp()", "NULL"),
}  # fmt: skip


def add(*, state: str, others: int) -> float:
    """Add the other rows; answers the seconds that it took."""
    from django.db import connection

    begun = time.perf_counter()
    facts, run_at, since, finished = STATES[state]
    with connection.cursor() as cursor:
        for done in range(0, others, CHUNK):
            cursor.execute(
                f"""INSERT INTO durable_jobs_job (id, status, queue_name, kind, tenant_id, created_at, updated_at,
                    next_run_at, pending_since, finished_at)
                SELECT {drain.PG_ID}, {facts}, 'default', clock_timestamp(), clock_timestamp(), {run_at}, {since},
                    {finished} FROM generate_series(1, {min(CHUNK, others - done)})"""
            )
        cursor.execute("VACUUM ANALYZE durable_jobs_job")
    return time.perf_counter() - begun


def beside(*, jobs: int) -> dict[str, Any]:
    """Drain so many jobs in the database as it is, and time empty looks afterwards."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM durable_jobs_job WHERE subject_type = 'benchmarks.thing'")
        drain.insert(cursor, jobs)
        cursor.execute("VACUUM ANALYZE durable_jobs_job")
        cursor.execute("CHECKPOINT")
    begun = now()
    with harness.Busy() as busy:
        used = drain.worker(concurrency=8)
    return {
        **rate(begun, jobs),
        "cpu_us_per_job": used / jobs * 1e6,
        "busy": busy.share(),
        **empty_looks(),
    }


def now() -> Any:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("SELECT clock_timestamp()")
        return cursor.fetchone()[0]


def rate(begun: Any, jobs: int) -> dict[str, Any]:
    """Jobs a second among those that have ended since then."""
    from django.db.models import Count, Max, Min

    from durable_jobs.models import Job

    told = Job.objects.filter(status="completed", finished_at__gt=begun, attempts__gt=0).aggregate(
        jobs=Count("id"), first=Min("claimed_at"), last=Max("finished_at")
    )
    assert told["jobs"] == jobs, told
    return {"value": jobs / (told["last"] - told["first"]).total_seconds(), "jobs": jobs}


def empty_looks() -> dict[str, Any]:
    """Milliseconds of a look that finds nothing: of the usual one, and of the sweeps that come each second."""
    from durable_jobs.transports.database import Claimer

    claimer, looks = Claimer("bench", queues=["bench"], kinds=["bench.noop"]), []
    until = time.monotonic() + 3
    while time.monotonic() < until:
        begun = time.perf_counter()
        assert claimer.claim(8) == []
        looks.append((time.perf_counter() - begun) * 1000)
        time.sleep(0.02)
    return {"empty_look_ms": statistics.median(looks), "slowest_look_ms": max(looks)}


def under_snapshot(*, jobs: int, held: float, snapshot: bool = True) -> dict[str, Any]:
    """Open a snapshot and drain again and again until it is `held` seconds old; the drains of its last half minute
    count. With `snapshot` False the same without one."""
    from django.db import connection, connections

    from durable_jobs.worker import Worker

    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE durable_jobs_job, durable_jobs_event, durable_jobs_worker")
        cursor.execute("VACUUM ANALYZE durable_jobs_job")
    old = floor.connect(autocommit=not snapshot)
    if snapshot:
        old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        old.execute("SELECT count(*) FROM durable_jobs_worker")
    opened = time.monotonic()
    rates: list[float] = []
    late: list[float] = []
    worker = Worker(queues=["bench"], kinds=["bench.noop"], concurrency=8)

    def feed() -> None:
        try:
            while True:
                begun = now()
                with connection.cursor() as cursor:
                    drain.insert(cursor, jobs)
                    while waits(cursor):
                        time.sleep(0.2)
                rates.append(rate(begun, jobs)["value"])
                age = time.monotonic() - opened
                if age > held - LATE_SECONDS:
                    late.append(rates[-1])
                print(f"         {age:4.0f} s old: {rates[-1]:,.0f}", file=sys.stderr, flush=True)
                if age > held:
                    return
        finally:
            worker.stop()
            connections.close_all()

    feeder = threading.Thread(target=feed)
    feeder.start()
    code = worker.run()
    feeder.join()
    assert code == 0, code
    assert rates
    looks = empty_looks()
    old.close()
    return {"value": statistics.median(late), "rates": rates, "jobs": jobs * len(rates), **looks}


def waits(cursor: Any) -> bool:
    cursor.execute(
        """SELECT EXISTS (SELECT FROM durable_jobs_job WHERE queue_name = 'bench' AND kind = 'bench.noop'
                AND priority = 0 AND next_run_at IS NOT NULL)
            OR EXISTS (SELECT FROM durable_jobs_job WHERE status = 'running')"""
    )
    return bool(cursor.fetchone()[0])


def copy(name: str) -> dict[str, str]:
    """A database like the tests' one, with the environment that leads to it."""
    from django.db import connection

    from tests.processes import database_url

    connection.creation.clone_test_db(suffix=name, verbosity=0)
    return {"DATABASE_URL": database_url().replace("?", f"_{name}?")}


def remove(name: str) -> None:
    from django.db import connection

    connection.creation.destroy_test_db(suffix=name, verbosity=0)


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument("--others", type=int, default=OTHERS)
    parser.add_argument("--held", type=float, default=HELD, help="seconds that the snapshot is held; 0: none")
    parser.add_argument("--snapshots", type=int, default=1, help="rounds of the old snapshot")
    options = parser.parse_args()
    harness.setup()
    from django.db import connection

    if connection.vendor != "postgresql":
        print("This measures PostgreSQL; give DATABASE_URL, or use `make bench-million`.")
        return 2
    module = "benchmarks.million"
    made: list[str] = []
    with harness.databases():
        try:
            contestants = []
            for number, state in enumerate(["alone", *STATES]):
                made.append(f"m{number}")
                environment = copy(made[-1])
                if state in STATES:
                    given = {"state": state, "others": options.others}
                    seconds = harness.once(module, Contestant(state, "add", given, environment=environment))
                    print(f"{options.others:,} {state}: made in {seconds:.0f} s", file=sys.stderr, flush=True)
                contestants.append(
                    Contestant(
                        state,
                        "beside",
                        {"jobs": options.jobs},
                        environment=environment,
                        floor="alone" if state in STATES else None,
                        goal=Goal(least=0.9) if state in STATES else None,
                    )
                )
            some = harness.chosen(contestants, options.only)
            result = harness.compare(
                f"no-op jobs a second beside {options.others:,} others", module, some, rounds=options.rounds
            )
            look = partial(harness.median_of, result)
            for one in some:
                usual, slowest = look(one.name, "empty_look_ms"), look(one.name, "slowest_look_ms")
                harness.judge(
                    result, f"an empty look, {one.name} (slowest {slowest:.1f}), ms", usual, Goal(most=1)
                )
            if options.held:
                alone = result["contestants"]["alone"]["median"]
                result["under an old snapshot"] = under(result, alone, options, made)
            harness.keep("million", [result])
        finally:
            for name in made:
                remove(name)
    return 0


def under(result: dict[str, Any], alone: float, options: Any, made: list[str]) -> list[Any]:
    """The old snapshot, against the rate of a table of its own without one."""
    made.append("snapshot")
    given = {"jobs": options.jobs, "held": options.held}
    old = Contestant("old snapshot", "under_snapshot", given, environment=copy(made[-1]))
    without = replace(old, name="as long without a snapshot", arguments={**given, "snapshot": False})
    runs = [harness.once("benchmarks.million", old) for _ in range(options.snapshots)]
    control = harness.once("benchmarks.million", without)
    result["as long without a snapshot"] = control
    print(
        f"  {options.held:.0f} s without a snapshot: {control['value']:,.5g} ({control['jobs']:,} jobs ended)"
    )
    reached = statistics.median(run["value"] for run in runs)
    print(
        f"  under a snapshot held for {options.held:.0f} s: {reached:,.5g} ({runs[0]['jobs']:,} jobs ended under it)"
    )
    harness.judge(result, "under an old snapshot, × alone", reached / alone, Goal(least=0.7))
    look = statistics.median(run["empty_look_ms"] for run in runs)
    harness.judge(result, "an empty look under an old snapshot, ms", look, Goal(most=1))
    return runs


if __name__ == "__main__":
    sys.exit(main())
