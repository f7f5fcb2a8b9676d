"""The kinds that the benchmarks run."""

from __future__ import annotations

from typing import Any

from durable_jobs.kinds import Done, Kind, StatusMirror, register


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
class Parking(Noop):
    """The same under the policy that allows no claim ahead."""

    name = "bench.parking"
    orphan_policy = "park"
