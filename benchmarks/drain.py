"""`make bench-drain`: how many no-op jobs a second, against the bare statements on the same table."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks import floor, harness
from benchmarks.floor import HOOKED, MIRRORED
from benchmarks.harness import Contestant, Goal

JOBS = 20_000
# As the package makes them: in the order of time, so that neighbours in time are neighbours in every index.
PG_ID = """(lpad(to_hex((extract(epoch FROM clock_timestamp()) * 1000)::bigint), 12, '0') || '7'
    || substr(md5(random()::text), 1, 3) || '8' || substr(md5(random()::text), 1, 15))::uuid"""
LITE_ID = """lower(printf('%012x', CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) + i / 20)
    || '7' || substr(hex(randomblob(2)), 1, 3) || '8' || substr(hex(randomblob(8)), 1, 15))"""
INPUT = '{"path":"a/b","rows":[1,2,3]}'


def fill(jobs: int, *, kind: str = "bench.noop", queue: str = "bench") -> None:
    """Exactly these rows, and their things, as inserts of the package would have left them."""
    from django.db import connection

    from durable_jobs.jsontext import sha256

    rest = (INPUT, sha256(INPUT))
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                "TRUNCATE durable_jobs_job, durable_jobs_event, durable_jobs_worker, benchmarks_thing"
            )
            insert(cursor, jobs, kind, queue)
            cursor.execute("INSERT INTO benchmarks_thing SELECT id, 'open', 0 FROM durable_jobs_job")
            cursor.execute("VACUUM ANALYZE durable_jobs_job")
            cursor.execute("CHECKPOINT")
            return
        for table in ("durable_jobs_job", "durable_jobs_event", "durable_jobs_worker", "benchmarks_thing"):
            cursor.execute(f"DELETE FROM {table}")
        if not jobs:
            return
        now, lite_id = floor.LITE["now"].replace("%", "%%"), LITE_ID.replace("%", "%%")
        cursor.execute(
            f"""WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < %s),
                u(u) AS MATERIALIZED (SELECT {lite_id} FROM n)
            INSERT INTO durable_jobs_job (id, kind, status, tenant_id, queue_name, input, input_sha256,
                subject_type, subject_id, created_at, updated_at, next_run_at, pending_since)
            SELECT u, %s, 'pending', 'default', %s, %s, %s, 'benchmarks.thing', u, {now}, {now}, {now}, {now}
            FROM u""",
            [jobs, kind, queue, *rest],
        )
        cursor.execute("INSERT INTO benchmarks_thing SELECT id, 'open', 0 FROM durable_jobs_job")
        cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        cursor.fetchall()


def insert(cursor: Any, jobs: int, kind: str = "bench.noop", queue: str = "bench") -> None:
    """So many more that are due now (PostgreSQL)."""
    from durable_jobs.jsontext import sha256

    cursor.execute(
        f"""INSERT INTO durable_jobs_job (id, kind, status, tenant_id, queue_name, input, input_sha256,
            subject_type, subject_id, created_at, updated_at, next_run_at, pending_since)
        SELECT u, %s, 'pending', 'default', %s, %s, %s, 'benchmarks.thing', u::text,
            clock_timestamp(), clock_timestamp(), clock_timestamp(), clock_timestamp()
        FROM (SELECT {PG_ID} u FROM generate_series(1, %s)) s""",
        [kind, queue, INPUT, sha256(INPUT), jobs],
    )


def durable(*, concurrency: int, processes: int = 1, kind: str = "bench.noop") -> dict[str, Any]:
    """Workers until they are idle; the database's own times say how long it took."""
    with harness.Busy() as busy:
        if processes == 1:
            used = [worker(concurrency=concurrency)]
        else:
            used = harness.crowd("benchmarks.drain", "worker", {"concurrency": concurrency}, processes)
    told = rate()
    share = busy.share(told.pop("first"), told.pop("last"))
    return {**told, "cpu_us_per_job": sum(used) / told["jobs"] * 1e6, "busy": share}


def worker(*, concurrency: int) -> float:
    """The seconds of the processor that a worker takes until it is idle."""
    from durable_jobs.worker import Worker

    processor = time.process_time()
    code = Worker(queues=["bench"], concurrency=concurrency, until_idle=True).run()
    assert code == 0, code
    return time.process_time() - processor


def rate() -> dict[str, Any]:
    """Jobs a second from the first claim to the last end."""
    from django.db.models import Count, Max, Min

    from durable_jobs.models import Job

    told = Job.objects.filter(status="completed").aggregate(
        jobs=Count("id"), first=Min("claimed_at"), last=Max("finished_at")
    )
    assert not Job.objects.exclude(status="completed").exists()
    seconds = (told["last"] - told["first"]).total_seconds()
    first, last = told["first"].timestamp(), told["last"].timestamp()
    return {"value": told["jobs"] / seconds, "jobs": told["jobs"], "first": first, "last": last}


