"""Kinds that end at once, one of them with its process; found with ``DISCOVER: ["fast_kinds"]``."""

from __future__ import annotations

import os
import signal

from durable_jobs import reconciler
from durable_jobs.kinds import Done, Kind, register
from durable_jobs.runner import SliceContext

# So that a job that is orphaned again and again is waited for no longer than a test lasts. In the workers of a test,
# which say so, and not in the tests' own process, which imports this module as well.
SPACING = "DURABLE_JOBS_TEST_FAST_SPACING"
reconciler.FIRST_SPACING = float(os.environ.get(SPACING, reconciler.FIRST_SPACING))  # type: ignore[misc]


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
