"""django-tasks-db: its `db_worker`, which runs one task at a time; more at a time are more processes."""

from __future__ import annotations

import sys
from typing import Any

from django_tasks import task

from benchmarks import harness
from benchmarks.peers import clock, tables


@task()
def noop() -> None:
    pass


@task()
def note(number: int) -> None:
    clock.note(number)


def work(*, batch: bool = True) -> None:
    from django.core.management import call_command

    call_command("db_worker", batch=batch, startup_delay=False, reload=False, verbosity=0)


def drain(*, jobs: int, processes: int) -> dict[str, Any]:
    from django.db.models import Count, Max, Min
    from django_tasks_db.models import DBTaskResult

    DBTaskResult.objects.all().delete()
    for _ in range(jobs):
        noop.enqueue()
    tables.settle("django_tasks_database_dbtaskresult")
    if processes == 1:
        work()
    else:
        harness.crowd(__name__, "work", {}, processes)
    told = DBTaskResult.objects.filter(status="SUCCESSFUL").aggregate(
        jobs=Count("id"), first=Min("started_at"), last=Max("finished_at")
    )
    assert told["jobs"] == jobs, told
    return {"value": jobs / (told["last"] - told["first"]).total_seconds(), "jobs": jobs}


def pickup(*, jobs: int) -> dict[str, Any]:
    from django_tasks_db.models import DBTaskResult

    DBTaskResult.objects.all().delete()
    serving = [sys.executable, "-m", "benchmarks.harness", __name__, "work", '{"batch": false}']
    return clock.pickup(serving, lambda number: note.enqueue(number), jobs)