def contestants(vendor: str) -> list[Contestant]:
    if vendor == "sqlite":
        return [
            Contestant("floor: claim 1, complete 1", "lite", {"batch": 1, "end": "one"}, size=0.25),
            Contestant("floor: complete + claim in one", "lite", {"batch": 1, "end": "many"}, size=0.4),
            Contestant("floor: claim 50, complete one by one", "lite", {"batch": 50, "end": "one"}, size=0.4),
            Contestant("floor: one thread, batches of 50", "lite", {"batch": 50, "end": "many"}),
            Contestant("floor: 8 threads, one writer, batches of 50", "lite_with_writer", {"threads": 8}),
            Contestant("durable_jobs, concurrency 1", "durable", {"concurrency": 1},
                       floor="floor: claim 50, complete one by one", goal=Goal(least=0.7)),
            Contestant("durable_jobs, concurrency 8", "durable", {"concurrency": 8},
                       floor="floor: 8 threads, one writer, batches of 50", goal=Goal(least=8000, absolute=True)),
            Contestant("durable_jobs, 2 processes of 8", "durable", {"concurrency": 8, "processes": 2},
                       floor="durable_jobs, concurrency 8"),
        ]  # fmt: skip
    return [
        Contestant("floor: claim 1, complete 1", "bare", {"threads": 1, "batch": 1, "end": "one"}, size=0.2),
        Contestant("floor: complete + claim in one", "bare_in_one", size=0.25),
        Contestant("floor: claim 50, complete one by one", "bare", {"threads": 1, "batch": 50, "end": "one"}, size=0.3),
        Contestant("floor: 8 threads, complete one by one", "bare", {"threads": 8, "batch": 50, "end": "one"}, size=0.5),
        Contestant("floor: 8 threads, completions batched", "bare", {"threads": 8, "batch": 50, "end": "many"}),
        Contestant("floor: 2 processes of 8 threads, batched", "bare_crowd",
                   {"processes": 2, "threads": 8, "batch": 50, "end": "many"},
                   floor="floor: 8 threads, completions batched"),
        Contestant("durable_jobs, concurrency 1", "durable", {"concurrency": 1},
                   floor="floor: claim 50, complete one by one", goal=Goal(least=0.8)),
        Contestant("durable_jobs, concurrency 8", "durable", {"concurrency": 8},
                   floor="floor: 8 threads, completions batched", goal=Goal(least=0.5)),
        Contestant("durable_jobs, 2 processes of 8", "durable", {"concurrency": 8, "processes": 2},
                   floor="durable_jobs, concurrency 8"),
    ]  # fmt: skip


def hooked(vendor: str) -> list[Contestant]:
    """Kinds with a hook: the project's row changes in the transaction of the end."""
    bare, extra = ("lite", {}) if vendor == "sqlite" else ("bare", {"threads": 8})
    goal = None if vendor == "sqlite" else Goal(least=0.6)
    by_django = Contestant(
        "floor: hooks by QuerySet.update, one transaction each", bare, {**extra, "batch": 50, "end": "updated"},
        floor="floor: hooks, one transaction each", size=0.4,
    )  # fmt: skip
    return [
        Contestant("floor: hooks, one transaction each", bare, {**extra, "batch": 50, "end": "hooked"}, size=0.4),
        *([by_django] if vendor == "postgresql" else []),
        Contestant("durable_jobs, hooks, concurrency 1", "durable",
                   {"concurrency": 1, "kind": HOOKED}, floor="floor: hooks, one transaction each", size=0.2),
        Contestant("durable_jobs, hooks, concurrency 8", "durable",
                   {"concurrency": 8, "kind": HOOKED}, floor="floor: hooks, one transaction each", goal=goal,
                   size=0.4),
    ]  # fmt: skip


def mirrored(vendor: str) -> list[Contestant]:
    """The same by a `StatusMirror`."""
    return [
        replace(one, name=one.name.replace("hooks", "mirror"), floor=one.floor and one.floor.replace("hooks", "mirror"),
                arguments={**one.arguments, **({"end": "mirrored"} if one.floor is None else {"kind": MIRRORED})})
        for one in hooked(vendor)
        if one.arguments.get("end") != "updated"
    ]  # fmt: skip


bare, bare_in_one, bare_crowd = floor.postgresql, floor.postgresql_in_one, floor.postgresql_crowd
lite, lite_with_writer = floor.sqlite, floor.sqlite_with_writer


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
            ("no-op jobs with on_transition, a second", hooked(vendor), HOOKED),
            ("no-op jobs with a StatusMirror, a second", mirrored(vendor), MIRRORED),
        ):
            some = harness.chosen(those, options.only)
            if some:
                prepare = partial(filled, options.jobs, kind)
                result = harness.compare(
                    title, "benchmarks.drain", some, rounds=options.rounds, prepare=prepare
                )
                results.append(result)
                saturation(vendor, result)
        if not options.only:
            harness.keep("drain", results)
    return 0


def filled(jobs: int, kind: str, one: Contestant) -> None:
    fill(int(jobs * one.size), kind=kind)


def saturation(vendor: str, result: dict[str, Any]) -> None:
    """Two processes are to bring 1.6 times one, unless one already leaves no processor."""
    two = result["contestants"].get("durable_jobs, 2 processes of 8")
    if vendor == "sqlite" or two is None:
        return
    busy = harness.median_of(result, "durable_jobs, 2 processes of 8", "busy")
    what = f"2 processes × one, or the machine saturated (its processors are {busy:.0%} busy)"
    harness.judge(result, what, two["ratio"], Goal(least=1.6), otherwise=busy >= 0.95)


if __name__ == "__main__":
    sys.exit(main())
