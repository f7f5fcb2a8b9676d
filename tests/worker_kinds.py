"""Kinds for the tests of the worker; processes find them with ``DISCOVER: ["worker_kinds"]``."""

from __future__ import annotations

import contextvars
import os
import sys
import time
from typing import Any

from django.db import connection, transaction
from django.utils import timezone, translation

from durable_jobs.kinds import Done, Kind, Retry, Yield, register
from durable_jobs.runner import SliceContext

leftover: contextvars.ContextVar[str] = contextvars.ContextVar("leftover", default="none")


class WorkerKind(Kind):
    lease_seconds = 1
    slice_seconds = 30
    orphan_policy = "redrive"
    queue = "worker"
    retry = Retry(failures=3, first_delay=0.1, longest_delay=0.1)


@register
class Quick(WorkerKind):
    """Tells that it ran."""

    name = "worker.quick"

    def step(self, ctx: SliceContext) -> Done:
        ctx.record("ran", data={"pid": os.getpid()})
        return Done(ctx.input)


@register
class Nap(WorkerKind):
    """Sleeps for `input` seconds and looks at nothing."""

    name = "worker.nap"

    def step(self, ctx: SliceContext) -> Done:
        ctx.record("ran")
        time.sleep(ctx.input)
        return Done()


@register
class Patient(WorkerKind):
    """Works for `input` seconds in small commits and yields when it is asked to."""

    name = "worker.patient"

    def step(self, ctx: SliceContext) -> Done | Yield:
        done = ctx.checkpoint or 0
        ctx.record("ran", data={"from": done})
        while done < ctx.input * 50:
            if ctx.should_yield():
                return Yield()
            ctx.stop.wait(0.02)
            done += 1
            ctx.save_checkpoint(done)
        return Done(done)


@register
class Hang(WorkerKind):
    """Never comes back."""

    name = "worker.hang"
    slice_seconds = 0.5
    max_slice_seconds = 1
    max_orphanings = 0

    def step(self, ctx: SliceContext) -> Done:
        ctx.record("ran")
        while True:
            time.sleep(60)


@register
class Leave(WorkerKind):
    """Tries to end the process: `input` is "exit", "base" or "thread"."""

    name = "worker.leave"

    def step(self, ctx: SliceContext) -> Done:
        if ctx.job.consecutive_failures:
            return Done("again")
        if ctx.input == "exit":
            sys.exit(3)
        raise Anything("anything")


class Anything(BaseException):
    pass


@register
class Litter(WorkerKind):
    """Leaves everything behind that a step can leave behind."""

    name = "worker.litter"

    def step(self, ctx: SliceContext) -> Done:
        translation.activate("de")
        timezone.activate("Asia/Tokyo")
        leftover.set("litter")
        if ctx.input == "atomic":
            transaction.atomic().__enter__()
        elif ctx.input == "autocommit":
            connection.set_autocommit(False)
            with connection.cursor() as cursor:
                cursor.execute("SELECT 1")
        elif ctx.input == "raw":
            with connection.cursor() as cursor:
                cursor.execute("BEGIN")
        return Done(state())


@register
class Tidy(WorkerKind):
    """Tells in what state it finds its thread."""

    name = "worker.tidy"

    def step(self, ctx: SliceContext) -> Done:
        return Done(state())


def state() -> dict[str, Any]:
    return {
        "language": translation.get_language(),
        "zone": timezone.get_current_timezone_name(),
        "variable": leftover.get(),
        "atomic": connection.in_atomic_block,
        "autocommit": connection.get_autocommit(),
    }


KINDS = (Quick, Nap, Patient, Hang, Leave, Litter, Tidy)
