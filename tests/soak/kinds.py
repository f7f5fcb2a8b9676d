"""The soak's kinds: each item has an effect outside the fence, then one inside. Now and then something fails."""

from __future__ import annotations

import faulthandler
import random
import signal
from typing import Any

from django.db.models import F

from durable_jobs import database, reconciler
from durable_jobs.exceptions import TerminalError
from durable_jobs.kinds import BatchKind, Done, Kind, Retry, RetryAfter, StatusMirror, Yield, register
from durable_jobs.models import Job
from durable_jobs.runner import SliceContext
from tests.soak.breaking import break_what_is_asked
from tests.soak.models import Applied, Order, Sent

LEASE_SECONDS = 2.0
REST = 0.04
"""Seconds that an item takes beside its statements."""

TRANSIENT, TERMINAL, LATER, HOOK = 0.003, 0.001, 0.002, 0.05
"""How often an item fails, fails for good, or asks to be tried later; how often the hook of a cancel fails."""

# SIGUSR1 makes a worker write down what its threads do.
faulthandler.register(signal.SIGUSR1, all_threads=True)

# A job that is orphaned twice without a commit is not waited for longer than the soak settles.
reconciler.FIRST_SPACING = 1.0  # type: ignore[misc]


def mirror() -> StatusMirror:
    status = Order.Status
    return StatusMirror(
        "soak.Order",
        open=[status.WAITING, status.MOVING],
        redriven=status.WAITING,
        completed=status.DONE,
        failed=status.FAILED,
        cancelled=status.STOPPED,
    )


class Soaked(Kind):
    queue = "soak"
    lease_seconds = LEASE_SECONDS
    slice_seconds = 2.5
    max_slice_seconds = 20
    orphan_policy = "redrive"
    max_orphanings = 50
    retry = Retry(failures=20, first_delay=0.25, longest_delay=0.25)

    def on_cancel(self, job: Job) -> None:
        if random.random() < HOOK:
            raise ConnectionError("the hook fails this time")


class Steady(Soaked):
    """One item at a time."""

    def step(self, ctx: SliceContext) -> Done | Yield:
        number = ctx.checkpoint or 0
        while number < ctx.input["items"]:
            if ctx.should_yield():
                return Yield()
            number += 1
            send(ctx, number)
            ctx.stop.wait(REST)
            fail_sometimes()
            with ctx.fenced():
                apply(ctx, number)
                ctx.save_checkpoint(number, advance=1)
        return Done(number)


@register
class Resuming(Steady):
    name = "soak.resuming"
    mirror = mirror()


@register
class Parking(Steady):
    """Its orphans wait for the click of an operator."""

    name = "soak.parking"
    orphan_policy = "park"

    def on_transition(self, job: Job) -> int:
        """As the mirrors of the others do, by a hook of its own."""
        ended = {
            "completed": Order.Status.DONE,
            "failed": Order.Status.FAILED,
            "cancelled": Order.Status.STOPPED,
        }
        return self.open_orders(job).update(status=ended[job.status])

    def on_redrive(self, job: Job) -> int:
        orders = Order.objects.filter(pk=job.subject_id)
        return orders.exclude(status=Order.Status.DONE).update(status=Order.Status.WAITING)

    def open_orders(self, job: Job) -> Any:
        return Order.objects.filter(pk=job.subject_id, status__in=[Order.Status.WAITING, Order.Status.MOVING])


@register
class Batched(Soaked, BatchKind):
    """Three items at a time, resumed by position."""

    name = "soak.batched"
    batch_size = 3
    mirror = mirror()

    def collection(self, ctx: SliceContext) -> Any:
        return range(1, ctx.input["items"] + 1)

    def before_batch(self, ctx: SliceContext, batch: list[int]) -> None:
        for number in batch:
            send(ctx, number)
        ctx.stop.wait(REST)
        fail_sometimes()

    def process(self, ctx: SliceContext, batch: list[int]) -> None:
        for number in batch:
            apply(ctx, number)


def send(ctx: SliceContext, number: int) -> None:
    Sent.objects.create(job_id=ctx.job.id, key=ctx.effect_key(number))


def apply(ctx: SliceContext, number: int) -> None:
    Applied.objects.create(
        job_id=ctx.job.id,
        number=number,
        owner=ctx.lease.owner,
        epoch=ctx.lease.epoch,
        at=database.clock(),
    )
    Order.objects.filter(pk=ctx.job.subject_id).update(applied=F("applied") + 1, status=Order.Status.MOVING)


def fail_sometimes() -> None:
    chance = random.random()
    if chance < TRANSIENT:
        raise ConnectionError("the other side is away")
    if chance < TRANSIENT + TERMINAL:
        raise TerminalError("the other side says no")
    if chance < TRANSIENT + TERMINAL + LATER:
        raise RetryAfter(0.5)


break_what_is_asked()

KINDS = (Resuming, Resuming, Batched, Batched, Parking)
"""What arrives, by weight."""
