"""What the tables say about an import whose worker was killed."""

from __future__ import annotations

from dataclasses import dataclass

from django.db.models import Count

from durable_jobs.models import Job, JobEvent
from project.demo import airports
from project.demo.airports import FIELDS
from project.demo.models import ImportBatch, ImportedRow, ImportRun


@dataclass(frozen=True)
class Finding:
    """One line of the account: what was looked at, what was found, and whether it is as promised."""

    what: str
    found: str
    holds: bool


def examine(run: ImportRun, job: Job, *, limit: int | None = None) -> list[Finding]:
    """Compare the tables with the data set (its first `limit` airports), and the run with its job.

    Promised is: everything there as in the data set, each row applied exactly once, the job completed after
    one resumption under a second lease, and the run's own row in agreement.
    """
    return [
        _rows_imported(run, limit),
        _rows_skipped(run, job, limit),
        _rows_repeated(run),
        _batches_repeated(run),
        _times_resumed(run, job),
        _job(job),
        _run(run, job),
    ]


def _expected(limit: int | None) -> dict[str, dict[str, object]]:
    rows = airports.world()[:limit]
    return {row["icao"]: {FIELDS[name]: value for name, value in row.items()} for row in rows}


def _rows_imported(run: ImportRun, limit: int | None) -> Finding:
    expected = _expected(limit)
    stored = {row["icao"]: row for row in run.airports.values(*FIELDS.values())}
    equal = sum(stored.get(icao) == row for icao, row in expected.items())
    holds = stored == expected
    found = f"{equal:,} of {len(expected):,}"
    if len(stored) > equal:
        found += f", and {len(stored) - equal:,} that are not in the data set"
    return Finding("rows imported, equal to the data set", found, holds)


def _rows_skipped(run: ImportRun, job: Job, limit: int | None) -> Finding:
    applied = set(ImportedRow.objects.filter(batch__run=run).values_list("icao", flat=True))
    never = len(_expected(limit).keys() - applied)
    recorded = JobEvent.objects.filter(job=job.pk, event="item_skipped").count()
    return Finding("rows skipped", f"{never + recorded:,}", never + recorded == 0)


def _rows_repeated(run: ImportRun) -> Finding:
    times = ImportedRow.objects.filter(batch__run=run).values("icao").annotate(times=Count("pk"))
    repeated = times.filter(times__gt=1).count()
    return Finding("rows applied twice", f"{repeated:,}", repeated == 0)


def _batches_repeated(run: ImportRun) -> Finding:
    counted = run.batches.aggregate(all=Count("pk"), different=Count("first", distinct=True))
    repeated = counted["all"] - counted["different"]
    return Finding("batches repeated", f"{repeated:,}", repeated == 0 and counted["all"] > 0)


def _times_resumed(run: ImportRun, job: Job) -> Finding:
    leases = list(
        ImportBatch.objects.filter(run=run)
        .values_list("lease_epoch")
        .annotate(Count("pk"))
        .order_by("lease_epoch")
    )
    batches = " + ".join(f"{batches:,}" for _, batches in leases) or "no"
    found = f"{job.redrives} ({batches} batches)"
    return Finding("times resumed", found, job.redrives == 1 and len(leases) == 2)


def _job(job: Job) -> Finding:
    found = f"{job.status}, {job.processed_count:,} of {job.total_count or 0:,}"
    holds = job.status == "completed" and job.processed_count == job.total_count and job.lease_owner is None
    return Finding("the job", found, holds)


def _run(run: ImportRun, job: Job) -> Finding:
    run.refresh_from_db()
    holds = run.status == ImportRun.Status.DONE and run.rows_done == job.processed_count
    return Finding("the import’s own row", f"{run.status}, {run.rows_done:,} rows", holds)
