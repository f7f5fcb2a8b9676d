"""`make bench-heartbeat`: milliseconds to renew 1,000 leases in one statement, and how many renewals are HOT."""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

from benchmarks import harness
from benchmarks.drain import fill
from benchmarks.harness import Contestant, Goal

BEATS = 20


def leases() -> list[Any]:
    from durable_jobs import connection, store
    from durable_jobs.store import Lease, Probe

    connection.own("beats")
    probes = [Probe("bench", "bench.noop", 0, None, 60.0)]
    claimed: list[Any] = []
    while jobs := store.claim_next("beats", 128, probes):
        claimed += [Lease(one.job.id, "beats", one.job.lease_epoch, 60.0) for one in jobs]
    return claimed


def together() -> dict[str, Any]:
    """As the keeper does it."""
    from django.db import connection

    from durable_jobs import store

    held = leases()
    store.beat_many("beats", held)
    before, times = hot(), []
    for _ in range(BEATS):
        begun = time.perf_counter()
        beats = store.beat_many("beats", held)
        times.append((time.perf_counter() - begun) * 1000)
        assert all(beat.renewed for beat in beats.values())
    after = hot()
    times.sort()
    connection.close()
    share = (after[1] - before[1]) / max(after[0] - before[0], 1)
    return {"value": times[len(times) // 2], "leases": len(held), "hot": share}


def singly() -> dict[str, Any]:
    """The same leases, a statement for each."""
    from durable_jobs import store

    held = leases()
    begun = time.perf_counter()
    for lease in held:
        assert store.beat_many("beats", [lease])[lease.job_id].renewed
    return {"value": (time.perf_counter() - begun) * 1000, "leases": len(held)}


def hot() -> tuple[int, int]:
    """Updates of the table so far, and how many of them were HOT."""
    from django.db import connection

    if connection.vendor != "postgresql":
        return 0, 0
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_force_next_flush()")
        cursor.execute(
            "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'durable_jobs_job'"
        )
        return cursor.fetchone()


def main() -> int:
    options = harness.parser(__doc__).parse_args()
    harness.setup()
    from django.db import connection

    contestants = [
        Contestant("one by one", "singly"),
        Contestant("all in one statement", "together", floor="one by one", goal=Goal(most=10, absolute=True)),
    ]
    with harness.databases():
        result = harness.compare(
            "1,000 leases renewed, ms", "benchmarks.heartbeat", contestants, rounds=options.rounds,
            prepare=lambda one: fill(1000),
        )  # fmt: skip
        shares = [run["hot"] for run in result["contestants"]["all in one statement"]["runs"]]
        if connection.vendor == "postgresql":
            print(f"  HOT: {', '.join(f'{share:.1%}' for share in shares)}")
            harness.judge(result, "share of HOT updates", statistics.median(shares), Goal(least=1))
        harness.keep("heartbeat", [result])
    return 0


if __name__ == "__main__":
    sys.exit(main())
