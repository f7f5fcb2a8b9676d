"""The kinds that the benchmarks run."""

from __future__ import annotations

import time
from typing import Any

from django.db.models import F

from benchmarks.models import Thing
from durable_jobs.kinds import BatchKind, Done, Kind, StatusMirror, register


@register
class Noop(Kind):
    """Nothing: what is left is the engine."""

    name = "bench.noop"
    queue = "bench"
    orphan_policy = "redrive"

    def step(self, ctx: Any) -> Done:
        return Done()


@register
class Mirrored(Kind):
    """Nothing, and the project's row changes with the job's end."""

    name = "bench.mirrored"
    queue = "bench"
    orphan_policy = "redrive"
    mirror = StatusMirror(
        "benchmarks.Thing",
        open=("open",),
        redriven="open",
        completed="done",
        failed="failed",
        cancelled="off",
    )

    def step(self, ctx: Any) -> Done:
        return Done()


@register
class Hooked(Noop):
    """The same by a hook of the kind's own."""

    name = "bench.hooked"

    def on_transition(self, job: Any) -> int:
        return Thing.objects.filter(pk=job.subject_id, status="open").update(status="done")

    def on_redrive(self, job: Any) -> int:
        return Thing.objects.filter(pk=job.subject_id, status="done").update(status="open")


@register
class Parking(Noop):
    """The same under the policy that allows no claim ahead."""

    name = "bench.parking"
    orphan_policy = "park"


@register
class Clock(Noop):
    """Tells when it began."""

    name = "bench.clock"

    def step(self, ctx: Any) -> Done:
        return Done(time.time())


@register
class Batches(BatchKind):
    """Writes every thing once."""

    name = "bench.batches"
    queue = "bench"
    batch_size = 500

    def collection(self, ctx: Any) -> Any:
        return Thing.objects.order_by("pk")

    def process(self, ctx: Any, batch: Any) -> None:
        Thing.objects.filter(pk__in=[thing.pk for thing in batch]).update(count=F("count") + 1)
