"""Kinds for the tests of operation; processes find them with ``DISCOVER: ["operate.kinds"]``."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

from durable_jobs import reconciler
from durable_jobs.exceptions import TerminalError
from durable_jobs.kinds import Done, Kind, Retry, StatusMirror, Yield, register
from durable_jobs.runner import SliceContext
from tests.models import Parcel, Shipment

TRAP = "OPERATE_TRAP"
"""Names a file; while it is there, a supervised process does on import what it says."""


LEASE = "OPERATE_LEASE"
"""Seconds of the quiet kind's lease."""

SPACING = "OPERATE_SPACING"
"""Seconds between the first tries at a job that is orphaned without a commit."""


def fall_into_the_trap() -> None:
    trap = Path(os.environ.get(TRAP, "/nonexistent"))
    if "DURABLE_JOBS_SUPERVISED" not in os.environ or not trap.exists():
        return
    if trap.read_text() == "hang":
        time.sleep(600)
    raise ImportError("a module that is not there")


fall_into_the_trap()

# So that a job that is orphaned again and again is waited for no longer than a test lasts.
reconciler.FIRST_SPACING = float(os.environ.get(SPACING, reconciler.FIRST_SPACING))  # type: ignore[misc]


class OperateKind(Kind):
    queue = "operate"
    lease_seconds = 1
    slice_seconds = 30
    orphan_policy = "redrive"
    retry = Retry(failures=3, first_delay=0.1, longest_delay=0.1)


@register
class Quick(OperateKind):
    """Tells that it ran."""

    name = "operate.quick"

    def step(self, ctx: SliceContext) -> Done:
        ctx.record("ran", data={"pid": os.getpid()})
        return Done()


@register
class Patient(OperateKind):
    """Works for `input` seconds in commits of 20 ms, and yields when it is asked to."""

    name = "operate.patient"

    def step(self, ctx: SliceContext) -> Done | Yield:
        done = ctx.checkpoint or 0
        ctx.record("ran", data={"pid": os.getpid(), "from": done})
        while done < ctx.input * 50:
            if ctx.should_yield():
                return Yield()
            ctx.stop.wait(0.02)
            done += 1
            ctx.save_checkpoint(done)
        return Done(done)


@register
class Lasting(Patient):
    """The same under the lease that kinds have by default."""

    name = "operate.lasting"
    lease_seconds = 60


@register
class Quiet(OperateKind):
    """Waits for `input` seconds without a statement, and commits once at the end."""

    name = "operate.quiet"
    lease_seconds = float(os.environ.get(LEASE, 1))
    orphan_policy = "park"

    def step(self, ctx: SliceContext) -> Done | Yield:
        ctx.record("ran", data={"pid": os.getpid()})
        deadline = time.monotonic() + ctx.input
        while time.monotonic() < deadline:
            if ctx.stop.wait(0.1):
                return Yield()
        return Done()


@register
class Nap(OperateKind):
    """Sleeps for `input` seconds and looks at nothing."""

    name = "operate.nap"

    def step(self, ctx: SliceContext) -> Done:
        ctx.record("ran", data={"pid": os.getpid()})
        time.sleep(ctx.input)
        return Done()


@register
class Fragile(Patient):
    """The same as patient, but its first failure is its last."""

    name = "operate.fragile"
    retry = Retry(failures=1)


@register
class Fenced(OperateKind):
    """Stands inside a fence for `input` seconds, and says so."""

    name = "operate.fenced"

    def step(self, ctx: SliceContext) -> Done:
        with ctx.fenced():
            print("inside", flush=True)
            time.sleep(ctx.input)
            ctx.save_checkpoint(1)
        return Done()


@register
class Deaf(OperateKind):
    """Sleeps for `input` seconds in C and keeps the interpreter: no other thread of its process runs."""

    name = "operate.deaf"
    lease_seconds = 60

    def step(self, ctx: SliceContext) -> Done:
        ctx.record("ran", data={"pid": os.getpid()})
        ctypes.PyDLL(None).sleep(ctx.input)
        return Done()


@register
class Fatal(OperateKind):
    """Ends its own process, in turn by SIGKILL and by leaving."""

    name = "operate.fatal"
    max_orphanings = 2

    def step(self, ctx: SliceContext) -> Done:
        ctx.record("ran", data={"pid": os.getpid()})
        if ctx.job.redrives % 2:
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
        return Done()


@register
class Hang(OperateKind):
    """Never comes back."""

    name = "operate.hang"
    slice_seconds = 0.5
    max_slice_seconds = 1
    orphan_policy = "park"

    def step(self, ctx: SliceContext) -> Done:
        ctx.record("ran", data={"pid": os.getpid()})
        while True:
            time.sleep(60)


@register
class Ship(OperateKind):
    """Moves its shipment's parcel `input` times, each in a fence, and keeps the shipment in step."""

    name = "operate.ship"
    mirror = StatusMirror(
        "tests.Shipment",
        open=[Shipment.Status.QUEUED, Shipment.Status.MOVING],
        redriven=Shipment.Status.QUEUED,
        completed=Shipment.Status.ARRIVED,
        failed=Shipment.Status.LOST,
        cancelled=Shipment.Status.STOPPED,
    )

    def step(self, ctx: SliceContext) -> Done | Yield:
        moved = ctx.checkpoint or 0
        while moved < ctx.input:
            with ctx.fenced():
                move(ctx.job.subject_id)
                ctx.save_checkpoint(moved + 1)
            moved += 1
            if moved % 2 == 0 and moved < ctx.input:
                return Yield()
        return Done(moved)


@register
class Sink(Ship):
    """Moves its shipment's parcel once and fails for good."""

    name = "operate.sink"

    def step(self, ctx: SliceContext) -> Done | Yield:
        if not ctx.checkpoint:
            with ctx.fenced():
                move(ctx.job.subject_id)
                ctx.save_checkpoint(1)
        raise TerminalError("it leaks")


def move(shipment: str | None) -> None:
    """One more move of the shipment, seen by everybody at the commit."""
    Shipment.objects.filter(pk=shipment).exclude(status=Shipment.Status.ARRIVED).update(
        status=Shipment.Status.MOVING
    )
    parcel, _ = Parcel.objects.get_or_create(label=f"shipment {shipment}")
    parcel.done += 1
    parcel.save()


KINDS = (Quick, Patient, Lasting, Quiet, Nap, Fragile, Fenced, Deaf, Fatal, Hang, Ship, Sink)
