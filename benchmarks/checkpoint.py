"""`make bench-checkpoint`: microseconds that it takes a step to commit where it is, against the bare update."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from benchmarks import floor, harness
from benchmarks.drain import fill
from benchmarks.harness import Contestant

TIMES = 1_000
FENCED = {
    "postgresql": """UPDATE durable_jobs_job SET checkpoint = %s, checkpoint_at = {now}, processed_count = %s, last_committed_at = {now},
        heartbeat_at = {now}, lease_expires_at = {later}, updated_at = {now}
        WHERE id = %s::uuid AND lease_epoch = %s AND status = 'running' AND lease_owner = 'floor'
            AND verdict IS NULL RETURNING cancel_requested_at""".format(**floor.PG),
    "sqlite": """UPDATE durable_jobs_job SET checkpoint = ?, checkpoint_at = {now}, processed_count = ?, last_committed_at = {now},
        heartbeat_at = {now}, lease_expires_at = {later}, updated_at = {now}
        WHERE id = ? AND lease_epoch = ? AND status = 'running' AND lease_owner = 'floor'
            AND verdict IS NULL RETURNING cancel_requested_at""".format(**floor.LITE),
}
THING = {
    "postgresql": "UPDATE benchmarks_thing SET count = count + 1 WHERE id = %s::uuid",
    "sqlite": "UPDATE benchmarks_thing SET count = count + 1 WHERE id = ?",
}


def bare(*, times: int, write: bool) -> dict[str, Any]:
    """The driver's loop: one fenced update, in autocommit or with a write of the project in a transaction."""
    from django.db import connection

    vendor = connection.vendor
    raw = floor.connect() if vendor == "postgresql" else floor.lite_connect()
    claim = floor.pg_claim(1) if vendor == "postgresql" else floor.lite_claim(1)
    begin = "BEGIN" if vendor == "postgresql" else "BEGIN IMMEDIATE"
    job, _, epoch, *_ = raw.execute(claim).fetchall()[0]
    begun = time.perf_counter()
    for number in range(times):
        if write:
            raw.execute(begin)
            raw.execute(THING[vendor], [job])
        state = json.dumps({"page": number, "seen": [number, number + 1]})
        assert raw.execute(FENCED[vendor], [state, number, job, epoch]).fetchall()
        if write:
            raw.execute("COMMIT")
    return {"value": (time.perf_counter() - begun) / times * 1e6}


def by_django(*, times: int) -> dict[str, Any]:
    """The write and the same UPDATE in one transaction as a project does it: `QuerySet.update` in `atomic()`."""
    from django.db import connection, transaction
    from django.db.models import F

    from benchmarks.models import Thing

    thing = Thing.objects.create()
    with connection.cursor() as cursor:
        cursor.execute(floor.pg_claim(1) if connection.vendor == "postgresql" else floor.lite_claim(1))
        job, _, epoch, *_ = cursor.fetchall()[0]
    fenced = FENCED[connection.vendor].replace("%", "%%").replace("%%s", "%s").replace("?", "%s")
    begun = time.perf_counter()
    for number in range(times):
        state = json.dumps({"page": number, "seen": [number, number + 1]})
        with transaction.atomic():
            Thing.objects.filter(pk=thing.pk).update(count=F("count") + 1)
            with connection.cursor() as cursor:
                cursor.execute(fenced, [state, number, job, epoch])
                assert cursor.fetchall()
    return {"value": (time.perf_counter() - begun) / times * 1e6}


def durable(*, times: int, write: bool) -> dict[str, Any]:
    """`ctx.save_checkpoint`, alone or in `ctx.fenced()` with a write; the step measures itself."""
    from benchmarks.models import Thing
    from durable_jobs import service
    from durable_jobs.models import Job
    from durable_jobs.worker import Worker

    thing = Thing.objects.create()
    service.start("bench.checkpoints", {"times": times, "write": write, "thing": str(thing.pk)})
    assert Worker(queues=["bench"], kinds=["bench.checkpoints"], concurrency=1, until_idle=True).run() == 0
    job = Job.objects.get(kind="bench.checkpoints")
    assert job.status == "completed", job.error_message
    thing.refresh_from_db()
    assert thing.count == (times if write else 0)
    return {"value": job.result}


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--times", type=int, default=TIMES)
    options = parser.parse_args()
    harness.setup()
    alone = {"times": options.times, "write": False}
    write = {"times": options.times, "write": True}
    contestants = [
        Contestant("floor: one fenced UPDATE", "bare", alone),
        Contestant("save_checkpoint()", "durable", alone, floor="floor: one fenced UPDATE"),
        Contestant("floor: a write and the UPDATE, one commit", "bare", write),
        Contestant("the same by QuerySet.update in atomic()", "by_django", {"times": options.times},
                   floor="floor: a write and the UPDATE, one commit"),
        Contestant("a write and save_checkpoint() in fenced()", "durable", write,
                   floor="floor: a write and the UPDATE, one commit"),
    ]  # fmt: skip
    with harness.databases():
        result = harness.compare(
            "a checkpoint, µs", "benchmarks.checkpoint", contestants, rounds=options.rounds,
            prepare=lambda one: fill(0 if one.function == "durable" else 1),
        )  # fmt: skip
        harness.keep("checkpoint", [result])
    return 0


if __name__ == "__main__":
    sys.exit(main())
