"""Kinds that end at once, one of them with its process; found with ``DISCOVER: ["fast_kinds"]``."""

from __future__ import annotations

import os
import signal

from durable_jobs import reconciler
from durable_jobs.kinds import Done, Kind, register
from durable_jobs.runner import SliceContext

# So that a job that is orphaned again and again is waited for no longer than a test lasts.
reconciler.FIRST_SPACING = 0.1  # type: ignore[misc]


@register
class Quick(Kind):
    name = "fast.quick"
    queue = "fast"
    lease_seconds = 1
    orphan_policy = "redrive"

    def step(self, ctx: SliceContext) -> Done:
        return Done()


@register
class Killer(Quick):
    name = "fast.killer"
    max_orphanings = 1

    def step(self, ctx: SliceContext) -> Done:
        os.kill(os.getpid(), signal.SIGKILL)
        return Done()


KINDS = (Quick, Killer)
