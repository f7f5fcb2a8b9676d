"""`make bench-drain`: how many no-op jobs a second, against the bare statements on the same table."""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

from benchmarks import floor, harness
from benchmarks.harness import Contestant

JOBS = 20_000
INPUT = '{"path":"a/b","rows":[1,2,3]}'


def fill(jobs: int, *, kind: str = "bench.noop", queue: str = "bench", status: str = "pending") -> None:
    """Exactly these rows, and their things, as inserts of the package would have left them."""
    from django.db import connection

    from durable_jobs.jsontext import sha256

    rest = (INPUT, sha256(INPUT))
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                "TRUNCATE durable_jobs_job, durable_jobs_event, durable_jobs_worker, benchmarks_thing"
            )
            cursor.execute(
                """INSERT INTO durable_jobs_job (id, kind, status, tenant_id, queue_name, input, input_sha256,
                    subject_type, subject_id, created_at, updated_at, next_run_at, pending_since)
                SELECT u, %s, 'pending', 'default', %s, %s, %s, 'benchmarks.thing', u::text,
                    clock_timestamp(), clock_timestamp(), clock_timestamp(), clock_timestamp()
                FROM (SELECT gen_random_uuid() u FROM generate_series(1, %s)) s""",
                [kind, queue, *rest, jobs],
            )
            cursor.execute("INSERT INTO benchmarks_thing SELECT id, 'open', 0 FROM durable_jobs_job")
            cursor.execute("VACUUM ANALYZE durable_jobs_job")
            cursor.execute("CHECKPOINT")
            return
        for table in ("durable_jobs_job", "durable_jobs_event", "durable_jobs_worker", "benchmarks_thing"):
            cursor.execute(f"DELETE FROM {table}")
        now = floor.LITE["now"].replace("%", "%%")
        cursor.execute(
            f"""WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < %s),
                u(u) AS MATERIALIZED (SELECT lower(hex(randomblob(16))) FROM n)
            INSERT INTO durable_jobs_job (id, kind, status, tenant_id, queue_name, input, input_sha256,
                subject_type, subject_id, created_at, updated_at, next_run_at, pending_since)
            SELECT u, %s, 'pending', 'default', %s, %s, %s, 'benchmarks.thing', u, {now}, {now}, {now}, {now}
            FROM u""",
            [jobs, kind, queue, *rest],
        )
        cursor.execute("INSERT INTO benchmarks_thing SELECT id, 'open', 0 FROM durable_jobs_job")
        cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        cursor.fetchall()


def durable(*, concurrency: int, processes: int = 1, kind: str = "bench.noop") -> dict[str, Any]:
    """A worker until it is idle; the database's own times say how long it took."""
    from django.db import connection

    from durable_jobs.models import Job
    from durable_jobs.worker import Worker

    Job.objects.filter(kind=kind).exists()
    connection.close()
    processor = time.process_time()
    code = Worker(queues=["bench"], concurrency=concurrency, until_idle=True).run()
    used = time.process_time() - processor
    assert code == 0, code
    return {**rate(), "cpu_us_per_job": used / rate()["jobs"] * 1e6}


def rate() -> dict[str, Any]:
    """Jobs a second from the first claim to the last end."""
    from django.db.models import Count, Max, Min

    from durable_jobs.models import Job

    told = Job.objects.filter(status="completed").aggregate(
        jobs=Count("id"), first=Min("claimed_at"), last=Max("finished_at")
    )
    assert not Job.objects.exclude(status="completed").exists()
    seconds = (told["last"] - told["first"]).total_seconds()
    return {"value": told["jobs"] / seconds, "jobs": told["jobs"]}


def contestants(vendor: str) -> list[Contestant]:
    if vendor == "sqlite":
        return [
            Contestant("floor: claim 1, complete 1", "lite", {"batch": 1, "end": "one"}),
            Contestant("floor: claim 50, complete one by one", "lite", {"batch": 50, "end": "one"}),
            Contestant("floor: one writer, batches of 50", "lite", {"batch": 50, "end": "many"}),
            Contestant("durable_jobs, concurrency 1", "durable", {"concurrency": 1},
                       floor="floor: claim 50, complete one by one"),
            Contestant("durable_jobs, concurrency 8", "durable", {"concurrency": 8},
                       floor="floor: one writer, batches of 50"),
        ]  # fmt: skip
    return [
        Contestant("floor: claim 1, complete 1", "bare", {"threads": 1, "batch": 1, "end": "one"}),
        Contestant("floor: complete + claim in one", "bare_in_one"),
        Contestant("floor: claim 50, complete one by one", "bare", {"threads": 1, "batch": 50, "end": "one"}),
        Contestant("floor: 8 threads, complete one by one", "bare", {"threads": 8, "batch": 50, "end": "one"}),
        Contestant("floor: 8 threads, completions batched", "bare", {"threads": 8, "batch": 50, "end": "many"}),
        Contestant("durable_jobs, concurrency 1", "durable", {"concurrency": 1},
                   floor="floor: claim 50, complete one by one"),
        Contestant("durable_jobs, concurrency 8", "durable", {"concurrency": 8},
                   floor="floor: 8 threads, completions batched"),
    ]  # fmt: skip


def mirrored(vendor: str) -> list[Contestant]:
    """Kinds with a hook: the project's row changes in the transaction of the end."""
    bare, extra = ("lite", {}) if vendor == "sqlite" else ("bare", {"threads": 8})
    return [
        Contestant("floor: hooks, one transaction each", bare, {**extra, "batch": 50, "end": "mirrored"}),
        Contestant("durable_jobs, hooks, concurrency 8", "durable",
                   {"concurrency": 8, "kind": "bench.mirrored"}, floor="floor: hooks, one transaction each"),
    ]  # fmt: skip


bare, bare_in_one, lite = floor.postgresql, floor.postgresql_in_one, floor.sqlite


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--jobs", type=int, default=JOBS)
    options = parser.parse_args()
    harness.setup()
    from django.db import connection

    with harness.databases():
        results = []
        vendor = connection.vendor
        for title, those, kind in (
            ("no-op jobs a second", contestants(vendor), "bench.noop"),
            ("no-op jobs with a hook, a second", mirrored(vendor), "bench.mirrored"),
        ):
            some = harness.chosen(those, options.only)
            if some:
                prepare = partial(fill, options.jobs, kind=kind)
                results.append(
                    harness.compare(title, "benchmarks.drain", some, rounds=options.rounds, prepare=prepare)
                )
        if not options.only:
            harness.keep("drain", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
