"""A kind that appends a line for each step, so that a step done twice or left out is seen afterwards."""

from __future__ import annotations

import os
import time

from django.db.models import QuerySet

from durable_jobs.kinds import Done, Kind, Yield, register
from durable_jobs.models import Job
from durable_jobs.runner import SliceContext
from tests.models import Parcel

SECONDS_IN_FENCE = 0.02
SECONDS_BETWEEN = 0.03


@register
class Ledger(Kind):
    """Writes `input` lines, each in a fence with its checkpoint; the line tells the process and the epoch."""

    name = "brokers.ledger"
    queue = "ledger"
    lease_seconds = 1
    slice_seconds = 30
    max_slice_seconds = 60
    orphan_policy = "redrive"
    max_orphanings = 20

    def step(self, ctx: SliceContext) -> Done | Yield:
        done = ctx.checkpoint or 0
        while done < ctx.input:
            if ctx.should_yield():
                return Yield()
            with ctx.fenced():
                # No unique key: a second line must be possible to be seen.
                Parcel.objects.create(label=f"{ctx.job.id}:{done}", rank=os.getpid(), done=ctx.lease.epoch)
                time.sleep(SECONDS_IN_FENCE)
                done += 1
                ctx.save_checkpoint(done)
            ctx.stop.wait(SECONDS_BETWEEN)
        return Done(done)


def lines(job: Job) -> list[int]:
    """The numbers of the job's lines, in order; once each is right."""
    return sorted(int(label.rpartition(":")[2]) for label in _written(job).values_list("label", flat=True))


def writers(job: Job) -> list[int]:
    """The processes that wrote the job's lines, in the order of the lines."""
    return list(_written(job).exclude(rank=None).values_list("rank", flat=True))


def epochs(job: Job) -> list[int]:
    """The epochs under which the job's lines were written, in the order of the lines."""
    return list(_written(job).values_list("done", flat=True))


def _written(job: Job) -> QuerySet[Parcel]:
    return Parcel.objects.filter(label__startswith=f"{job.id}:").order_by("id")
