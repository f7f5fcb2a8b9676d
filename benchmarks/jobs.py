"""The kinds that the benchmarks run."""

from __future__ import annotations

import os
import time
from typing import Any

from django.db.models import F

from benchmarks.models import Thing
from durable_jobs.kinds import BatchKind, Done, Kind, StatusMirror, Yield, register


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


@register
class Checkpoints(Noop):
    """Commits where it is, again and again; its result is what that took, in microseconds each."""

    name = "bench.checkpoints"

    def step(self, ctx: Any) -> Done:
        begun = time.perf_counter()
        for number in range(ctx.input["times"]):
            state = {"page": number, "seen": [number, number + 1]}
            if ctx.input["write"]:
                with ctx.fenced():
                    Thing.objects.filter(pk=ctx.input["thing"]).update(count=F("count") + 1)
                    ctx.save_checkpoint(state, processed=number)
            else:
                ctx.save_checkpoint(state, processed=number)
        return Done((time.perf_counter() - begun) / ctx.input["times"] * 1e6)


@register
class Patient(Noop):
    """Does nothing until it is asked to stop, and asks each 5 ms."""

    name = "bench.patient"

    def step(self, ctx: Any) -> Yield:
        ctx.save_checkpoint({})
        while not ctx.should_yield():
            time.sleep(0.005)
        return Yield()


@register
class Redone(BatchKind):
    """Writes every thing, slowly, and notes which batches it begins."""

    name = "bench.redone"
    queue = "bench"
    batch_size = 100
    lease_seconds = float(os.environ.get("BENCH_LEASE_SECONDS", "60"))

    def collection(self, ctx: Any) -> Any:
        return Thing.objects.order_by("pk")

    def process(self, ctx: Any, batch: Any) -> None:
        with open(os.environ["BENCH_BEGUN"], "a") as log:
            log.write(f"{os.getpid()} {len(batch)}\n")
        time.sleep(0.01)
        Thing.objects.filter(pk__in=[thing.pk for thing in batch]).update(count=F("count") + 1)
