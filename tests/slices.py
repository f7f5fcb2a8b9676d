"""Kinds for one test, slices run by hand, and leases taken away: the acts of tests about running jobs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connection

from durable_jobs import kinds, runner, service, store
from durable_jobs.kinds import Done, Kind, Retry
from durable_jobs.models import Job, JobEvent
from durable_jobs.runner import SliceResult

OWNER = "worker:one"
THIEF = "worker:two"
AT_ONCE = Retry(failures=3, first_delay=0, longest_delay=0)


@contextmanager
def own_registry() -> Iterator[None]:
    """A registry of the test's own, which ends with the block."""
    before = dict(kinds._kinds)
    try:
        yield
    finally:
        kinds._kinds.clear()
        kinds._kinds.update(before)


def made(step: Any = None, *, name: str = "tests.made", **attributes: Any) -> type[Kind]:
    """Register a kind whose step is `step(ctx)`, perhaps async (default: done at once)."""
    act: Callable[[Any], Any] = step or (lambda ctx: Done())
    if inspect.iscoroutinefunction(act):

        async def method(self: Kind, ctx: Any) -> Any:
            return await act(ctx)

    else:

        def method(self: Kind, ctx: Any) -> Any:
            return act(ctx)

    attributes = {"retry": AT_ONCE, "name": name, "__module__": __name__, **attributes}
    return kinds.register(type("Made", (Kind,), {**attributes, "step": method}))


def start(kind: type[Kind], input: Any = None, **options: Any) -> Job:
    return service.start(kind, input, **options).job


def claim(job: Job, owner: str = OWNER, ttl: float = 60.0) -> Job:
    """Claim the job as it now is, whenever it is due."""
    current = row(job)
    claimed = store.claim(current.id, current.continuation_seq, current.redrives, owner, ttl)
    assert isinstance(claimed, Job), f"{current.status} job was not claimed: {claimed}"
    return claimed


def run_slice(job: Job, *, owner: str = OWNER, **options: Any) -> SliceResult:
    """Claim the job and run one slice of it."""
    return runner.run_slice(claim(job, owner), owner=owner, **options)


def row(job: Job) -> Job:
    """The job as it now is."""
    current = store.get(job.id)
    assert current is not None
    return current


def columns(job: Job, *without: str) -> dict[str, Any]:
    """Every column of the job as it now is."""
    current = row(job)
    return {
        f.attname: getattr(current, f.attname) for f in Job._meta.concrete_fields if f.attname not in without
    }


def change(job: Job, **values: Any) -> None:
    """Put values on the row behind everybody's back."""
    assert Job._base_manager.filter(pk=job.pk).update(**values) == 1


def events(job: Job) -> list[str]:
    return list(JobEvent.objects.filter(job_id=job.pk).order_by("id").values_list("event", flat=True))


def steal(job: Job, owner: str = OWNER) -> None:
    """Repair the job's lease as a supervisor does, and claim it for another worker."""
    [orphan] = [orphan for orphan in store.dead_leases(owner) if orphan.id == job.pk]
    assert store.take_orphan(orphan, grace=0, delay=0, dead=True) is not None
    claim(job, THIEF)


def on_postgresql() -> bool:
    return bool(connection.vendor == "postgresql")
