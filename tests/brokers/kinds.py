"""Kinds for workers of brokers; they find them with ``DISCOVER: ["brokers.kinds"]``."""

from __future__ import annotations

import os
import time

from durable_jobs import kinds
from durable_jobs.kinds import Done, Kind, Yield
from durable_jobs.runner import SliceContext
from durable_jobs.testing import transports as suite


class Chunks(Kind):
    """Works for `input` seconds in commits of a tenth, and yields after each `slice_seconds` of them."""

    name = "brokers.chunks"
    queue = suite.QUEUE
    lease_seconds = 2
    slice_seconds = 10
    max_slice_seconds = 60
    pending_ttl_seconds = 2
    orphan_policy = "redrive"

    def step(self, ctx: SliceContext) -> Done | Yield:
        ctx.record(
            "ran", data={"seq": ctx.job.continuation_seq, "redrives": ctx.job.redrives, "pid": os.getpid()}
        )
        while ctx.processed < ctx.input * 10:
            if ctx.should_yield():
                return Yield()
            time.sleep(0.1)
            ctx.save_checkpoint(advance=1)
        return Done(ctx.processed)


class Poison(Kind):
    """Ends the process that runs it."""

    name = "brokers.poison"
    queue = suite.QUEUE
    lease_seconds = 0.5
    pending_ttl_seconds = 2
    max_orphanings = 1
    orphan_policy = "redrive"

    def step(self, ctx: SliceContext) -> Done:
        ctx.record(
            "ran", data={"seq": ctx.job.continuation_seq, "redrives": ctx.job.redrives, "pid": os.getpid()}
        )
        os._exit(1)


KINDS = (*suite.KINDS, Chunks, Poison)
for kind in KINDS:
    kinds.register(kind)
