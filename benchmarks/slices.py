"""`make bench-slices`: rows a second through a `BatchKind` that writes each, against the same writes in a plain loop."""

from __future__ import annotations

import sys
import time
from typing import Any

from benchmarks import harness
from benchmarks.drain import fill
from benchmarks.harness import Contestant, Goal

ROWS, BATCH = 1_000_000, 500


def loop(*, rows: int, rests: bool = False) -> dict[str, Any]:
    """Keyset pages of 500, and in one transaction with each: its writes and a cursor in a row of the project.

    `rests`: when it has held SQLite's file for most of a second it leaves it free for others, as a worker does.
    """
    from django.db import transaction
    from django.db.models import F

    from benchmarks.models import Thing
    from durable_jobs.database import BUSY_LIMIT_SECONDS, REST_SECONDS

    begun, last, done, held = time.perf_counter(), None, 0, 0.0
    cursor = Thing.objects.create()
    things = Thing.objects.order_by("pk").exclude(pk=cursor.pk)
    while True:
        if rests and held >= BUSY_LIMIT_SECONDS:
            time.sleep(REST_SECONDS)
            held = 0.0
        taken = time.perf_counter()
        with transaction.atomic():
            page = list((things if last is None else things.filter(pk__gt=last))[:BATCH])
            if not page:
                break
            Thing.objects.filter(pk__in=[thing.pk for thing in page]).update(count=F("count") + 1)
            last, done = page[-1].pk, done + len(page)
            Thing.objects.filter(pk=cursor.pk).update(count=done)
        held += time.perf_counter() - taken
    return {"value": done / (time.perf_counter() - begun), "rows": done}


def durable(*, rows: int) -> dict[str, Any]:
    """One job, with lease, fence, checkpoint and keeper."""
    from benchmarks.models import Thing
    from durable_jobs import service
    from durable_jobs.models import Job
    from durable_jobs.worker import Worker

    service.start("bench.batches")
    assert Worker(queues=["bench"], concurrency=1, until_idle=True).run() == 0
    job = Job.objects.get()
    assert job.status == "completed", job.error_message
    assert not Thing.objects.exclude(count=1).exists()
    first = job.claimed_at if job.attempts == 1 else job.started_at
    return {"value": rows / (job.finished_at - first).total_seconds(), "rows": rows}


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--rows", type=int, default=ROWS)
    options = parser.parse_args()
    harness.setup()
    from django.db import connection

    given = {"rows": options.rows}
    contestants, floor = [Contestant("plain loop", "loop", given)], "plain loop"
    if connection.vendor == "sqlite":
        resting = "plain loop that leaves the file free"
        contestants.append(Contestant(resting, "loop", {**given, "rests": True}, floor=floor))
        floor = resting
    contestants.append(
        Contestant("durable_jobs, BatchKind", "durable", given, floor=floor, goal=Goal(least=0.9))
    )
    with harness.databases():
        result = harness.compare(
            f"rows a second, {BATCH} a batch", "benchmarks.slices", contestants, rounds=options.rounds,
            prepare=lambda one: prepare(options.rows),
        )  # fmt: skip
        harness.keep("slices", [result])
    return 0


def prepare(rows: int) -> None:
    """Things without jobs."""
    from django.db import connection

    fill(0)
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                "INSERT INTO benchmarks_thing SELECT gen_random_uuid(), 'open', 0 FROM generate_series(1, %s)",
                [rows],
            )
            cursor.execute("VACUUM ANALYZE benchmarks_thing")
            cursor.execute("CHECKPOINT")
            return
        cursor.execute(
            """WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < %s)
            INSERT INTO benchmarks_thing SELECT lower(hex(randomblob(16))), 'open', 0 FROM n""",
            [rows],
        )
        cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        cursor.fetchall()


if __name__ == "__main__":
    sys.exit(main())
